"""A chat's next turn computes only what is new, also where the template shows the answer otherwise than written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.server.openai.prompts import ToolStyle
from shoal.server.openai.schemas import Function, Tool
from shoal.server.openai.tools import tool_use
from shoal.types import SamplingParams
from tests.support.live import Live, toy
from tests.support.thinking import OPENED, SWITCHED, spoken, thinking_toy

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PATH = "/v1/chat/completions"
BLOCK = 16  # tokens of the toy's blocks at most: what is cached ends with a whole one


THOUGHT = "It is deep, and wet, and blue. " * 4
SAID = "Waves roll and gulls cry over it. " * 4
WRITTEN = {SWITCHED: f"<think>{THOUGHT}</think>{SAID}", OPENED: SAID}


@pytest.fixture(params=WRITTEN)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def live(template: str) -> Iterator[Live]:
    with Live(thinking_toy(template)) as server:
        yield server


def settled(live: Live) -> None:
    """Wait until nothing is being prepared any more."""
    served = live.hub.served
    assert served is not None
    until = time.monotonic() + 60
    quiet = 0
    while quiet < 10:
        assert time.monotonic() < until
        quiet = quiet + 1 if served.engine.stats().running + served.engine.stats().waiting == 0 else 0
        time.sleep(0.01)


def cached(answer: Any) -> tuple[int, int]:
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_thoughts_that_the_template_drops_cost_no_turn_its_cache(live: Live, template: str) -> None:
    """Each turn finds all that the one before it had, and its answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of the sea, and do not be brief. " * 4}]
    for number in range(3):
        more = {"temperature": 0, "thinking_budget": 30, **spoken(WRITTEN[template])}
        answer = live.post(PATH, {"messages": messages, **more})
        assert answer.status_code == 200, answer.text
        found, prompt = cached(answer)
        new = len(messages[-1]["content"]) + len("<user><assistant><think>") + BLOCK
        assert not number or found >= prompt - new, f"turn {number}: {found} of {prompt} cached"
        said = answer.json()["choices"][0]["message"]
        messages.append({"role": "assistant", "content": said["content"]})
        messages.append({"role": "user", "content": f"And then? {number}"})
        settled(live)


def test_a_call_that_comes_makes_way_for_itself() -> None:
    """Whatever is being prepared is given up: no call waits for it, and nothing of it stays."""
    with Live(toy(step_s=0.005, max_batch=1)) as live:
        body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2, "temperature": 0}
        for _ in range(4):
            assert live.post(PATH, body).status_code == 200
        settled(live)
        served = live.hub.served
        assert served is not None
        assert served.engine.stats().running == 0
        assert served.leases == 0


def test_tools_that_may_not_be_called_stay_in_the_prompt(live: Live) -> None:
    messages = [{"role": "user", "content": "Look around. " * 20}]
    free = live.post(PATH, {"messages": messages, "tools": [TOOL], **spoken("Yes.")})
    barred = live.post(PATH, {"messages": messages, "tools": [TOOL], "tool_choice": "none", "max_tokens": 8})
    assert barred.status_code == 200, barred.text
    found, prompt = cached(barred)
    assert prompt == cached(free)[1]
    assert found >= prompt - BLOCK
    assert barred.json()["choices"][0]["message"].get("tool_calls") is None


def test_what_a_chat_left_is_kept_while_a_tool_runs() -> None:
    body = {"messages": [{"role": "user", "content": "Look around. " * 20}], "tools": [TOOL], "max_tokens": 200}
    with Live(thinking_toy(SWITCHED)) as live:
        assert live.post(PATH, {**body, **spoken("Yes.")}).status_code == 200
        settled(live)
        keeping = live.engine._loop.scheduler._keeping
        assert not len(keeping)
        answer = live.post(PATH, {**body, "tool_choice": "required", "temperature": 0})
        assert answer.json()["choices"][0]["message"]["tool_calls"], answer.text
        until = time.monotonic() + 60
        while not len(keeping):
            assert time.monotonic() < until
            time.sleep(0.01)


def tool(name: str) -> Tool:
    return Tool(type="function", function=Function(name=name))


@pytest.mark.parametrize("style", list(ToolStyle))
def test_a_barred_call_cannot_be_written(style: ToolStyle) -> None:
    use = tool_use([tool("get-it"), tool("b")], "none", None)
    assert (use.active, len(use.shown)) == (False, 2)
    sampling = SamplingParams(**use.grammar(style))
    with toy() as engine:
        engine.check_grammar(sampling)
        grammar = engine._loop.inputs.compile(sampling)
        for text, ok in (
            ("Hello {world} [1, 2]", True),
            ('{"name": "other", "x": 1}', True),
            ('Well <tool_call>{"name": "b"}', False),
            ('[{"name": "get-it", "arguments": {}}]', False),
            (' {"name":\n"b"', False),
        ):
            constraint = grammar.start()
            for token in text.encode():
                constraint.accept(token)
            assert (constraint.error is None) == ok, text


def test_with_a_schema_only_the_schema_holds() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    use = tool_use([tool("b")], "none", None)
    assert set(use.grammar(ToolStyle.HERMES, schema)) == {"json_schema"}
