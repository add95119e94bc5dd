"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal.server.answer import AnswerReader, Piece
from shoal.server.errors import bad_request
from shoal.server.generation import Api, Call, choice_seeds, disconnected, output_limit, unless_gone
from shoal.server.hub import Served
from shoal.server.openai.fields import make_sampling
from shoal.server.openai.logprobs import chat_logprobs, prompt_logprobs
from shoal.server.openai.prompts import Chat, prompt_tokens, tool_style
from shoal.server.openai.schemas import ChatRequest
from shoal.server.openai.toolcalls import WrittenCall, note_call
from shoal.server.openai.tools import ToolUse, tool_use
from shoal.server.reasoning import Effort, Thought
from shoal.server.sse import ChoiceWriter, EventStream, Template, encode
from shoal.types import Event, FinishReason, Request, Result

_PREDICTED_CHARACTERS = 8  # that are read of a prediction for each token of the context
NAMES = {
    "prompt": "messages",
    "prompt_tokens": "messages",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
    "logprobs": "top_logprobs",
    "deadline_s": "timeout",
}


async def chat_completions(api: Api, http: HttpRequest, body: ChatRequest) -> Response:
    """Answer a conversation, whole or as a stream."""
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    count = body.n or 1
    api.check_count(count, "n")
    structured = body.response_format is not None and body.response_format.type != "text"
    names = dict(NAMES)
    if body.structured_outputs is not None and not structured:
        names["json_schema"] = "structured_outputs"
    if use.shown or structured:
        names["grammar"] = "response_format" if structured else "tools"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    call = await api.open(http, body, lambda served: _requests(api, served, body, use), names)
    answers = [ChatAnswer(call, use, index) for index in range(count)]
    if body.stream:
        return EventStream(ChatWriter(call, body, answers), call, api.config)
    try:
        await unless_gone(disconnected(http.receive), _run(call, answers))
        return JSONResponse(_whole(call, body, answers))
    finally:
        call.close()


def _requests(api: Api, served: Served, body: ChatRequest, use: ToolUse) -> Sequence[Request]:
    codec = served.engine.codec
    if codec is None:
        raise bad_request("the served model has no tokenizer", "messages")
    arguments = body.sampling()
    schema = body.response_format.schema_of() if body.response_format is not None else None
    held = use.held(served.engine, tool_style(codec), schema, "tools.{}.function.parameters")
    if use.barred and body.structured_outputs is not None:
        held = {}  # what it must follow is said already
    if held and body.structured_outputs is not None:
        raise bad_request("structured_outputs contradicts response_format or tools", "structured_outputs")
    given = body.structured_outputs.json_ if body.structured_outputs is not None else None
    body.note_unchecked(use.unchecked(given if schema is None else schema))
    arguments.update(held)
    chat = body.show_chat(Chat(body.messages, use.shown, body.chat_template_kwargs, body.reasoning_effort))
    tokens = prompt_tokens(served.engine, chat)
    arguments = Effort(body.reasoning_effort, body.thinking_budget).sampling(codec, tokens, arguments)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    arguments["max_tokens"] = output_limit(served, len(tokens), wanted)
    if body.logprobs:
        arguments["logprobs"] = body.top_logprobs or 0
    if body.prompt_logprobs is not None:
        arguments["prompt_logprobs"] = body.prompt_logprobs
    seeds = choice_seeds(arguments.pop("seed", None), body.n or 1)
    predicted: list[int] = []
    if body.prediction is not None:  # no more of it than can come: it is tokenised
        most = _PREDICTED_CHARACTERS * served.engine.spec.context_length
        predicted = codec.encode(body.prediction.text[:most], add_special=False)
    sampled = (make_sampling({**arguments, "seed": seed}) for seed in seeds)
    return [replace(api.request(body, tokens, sampling), predicted=predicted) for sampling in sampled]


class ChatAnswer:
    """One choice as it grows: text, tool calls, log-probabilities, and why it ended."""

    def __init__(self, call: Call, use: ToolUse, index: int) -> None:
        self.index = index
        self.content = ""
        self.reasoning = ""
        self.calls: list[WrittenCall] = []
        self.logprobs: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self._call = call
        self._reader = AnswerReader(call, index, use)

    def take(self, happened: Event) -> list[Piece]:
        """Take an event in; gives what is new in the answer."""
        codec = self._call.served.engine.codec
        assert codec is not None
        self.tokens += happened.tokens
        self.logprobs += chat_logprobs(happened.logprobs, codec)
        pieces = self._reader.take(happened)
        for piece in pieces:
            if isinstance(piece, str):
                self.content += piece
            elif isinstance(piece, Thought):
                self.reasoning += piece.text
            else:
                note_call(self.calls, piece)
        return pieces

    def finish_reason(self, result: Result) -> str:
        """`tool_calls` whenever there are whole ones, else why the generation ended."""
        cut = result.finish_reason is FinishReason.LENGTH
        if self.calls and (self.calls[-1].done or not cut):
            return "tool_calls"
        return "length" if cut else "stop"

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call_object(call) for call in self.calls]
        return message | _reasoning(self.reasoning) if self.reasoning else message


