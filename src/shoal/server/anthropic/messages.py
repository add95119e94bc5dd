"""`POST /v1/messages`: an answer as a list of content blocks, whole or as typed events; and its tokens counted."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal.server.answer import AnswerReader
from shoal.server.anthropic.schemas import CountRequest, MessagesRequest
from shoal.server.errors import ApiError, anthropic_body, bad_request
from shoal.server.generation import Api, Call, Wave, disconnected, output_limit, unless_gone
from shoal.server.hub import Served
from shoal.server.openai.calljson import CallDelta
from shoal.server.openai.fields import make_sampling
from shoal.server.openai.prompts import Chat, prompt_tokens, tool_style
from shoal.server.openai.toolcalls import WrittenCall
from shoal.server.openai.tools import ToolUse, tool_use
from shoal.server.reasoning import Thought
from shoal.server.sse import EventStream, event
from shoal.types import Event, FinishReason, Request, Result

NAMES = {
    "prompt": "messages",
    "prompt_tokens": "messages",
    "json_schema": "output_config.format",
    "stop": "stop_sequences",
    "deadline_s": "timeout",
    "grammar": "tools",
}


async def messages(api: Api, http: HttpRequest, body: MessagesRequest) -> Response:
    """Answer a conversation, whole or as a stream."""
    use = _use(body)
    call = await api.open(http, body, lambda served: [_request(api, served, body, use)], NAMES)
    answer = MessageAnswer(call, body, use)
    if body.stream:
        return EventStream(MessageWriter(call, answer), call, api.config)
    try:
        await unless_gone(disconnected(http.receive), call.finish(lambda _, happened: answer.take(happened)))
        call.check_complete()
        return JSONResponse(answer.document())
    finally:
        call.close()


async def count_tokens(api: Api, body: CountRequest) -> dict[str, int]:
    """How many tokens the prompt of such a call would have."""
    served = api.hub.acquire(body.model)
    try:
        return {"input_tokens": len(await asyncio.to_thread(_prompt, served, body, _use(body)))}
    finally:
        api.hub.release(served)


def _use(body: CountRequest) -> ToolUse:
    return tool_use(body.chat_tools(), body.choice(), body.parallel)


def _prompt(served: Served, body: CountRequest, use: ToolUse) -> Sequence[int]:
    if served.engine.codec is None:
        raise bad_request("the served model has no tokenizer", "messages")
    turns, prefill = body.chat()
    chat = Chat(turns, use.shown, effort=body.effort().level, prefill=prefill)
    return prompt_tokens(served.engine, chat if prefill else body.show_chat(chat))


def _request(api: Api, served: Served, body: MessagesRequest, use: ToolUse) -> Request:
    tokens = _prompt(served, body, use)
    codec = served.engine.codec
    assert codec is not None
    arguments = body.sampling()
    arguments |= use.held(served.engine, tool_style(codec), body.schema_of(), "tools.{}.input_schema")
    body.note_unchecked(use.unchecked(body.schema_of()))
    if body.stop_sequences:
        arguments["stop"] = tuple(body.stop_sequences)
    arguments["max_tokens"] = output_limit(served, len(tokens), body.max_tokens)
    return api.request(body, tokens, make_sampling(body.effort().sampling(codec, tokens, arguments)))


class MessageAnswer:
    """The content blocks as they grow, and the events that tell of it.

    At most one block is open. The input of a tool is told when it is whole, so that it always is an object; what is no
    JSON, or was cut off, is under the key `INVALID_JSON`.
    """

    def __init__(self, call: Call, body: MessagesRequest, use: ToolUse) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._call = call
        self._stops = body.stop_sequences or []
        self._reader = AnswerReader(call, 0, use)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._open = ""  # the type of the block that is open
        self._written: WrittenCall | None = None
        self._reason: str | None = None
        self._stop: str | None = None

    def take(self, happened: Event) -> list[dict[str, Any]]:
        """Take an event of the engine in; gives the events it makes."""
        told: list[dict[str, Any]] = []
        for piece in self._reader.take(happened):
            if isinstance(piece, Thought):
                told += self._grow("thinking", "thinking_delta", piece.text)
            elif isinstance(piece, str):
                told += self._grow("text", "text_delta", piece)
            else:
                told += self._called(piece)
        if happened.result is not None:
            cut_call = self._written is not None
            told += [*self._end_call(), *self._close()]
            self._finish(happened.result, cut_call=cut_call)
        return told

    def _grow(self, kind: str, delta: str, text: str) -> list[dict[str, Any]]:
        told = []
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {"citations": None}
            told = [*self._close(), self._begin({"type": kind, kind: "", **more})]
            self._open = kind
        self.blocks[-1][kind] += text
        return [*told, self._delta({"type": delta, kind: text})]

    def _called(self, delta: CallDelta) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        if delta.name is not None:
            told = [*self._end_call(), *self._close()]
            self._written = WrittenCall(f"toolu_{secrets.token_hex(12)}", delta.name)
            block = {"type": "tool_use", "id": self._written.id, "name": delta.name, "input": {}}
            told.append(self._begin({**block, "caller": {"type": "direct"}}))
            self._open = "tool_use"
        if self._written is not None:
            self._written.arguments += delta.arguments
        return [*told, *self._end_call(), *self._close()] if delta.done else told

    def _end_call(self) -> list[dict[str, Any]]:
        written, self._written = self._written, None
        if written is None:
            return []
        self.blocks[-1]["input"] = given = _object(written.arguments)
        text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        told = []
        if self._open == "thinking":
            block = self.blocks[-1]
            digest = hashlib.sha256(block["thinking"].encode("utf-8", "replace")).digest()
            block["signature"] = base64.b64encode(digest).decode()
            told = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        self._open = ""
        return [*told, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _finish(self, result: Result, *, cut_call: bool) -> None:
        called = any(block["type"] == "tool_use" for block in self.blocks)
        if result.finish_reason is FinishReason.LENGTH and (cut_call or not called):
            self._reason = "max_tokens"
        elif called:
            self._reason = "tool_use"
        else:
            self._stop = self._stopped_by(result)
            self._reason = "end_turn" if self._stop is None else "stop_sequence"

    def _stopped_by(self, result: Result) -> str | None:
        """The stop sequence that ended the answer: the text is cut before it, the tokens are not."""
        codec = self._call.served.engine.codec
        if codec is None or not self._stops:
            return None
        written = b"".join(map(codec.token_bytes, result.tokens)).decode("utf-8", "replace")
        rest = written[len(result.text) :]
        return max((stop for stop in self._stops if rest.startswith(stop)), key=len, default=None)

    def document(self) -> dict[str, Any]:
        """The whole message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.served.name,
            "content": self.blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "stop_details": None,
            "container": None,
            "usage": {**self.usage(), "cache_creation": None, "service_tier": "standard", "inference_geo": None},
        }

    def usage(self) -> dict[str, Any]:
        """Token counts: `input_tokens` are those that did not come from the cache."""
        if not self._call.results:
            prompt, cached, output = len(self._call.prompt(0)), 0, 0
        else:
            usage = self._call.usage()
            prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
            "output_tokens_details": {"thinking_tokens": self._call.thinking_tokens},
            "server_tool_use": None,
        }

    def delta(self) -> dict[str, Any]:
        """The event that says how the message ended."""
        ended = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return {"type": "message_delta", "delta": ended, "usage": self.usage()}


def _object(arguments: str) -> dict[str, Any]:
    """What a model wrote as an object, if it can go out as JSON: not with 1e999, or half of a surrogate pair."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {"INVALID_JSON": arguments}
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


class MessageWriter:
    """The stream of a message: typed events."""

    def __init__(self, call: Call, answer: MessageAnswer) -> None:
        self._call = call
        self._answer = answer

    @staticmethod
    def _tell(documents: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(event(document, document["type"]) for document in documents)

    def begin(self) -> bytes:
        """The message as it is before anything is written."""
        return self._tell([{"type": "message_start", "message": self._answer.document()}])

    def write(self, wave: Wave) -> bytes:
        """What the events add to the blocks."""
        return self._tell([told for _, happened in wave for told in self._answer.take(happened)])

    def end(self) -> bytes:
        """How it ended."""
        return self._tell([self._answer.delta(), {"type": "message_stop"}])

    def fail(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return event(anthropic_body(error, self._call.record["request_id"]), "error")
