"""A matrix of our own over the `openai` SDK: each field that clients rely on, and what must come of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.conform.outcome import CaseOutcome, Target, attempt

_USER = [{"role": "user", "content": "Name one colour."}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the wall.",
        "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
    },
}
_PATIENCE_S = 20
Cases: TypeAlias = dict[str, Callable[[], object]]
_COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


def matrix(target: Target) -> Iterator[CaseOutcome]:
    """Every case of the matrix."""
    import openai

    with openai.OpenAI(base_url=target.url, api_key="none", max_retries=0, timeout=120) as client:
        caller = _Caller(client, target.model, openai)
        for name, case in {**_chats(caller), **_refusals(caller), **_others(caller)}.items():
            yield attempt(name, case)
            _wait_for(client, openai)


def _wait_for(client: Any, openai: Any) -> None:
    """Wait for a server that the last case has ended and somebody starts again: the next case is not at fault."""
    for _ in range(_PATIENCE_S * 4):
        with suppress(openai.APIError):
            client.models.list(timeout=5)
            return
        time.sleep(0.25)


@dataclass(frozen=True, slots=True)
class _Caller:
    """Calls of one server, with fields that a case may change."""

    client: Any
    model: str
    openai: Any

    def chat(self, **fields: Any) -> Any:
        body = {"model": self.model, "messages": _USER, "max_tokens": 12, "temperature": 0}
        return self.client.chat.completions.create(**{**body, **fields})

    def text(self, **fields: Any) -> Any:
        body = {"model": self.model, "prompt": "One, two,", "max_tokens": 6, "temperature": 0}
        return self.client.completions.create(**{**body, **fields})

    def refused(self, **fields: Any) -> None:
        try:
            self.chat(**fields)
        except self.openai.BadRequestError:
            return
        raise AssertionError("was not refused with status 400")


def _chats(caller: _Caller) -> Cases:
    chat = caller.chat
    return {
        "chat": lambda: _is(chat().choices[0].message.role == "assistant", "no message of the assistant"),
        "chat: content as parts": lambda: chat(
            messages=[{"role": "user", "content": [{"type": "text", "text": "Name one colour."}]}]
        ),
        "chat: role developer": lambda: chat(messages=[{"role": "developer", "content": "Be brief."}, *_USER]),
        "chat: stream equals whole": lambda: _same_stream(chat),
        "chat: usage in the stream": lambda: _stream_usage(chat),
        "chat: n": lambda: _is(len(chat(n=2).choices) == 2, "n=2 gave another number of choices"),
        "chat: seed": lambda: _is(
            _text(chat(seed=7, temperature=1)) == _text(chat(seed=7, temperature=1)), "a seed gave two answers"
        ),
        "chat: stop": lambda: _is(" " not in _text(chat(stop=[" "])), "the stop string is in the answer"),
        "chat: finish_reason length": lambda: _is(
            chat(max_tokens=1).choices[0].finish_reason == "length", "a cut answer does not say so"
        ),
        "chat: max_completion_tokens": lambda: _is(
            chat(max_tokens=caller.openai.omit, max_completion_tokens=3).usage.completion_tokens <= 3, "is ignored"
        ),
        "chat: logit_bias": lambda: _is(
            _text(chat(logit_bias={"28": 100}, max_tokens=4)) != _text(chat(max_tokens=4)), "is ignored"
        ),
        "chat: logprobs": lambda: _logprobs(chat(logprobs=True, top_logprobs=3)),
        "chat: json_schema": lambda: _coloured(chat(response_format=_form(), max_tokens=40)),
        "chat: json_object": lambda: json.loads(_text(chat(response_format={"type": "json_object"}, max_tokens=400))),
        "chat: tool_choice required": lambda: _called(chat(tools=[_TOOL], tool_choice="required", max_tokens=80)),
        "chat: tool_choice by name": lambda: _called(
            chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "paint"}}, max_tokens=80)
        ),
        "chat: tool_choice none": lambda: _is(
            not chat(tools=[_TOOL], tool_choice="none").choices[0].message.tool_calls, "a tool was called"
        ),
        "chat: tool calls in a stream": lambda: _streamed_call(chat),
        "chat: a round of tools": lambda: chat(messages=_round(), tools=[_TOOL]),
        "chat: cached tokens": lambda: _cached(chat),
    }


def _refusals(caller: _Caller) -> Cases:
    refused = caller.refused
    return {
        "refused: no messages": lambda: refused(messages=[]),
        "refused: max_tokens below 0": lambda: refused(max_tokens=-1),
        "refused: temperature of a word": lambda: refused(temperature="hot"),
        "refused: an unknown role": lambda: refused(messages=[{"role": "nobody", "content": "x"}]),
        "refused: an image for a model of text": lambda: refused(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}
            ]
        ),
        "refused: a field that does not exist": lambda: refused(extra_body={"tempurature": 1}),
        "refused: a schema that nothing fits": lambda: refused(
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": []}}}
        ),
    }


def _others(caller: _Caller) -> Cases:
    text, responses = caller.text, caller.client.responses
    return {
        "text": lambda: _is(bool(text().choices[0].text), "no text"),
        "text: echo": lambda: _is(text(echo=True).choices[0].text.startswith("One, two,"), "the prompt is missing"),
        "text: echo with logprobs": lambda: _scored(text(echo=True, logprobs=1, max_tokens=1)),
        "text: several prompts": lambda: _is(len(text(prompt=["a", "b"]).choices) == 2, "not one choice a prompt"),
        "text: token ids": lambda: text(prompt=[1, 2, 3]),
        "responses": lambda: _is(
            responses.create(model=caller.model, input="Name one colour.", max_output_tokens=8).object == "response",
            "none",
        ),
        "responses: stream": lambda: _typed(responses, caller.model),
        "models": lambda: _is(len(caller.client.models.list().data) >= 1, "no model"),
        "models: an unknown one is 404": lambda: _unknown(caller),
    }


def _is(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _text(answer: Any) -> str:
    return answer.choices[0].message.content or ""


def _form() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "colour", "schema": _COLOUR, "strict": True}}


def _same_stream(chat: Callable[..., Any]) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(stream=True) if chunk.choices]
    _is("".join(pieces) == _text(chat()), "the stream adds up to another text")


def _stream_usage(chat: Callable[..., Any]) -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    _is(chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0, "no usage in the last chunk")


def _logprobs(answer: Any) -> None:
    content = answer.choices[0].logprobs.content
    _is(len(content) == answer.usage.completion_tokens, "not one entry a token")
    _is(all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content), "not three alternatives")


def _coloured(answer: Any) -> None:
    _is(json.loads(_text(answer)).get("colour") in ("red", "blue"), "the answer does not follow the schema")


def _called(answer: Any) -> None:
    (call,) = answer.choices[0].message.tool_calls
    _is(answer.choices[0].finish_reason == "tool_calls", "finish_reason is not tool_calls")
    _is(json.loads(call.function.arguments)["colour"] in ("red", "blue"), "the arguments do not follow the schema")


def _streamed_call(chat: Callable[..., Any]) -> None:
    chunks = chat(tools=[_TOOL], tool_choice="required", max_tokens=80, stream=True)
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    _is(calls[0].function.name == "paint" and bool(calls[0].id), "the first piece has no name or no id")
    _is(json.loads("".join(call.function.arguments or "" for call in calls))["colour"] in ("red", "blue"), "no JSON")


def _round() -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    return [*_USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def _cached(chat: Callable[..., Any]) -> None:
    long = [{"role": "user", "content": "Name one colour. " * 40}]
    chat(messages=long)
    details = chat(messages=long).usage.prompt_tokens_details
    _is(details is not None and (details.cached_tokens or 0) > 0, "a prompt sent twice reports no cached tokens")


def _scored(answer: Any) -> None:
    told = answer.choices[0].logprobs
    _is(told.token_logprobs[0] is None, "the first token has a log-probability")
    _is(len(told.token_logprobs) > 3 and all(value <= 0 for value in told.token_logprobs[1:]), "not one a token")


def _typed(responses: Any, model: str) -> None:
    kinds = [event.type for event in responses.create(model=model, input="x", max_output_tokens=4, stream=True)]
    _is(kinds[0] == "response.created", "does not begin with response.created")
    _is(kinds[-1] in ("response.completed", "response.incomplete"), "does not end with the whole response")


def _unknown(caller: _Caller) -> None:
    try:
        caller.chat(model="no-such-model")
    except caller.openai.NotFoundError:
        return
    raise AssertionError("another model answered in its place")