def _reasoning(text: str) -> dict[str, Any]:
    """What was thought, under both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def call_object(call: WrittenCall) -> dict[str, Any]:
    """A tool call as the API writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _run(call: Call, answers: Sequence[ChatAnswer]) -> None:
    await call.finish(lambda index, happened: answers[index].take(happened))


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": call.served.name,
        "service_tier": "default",
        "system_fingerprint": "shoal",
    }


def _whole(call: Call, body: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    call.check_complete()
    choices = []
    for answer in answers:
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": answer.message(),
            "logprobs": {"content": answer.logprobs, "refusal": None} if body.logprobs else None,
            "finish_reason": answer.finish_reason(call.results[answer.index]),
        }
        if body.return_token_ids:
            choice["token_ids"] = answer.tokens
        choices.append(choice)
    whole = {**_head(call, "chat.completion"), "choices": choices, "usage": call.usage(per_prompt=len(answers))}
    codec = call.served.engine.codec
    if body.prompt_logprobs is not None and codec is not None:
        whole["prompt_logprobs"] = prompt_logprobs(call.results[0].prompt_logprobs, codec, body.prompt_logprobs)
    return whole


class ChatWriter(ChoiceWriter):
    """The stream of a chat."""

    def __init__(self, call: Call, body: ChatRequest, answers: Sequence[ChatAnswer]) -> None:
        super().__init__(call, _head(call, "chat.completion.chunk"), body.stream_options, len(answers))
        self._body = body
        self._answers = answers
        self._begun: set[int] = set()
        self._texts = [Template(partial(_text, answer.index)) for answer in answers]

    def choices(self, index: int, happened: Event) -> list[str]:
        """The role first, then what is new, at the end the reason."""
        answer = self._answers[index]
        choices: list[str] = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(encode(_choice(index, {"role": "assistant", "content": ""})))
        deltas = self._deltas(answer, happened)
        told = self._told(happened)
        if told:
            deltas = deltas or [{"content": ""}]
            choices += [self._encode(index, delta) for delta in deltas[:-1]]
            choices.append(encode({**_choice(index, deltas[-1]), **told}))
        else:
            choices += [self._encode(index, delta) for delta in deltas]
        if happened.result is not None:
            choices.append(encode({**_choice(index, {}), "finish_reason": answer.finish_reason(happened.result)}))
        return choices

    def _encode(self, index: int, delta: dict[str, Any]) -> str:
        text = delta.get("content")
        return encode(_choice(index, delta)) if text is None else self._texts[index].fill(text)

    @staticmethod
    def _deltas(answer: ChatAnswer, happened: Event) -> list[dict[str, Any]]:
        number = len(answer.calls) - 1
        deltas: list[dict[str, Any]] = []
        for piece in answer.take(happened):
            if isinstance(piece, str):
                deltas.append({"content": piece})
                continue
            if isinstance(piece, Thought):
                deltas.append(_reasoning(piece.text))
                continue
            number += piece.name is not None
            if piece.name is not None:  # name and id first, then the arguments as they come; `index` on all
                begin = call_object(WrittenCall(piece.id or "", piece.name))
                deltas.append({"tool_calls": [{**begin, "index": number}]})
            if piece.arguments:
                more = {"index": number, "function": {"arguments": piece.arguments}}
                deltas.append({"tool_calls": [more]})
        return deltas

    def _told(self, happened: Event) -> dict[str, Any]:
        """What was asked for beside the text."""
        told: dict[str, Any] = {}
        codec = self._call.served.engine.codec
        if self._body.logprobs and happened.logprobs and codec is not None:
            told["logprobs"] = {"content": chat_logprobs(happened.logprobs, codec), "refusal": None}
        if self._body.return_token_ids and happened.tokens:
            told["token_ids"] = list(happened.tokens)
        return told


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _text(index: int, text: str) -> dict[str, Any]:
    return _choice(index, {"content": text})
