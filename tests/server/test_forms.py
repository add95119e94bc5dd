"""Conversations as clients send them back: with nulls for what nobody set, and fields as their SDKs dump them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine.loading import ModelCodec
from shoal.models.template import ChatTemplate
from shoal.server.openai.prompts import Chat, chat_tokens
from shoal.server.openai.schemas import ChatMessage, Function, FunctionCall, Tool, ToolCall
from tests.support.live import LETTERS, Live, error_of

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "text"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 1,
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 1,
}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
BODIES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/completions": TEXT}
FREE = ("parameters", "metadata")  # what callers may put anything into


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a body whose fields are ours."""
    if isinstance(value, dict):
        yield value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        if key not in FREE:
            yield from objects(child)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_accepted_as_null_and_refused_by_name_otherwise(live: Live, path: str) -> None:
    for number in range(len(list(objects(BODIES[path])))):
        body = copy.deepcopy(BODIES[path])
        place = list(objects(body))[number]
        place["no_such_field"] = place["async_"] = None
        assert live.post(path, body).status_code == 200, place
        place["no_such_field"] = 1
        answer = live.post(path, body)
        assert answer.status_code == 400
        assert "no_such_field" in (error_of(answer)["param"] or ""), place


def test_answers_go_back_as_the_sdk_dumps_them(live: Live) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    from openai.types.responses import ResponseFunctionToolCall

    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"temperature": 0, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        messages: Any = [{"role": "user", "content": "hi"}]
        message = client.chat.completions.create(model="toy", messages=messages, **fields).choices[0].message
        [call, *_] = message.tool_calls
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42", "name": None}]
        client.chat.completions.create(model="toy", messages=messages, max_tokens=1, logit_bias=LETTERS)
        flat: Any = [{"type": "function", "name": "look", "parameters": None, "strict": None}]
        told = client.responses.create(model="toy", input="hi", tools=flat, tool_choice="required", temperature=0)
        items = [item.model_dump() for item in told.output]
        # What an SDK knows beyond what came, it dumps as null: `async_`, `caller`, `namespace`, ...
        items.append(
            ResponseFunctionToolCall(type="function_call", call_id="c", name="look", arguments="").model_dump()
        )
        assert None in items[-1].values()
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "42", "id": None, "status": None}
            for item in items
            if item["type"] == "function_call"
        ]
        client.responses.create(model="toy", input=[*items, *outputs], max_output_tokens=1)


@pytest.mark.parametrize("arguments", ["", " \n", "null", None])
def test_calls_without_arguments_come_back_in_every_api(live: Live, arguments: str | None) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        for absent in [False, *([True] if arguments is None else [])]:
            body = copy.deepcopy(BODIES[path])
            call = body["messages"][1]["tool_calls"][0]["function"] if "messages" in body else body["input"][1]
            call["arguments"] = arguments
            if absent:
                del call["arguments"]
            assert live.post(path, body).status_code == 200, call


def test_a_template_with_tools_gets_results_in_order_and_named() -> None:
    template = ChatTemplate(
        "{% set t = tools %}{% for m in messages %}[{{ m.role }} {{ m.name }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]"
        "{% endfor %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    )
    told: list[str] = []
    tokenizer: Any = SimpleNamespace(chat_template=template, eos_ids={0}, token_bytes=lambda token: b"")
    tokenizer.encode_chat = told.extend
    calls = [ToolCall(id=f"c{i}", function=FunctionCall(name=name, arguments="")) for i, name in enumerate("ab")]
    results = [ChatMessage(role="tool", tool_call_id=f"c{i}", content=str(i)) for i in (1, 0)]
    messages = [ChatMessage(role="assistant", tool_calls=calls), *results]
    tool = Tool(type="function", function=Function(name="a", description="Čeština, 中文"))
    chat_tokens(ModelCodec(tokenizer), Chat(messages, [tool]))
    text = "".join(told)
    assert "[assistant  (a {})(b {})][tool a 0][tool b 1]" in text
    assert "Čeština, 中文" in text
