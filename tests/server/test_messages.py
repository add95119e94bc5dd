"""The Anthropic Messages API, through its SDK unmodified: text, streams, tools, thinking, counting, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="the extra `clients` is not installed")

import anthropic
from anthropic import Anthropic

from shoal.server.anthropic.messages import _object
from shoal.server.openai import prompts
from tests.support.live import Live, toy
from tests.support.thinking import SWITCHED, thinking_toy

THOUGHT = "<think>It is 2, I think.</think>Two."
TOOL = {
    "name": "weather",
    "description": "Počasí ve městě",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Brno"]}}, "required": ["city"]},
}
USER: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Brno?"}]


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    with Live(thinking_toy(SWITCHED)) as server:
        yield server


OPEN: list[Anthropic] = []


def sdk(server: Live, api_key: str = "none") -> Any:
    client = Anthropic(base_url=server.url, api_key=api_key, max_retries=0)
    OPEN.append(client)
    return client


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A client that is only dropped leaves its sockets to the garbage collector."""
    yield
    while OPEN:
        OPEN.pop().close()


def test_a_conversation_is_answered(live: Live) -> None:
    client = sdk(live)
    arguments: dict[str, Any] = {"model": "toy", "max_tokens": 5, "messages": USER, "extra_body": {"temperature": 0}}
    first = client.messages.create(**arguments, system="Be brief.", metadata={"user_id": "u1"})
    assert first.type == "message"
    assert first.stop_reason == "max_tokens"
    assert first.usage.output_tokens == 5
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    again = client.messages.create(**arguments, system=marked)
    assert again.usage.cache_read_input_tokens > 0
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == prompt
    counted = client.messages.count_tokens(model="toy", messages=USER, system="Be brief.")
    assert counted.input_tokens == prompt


def test_stream_and_whole_agree(thinker: Live) -> None:
    client = sdk(thinker)
    arguments: dict[str, Any] = {"model": "toy", "messages": USER}
    for extra in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        arguments |= {"max_tokens": 40, "extra_body": {"temperature": 0}, **extra}
        whole = client.messages.create(**arguments)
        with client.messages.stream(**arguments) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_tool_is_called_streamed_or_not(live: Live, choice: dict[str, Any]) -> None:
    client = sdk(live)
    arguments: dict[str, Any] = {"model": "toy", "max_tokens": 200, "messages": USER, "tools": [TOOL]}
    arguments["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        events = list(stream)
        final = stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        (call,) = message.content
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Brno"})
        assert call.id.startswith("toolu_")
    assert "input_json" in [event.type for event in events]


def test_a_round_of_tools_goes_on(live: Live) -> None:
    called = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    history = [*USER, {"role": "assistant", "content": [thought, called]}, {"role": "user", "content": [result]}]
    greedy = {"temperature": 0}  # a token drawn at random may end the answer
    answer = sdk(live).messages.create(model="toy", max_tokens=4, messages=history, tools=[TOOL], extra_body=greedy)
    assert answer.usage.output_tokens == 4


def test_thinking_is_a_block_of_its_own() -> None:
    from shoal.server.anthropic.messages import MessageAnswer
    from shoal.types import Event

    class Told:
        def __init__(self, pieces: list[Any]) -> None:
            self.pieces = pieces

        def take(self, happened: Event) -> list[Any]:
            return self.pieces

    from shoal.server.reasoning import ThoughtSplitter, markers_of

    answer = MessageAnswer.__new__(MessageAnswer)
    answer.blocks, answer._open, answer._written = [], "", None
    splitter = ThoughtSplitter(markers_of(SWITCHED))
    pieces = [*splitter.push(THOUGHT), *splitter.finish()]
    answer._reader = Told(pieces)  # type: ignore[assignment]
    told = answer.take(Event("r")) + answer._close()
    assert [block["type"] for block in answer.blocks] == ["thinking", "text"]
    assert answer.blocks[0]["thinking"] == "It is 2, I think."
    assert answer.blocks[0]["signature"]
    assert [each["type"] for each in told].count("content_block_stop") == 2


def test_thinking_is_off_unless_asked_for(thinker: Live) -> None:
    plain = sdk(thinker).messages.count_tokens(model="toy", messages=USER)
    asked = sdk(thinker).messages.count_tokens(
        model="toy", messages=USER, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert plain.input_tokens == asked.input_tokens + len("<think></think>")


def test_a_stop_sequence_is_told(live: Live) -> None:
    bias: dict[str, Any] = {"extra_body": {"temperature": 0}}
    first = sdk(live).messages.create(model="toy", max_tokens=30, messages=USER, **bias)
    text = first.content[0].text
    stop = next(text[at : at + 2] for at in range(3, len(text) - 2) if text[at : at + 2].isprintable())
    again = sdk(live).messages.create(
        model="toy", max_tokens=30, messages=USER, stop_sequences=["\x00\x01", stop], **bias
    )
    assert again.stop_reason == "stop_sequence"
    assert again.stop_sequence == stop
    assert again.content[0].text == text[: text.index(stop)]


def test_an_answer_may_have_been_begun(live: Live) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    count = sdk(live).messages.count_tokens
    assert count(model="toy", messages=begun).input_tokens == count(model="toy", messages=USER).input_tokens + 5


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_wrong_is_named_in_anthropics_shape(live: Live, change: dict[str, Any], named: str) -> None:
    body = {"model": "toy", "max_tokens": 5, "messages": USER, **change}
    answer = live.post("/v1/messages", body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]


def test_formats_that_are_not_checked_are_told_in_the_headers(live: Live) -> None:
    schema = {"type": "object", "properties": {"call": {"type": "string", "format": "phone", "maxLength": 9}}}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    tools = {"tools": [{"name": "f", "input_schema": schema, "strict": True}], "tool_choice": {"type": "any"}}
    for held in (form, tools):
        for stream in (False, True):
            body = {"messages": USER, "max_tokens": 100, "stream": stream, **held}
            answer = live.post("/v1/messages", body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-shoal-note"] == "format not checked: 'phone'"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("place", ["messages", "system", "tools"])
def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_rendered(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, place: str
) -> None:
    monkeypatch.setattr(prompts, "chat_tokens", lambda *_: pytest.fail("it was rendered"))
    long = "x" * 2**21
    filled = {
        "messages": [{"role": "user", "content": long}],
        "system": long,
        "tools": [{**TOOL, "description": long}],
    }
    body: dict[str, Any] = {"messages": USER, place: filled[place]}
    answer = live.post(path, {**body, "max_tokens": 1} if path == "/v1/messages" else body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "tokens" in answer.json()["error"]["message"]


def test_the_sdk_raises_its_own_errors() -> None:
    with Live(toy(), api_key="secret") as server:
        with pytest.raises(anthropic.AuthenticationError):
            sdk(server).messages.create(model="toy", max_tokens=5, messages=USER)
        client = sdk(server, "secret")
        assert client.messages.create(model="toy", max_tokens=5, messages=USER).usage.output_tokens == 5
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=5, messages=USER)


def test_the_real_model_holds_a_conversation(real: Live) -> None:
    with sdk(real).messages.stream(model=real_name(real), max_tokens=12, messages=USER) as stream:
        text = "".join(stream.text_stream)
    assert text
    assert "�" not in text


def real_name(server: Live) -> str:
    assert server.hub.served is not None
    return server.hub.served.name


@pytest.mark.parametrize(
    "written", ['{"a": 1e999}', '{"a": [-1e999]}', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, "7"]
)
def test_input_of_a_tool_that_is_no_json_is_told_as_text(written: str) -> None:
    assert _object(written) == {"INVALID_JSON": written}
