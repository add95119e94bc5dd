"""What is thought apart from what is said: split by family, the same streamed or not, bounded, and back in history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.server.openai.prompts import Chat, chat_tokens
from shoal.server.openai.schemas import ChatMessage
from shoal.server.reasoning import Markers, Thought, ThoughtSplitter, effort_variables, history_field, markers_of
from tests.support.live import LETTERS, Live, chat_body, error_of
from tests.support.thinking import OPENED, SWITCHED, shown, spoken, thinking_codec, thinking_toy

THINK = Markers("<think>", "</think>")
TEXT = "<think>\nIt is 2, I think.\n</think>\n\nTwo."


@pytest.fixture(scope="module")
def switched() -> Iterator[Live]:
    with Live(thinking_toy(SWITCHED)) as server:
        yield server


@pytest.fixture(scope="module")
def opened() -> Iterator[Live]:
    with Live(thinking_toy(OPENED)) as server:
        yield server


def split(pieces: list[str], markers: Markers | None = THINK, *, opened: bool = False) -> tuple[str, str]:
    splitter = ThoughtSplitter(markers, opened=opened)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        (TEXT, False, "It is 2, I think.", "Two."),
        ("It is 2.\n</think>\nTwo.", True, "It is 2.", "Two."),
        ("<think></think>Two.", False, "", "Two."),
        ("Two. <think>no</think>", False, "", "Two. <think>no</think>"),
        ("<thinking>", False, "", "<thinking>"),
        ("<thi", False, "", "<thi"),
        ("<think>cut of", False, "cut of", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("  Two.", False, "", "  Two."),
        ("", False, "", ""),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, opened: bool, thought: str, said: str) -> None:
    assert split([text], opened=opened) == (thought, said)
    assert split(list(text), opened=opened) == (thought, said)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "/", "\n", " ", "a", "é"]), max_size=12), st.data()
)
def test_how_the_text_is_cut_changes_nothing(parts: list[str], data: st.DataObject) -> None:
    text, opened = "".join(parts), data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert split(pieces, opened=opened) == split([text], opened=opened)


def test_a_family_is_known_by_its_template() -> None:
    assert markers_of(SWITCHED) == THINK
    assert markers_of("[THINK]{{ x }}[/THINK]") == ("[THINK]", "[/THINK]")
    assert markers_of("{{ messages }}") is None
    assert history_field(SWITCHED) == "reasoning_content"
    assert history_field("{{ message.thinking }}") == "thinking"
    assert history_field(OPENED) is None
    assert effort_variables(SWITCHED, "none") == {"enable_thinking": False}
    assert effort_variables("{{ reasoning_effort }}", "high") == {"reasoning_effort": "high"}


def deltas(server: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def test_chat_brings_it_under_both_names_streamed_or_not(switched: Live) -> None:
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], **spoken(TEXT)}
    answer = switched.post("/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Two."
    assert message["reasoning_content"] == message["reasoning"] == "It is 2, I think."
    assert 20 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < len(TEXT)
    streamed = [each["choices"][0]["delta"] for each in deltas(switched, "/v1/chat/completions", body)]
    assert "".join(delta.get("content") or "" for delta in streamed) == "Two."
    assert "".join(delta.get("reasoning_content", "") for delta in streamed) == "It is 2, I think."


def test_a_prompt_that_opens_the_thinking_is_noticed(opened: Live) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "1 + 1?"}]}
    # What holds the answer holds what comes behind the thinking, and the budget ends that.
    body |= {"structured_outputs": {"regex": "Two\\."}, "max_tokens": 60, "thinking_budget": 5, "temperature": 0}
    message = opened.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"].strip() == "Two."


def test_a_budget_ends_the_thinking(switched: Live, opened: Live) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
    body |= {"thinking_budget": 7, "max_tokens": 30, "temperature": 0}
    body["logit_bias"] = LETTERS
    answer = opened.post("/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    assert len(message["reasoning_content"]) == 7
    assert len(message["content"]) == 30 - 7 - len("</think>")
    plain = switched.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert "reasoning_content" not in plain  # it never began to think
    assert len(plain["content"]) == 30
    long = switched.post("/v1/chat/completions", {**body, **spoken(TEXT), "thinking_budget": 50}).json()
    assert long["choices"][0]["message"]["content"] == "Two."


def test_effort_none_leaves_no_thinking_open() -> None:
    messages = [ChatMessage(role="user", content="?")]
    for template in (SWITCHED, OPENED):
        codec = thinking_codec(template)
        text = shown(codec, chat_tokens(codec, Chat(messages, effort="none")))
        assert text.rstrip().endswith("</think>")
        assert text.count("<think>") == 1


def test_history_comes_back_as_the_template_wants_it() -> None:
    for name in ("reasoning_content", "reasoning"):
        before = ChatMessage.model_validate({"role": "assistant", "content": "Two.", name: "1 + 1"})
        messages = [before, ChatMessage(role="user", content="?")]
        codec = thinking_codec(SWITCHED)
        assert "<assistant><think>1 + 1</think>Two.<user>" in shown(codec, chat_tokens(codec, Chat(messages)))
        codec = thinking_codec(OPENED)  # it wants none of it
        assert "<assistant>Two.<user>" in shown(codec, chat_tokens(codec, Chat(messages)))


def test_responses_have_reasoning_items_and_take_them_back(switched: Live) -> None:
    body: dict[str, Any] = {"input": "1 + 1?", "include": ["reasoning.encrypted_content"]}
    body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": {"const": 2}}}
    assert switched.post("/v1/responses", body).json()["output"][0]["type"] == "message"
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "one"}]}
    said = {"type": "message", "role": "assistant", "content": "Two."}
    again = switched.post("/v1/responses", {**body, "input": [item, said, {"role": "user", "content": "?"}]})
    assert again.status_code == 200


def test_responses_stream_thinking_as_typed_events(opened: Live) -> None:
    body = {"input": "?", "thinking_budget": 5, "max_output_tokens": 20, "temperature": 0, "top_k": 1}
    body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": {"const": "hi"}}}
    events = deltas(opened, "/v1/responses", body)
    done = events[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message"]
    assert done["output"][1]["content"][0]["text"].strip() == '"hi"'
    thought = "".join(each["delta"] for each in events if each["type"] == "response.reasoning_text.delta")
    assert thought == done["output"][0]["content"][0]["text"]
    assert done["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    whole = opened.post("/v1/responses", body).json()
    assert [item["content"] for item in whole["output"]] == [item["content"] for item in done["output"]]


def test_a_model_that_does_not_think_refuses_by_name(live: Live) -> None:
    for field, value in (("reasoning_effort", "low"), ("thinking_budget", 100)):
        answer = live.post("/v1/chat/completions", chat_body() | {field: value})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == field
    assert live.chat(reasoning_effort="none").status_code == 200
    answer = live.post("/v1/responses", {"input": "?", "reasoning": {"effort": "high"}})
    assert error_of(answer)["param"] == "reasoning.effort"
