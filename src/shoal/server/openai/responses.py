"""`POST /v1/responses`: an answer as a list of output items, whole or as typed events, and kept if asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal.engine.handles import Handle
from shoal.errors import HistoryError
from shoal.server.answer import AnswerReader
from shoal.server.errors import ApiError, bad_request
from shoal.server.generation import Api, Call, Wave, disconnected, output_limit, unless_gone
from shoal.server.hub import Served
from shoal.server.openai.calljson import CallDelta
from shoal.server.openai.fields import make_sampling
from shoal.server.openai.kept import Interrupted
from shoal.server.openai.prompts import Chat, prompt_tokens, tool_style
from shoal.server.openai.responses_schemas import ResponsesRequest
from shoal.server.openai.stored import KeptAccess, caller_of, earlier
from shoal.server.openai.tools import ToolUse, tool_use
from shoal.server.reasoning import Thought
from shoal.server.sse import EventStream, event
from shoal.types import Event, FinishReason, Request

_LOOK_S = 0.05  # how often a response that was taken up is looked at
NAMES = {
    "prompt": "input",
    "prompt_tokens": "input",
    "messages": "input",
    "json_schema": "text.format",
    "max_tokens": "max_output_tokens",
    "deadline_s": "timeout",
}


async def responses(api: Api, http: HttpRequest, body: ResponsesRequest) -> Response:
    """Answer, whole or as a stream."""
    use = tool_use(body.chat_tools(), body.choice(), body.parallel_tool_calls)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    names = {**NAMES, "grammar": "tools" if body.schema_of() is None else "text.format"}
    caller = caller_of(http)
    before = await earlier(api, caller, body.previous_response_id, body.conversation_id)
    name = f"resp_{secrets.token_hex(16)}"
    call = await api.open(http, body, lambda served: [_request(api, served, body, use, before, name)], names)
    output = ResponseOutput(call, body, use, name)
    try:
        await _begin_keeping(api, caller, body, output)
    except BaseException:
        call.abort()
        call.close()
        raise
    if body.stream:
        return EventStream(ResponseWriter(call, output), call, api.config)
    try:
        await unless_gone(disconnected(http.receive), call.finish(lambda _, happened: list(output.take(happened))))
        call.check_complete()
        return JSONResponse(output.document(output.status))
    finally:
        call.close()


async def _begin_keeping(api: Api, caller: str, body: ResponsesRequest, output: ResponseOutput) -> None:
    """Keep the response from here on, unless told otherwise. HistoryError where that was asked for and fails."""
    if body.store is False:
        return
    output.stored = True
    asked = body.model_dump(exclude_none=True, by_alias=True)
    try:
        await api.kept(lambda kept: kept.begin(caller, output.document("in_progress"), body.given(), asked))
    except HistoryError:
        output.stored = False
        if body.store or body.conversation_id is not None:
            raise
        return
    output.keep_in(api.kept)


def follow(api: Api, one: Interrupted, handle: Handle) -> None:
    """Let a response that a stop interrupted go on to its end."""
    body = ResponsesRequest.model_validate(one.body)
    use = tool_use(body.chat_tools(), body.choice(), body.parallel_tool_calls)
    call = Call(api, api.hub.acquire(None), {"request_id": one.id})
    call.adopt(handle)
    output = ResponseOutput(call, body, use, one.id, one.document["created_at"])
    output.stored = True
    output.keep_in(api.kept)

    async def finish() -> None:
        try:
            while not handle.ended:
                await asyncio.sleep(_LOOK_S)
            result = handle.result()
            call.ended(0, result)
            output.take(Event(handle.id, result.tokens, result.text, result=result))
        except ApiError as error:
            output.fail(error)
        finally:
            call.close()

    api.kept.begin_task(finish())


def _request(
    api: Api, served: Served, body: ResponsesRequest, use: ToolUse, before: Sequence[Mapping[str, Any]], name: str
) -> Request:
    codec = served.engine.codec
    if codec is None:
        raise bad_request("the served model has no tokenizer", "input")
    arguments = body.sampling()
    schema = body.schema_of()
    held = use.held(served.engine, tool_style(codec), schema, "tools.{}.parameters")
    body.note_unchecked(use.unchecked(schema))
    chat = body.show_chat(Chat(body.messages(before), use.shown, effort=body.effort().level))
    tokens = prompt_tokens(served.engine, chat)
    limit = output_limit(served, len(tokens), body.max_output_tokens)
    arguments = body.effort().sampling(codec, tokens, {**arguments, **held, "max_tokens": limit})
    return dataclasses.replace(api.request(body, tokens, make_sampling(arguments)), id=name)


class ResponseOutput:
    """The output items as they grow, and the events that tell of it.

    At most one item is open; thinking opens a reasoning item, text a message, a call closes it.
    """

    def __init__(self, call: Call, body: ResponsesRequest, use: ToolUse, name: str, created: int | None = None) -> None:
        self.stored = False
        self.items: list[dict[str, Any]] = []
        self.status = "in_progress"
        self._call = call
        self._body = body
        self._reader = AnswerReader(call, 0, use)
        self._id = name
        self._created = int(time.time()) if created is None else created
        self._error: ApiError | None = None
        self._keeper: KeptAccess | None = None
        self._open: dict[str, Any] | None = None
        self._text = ""

    def keep_in(self, keeper: KeptAccess) -> None:
        """Have the response kept when it has ended, at the latest when its call is closed."""
        self._keeper = keeper
        keeper.running.add(self._id)
        self._call.at_close = self.keep

    def fail(self, error: ApiError) -> None:
        """It ends so."""
        self.status, self._error = "failed", error

    def keep(self) -> None:
        """Keep it as it has ended: cancelled, when its client went away before the end. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            if self.status == "in_progress":
                self._close("incomplete")
                self.status = "cancelled"
            keeper.finish(self.document(self.status))

    def take(self, happened: Event) -> Sequence[dict[str, Any]]:
        """Take an event of the engine in; gives the events it makes."""
        told: list[dict[str, Any]] = []
        for piece in self._reader.take(happened):
            if isinstance(piece, Thought):
                told += self._think(piece.text)
            else:
                told += self._say(piece) if isinstance(piece, str) else self._called(piece)
        if happened.result is not None:
            if not self.items or self._open_type == "reasoning":
                told += self._say("")
            cut = happened.result.finish_reason is FinishReason.LENGTH
            self.status = "incomplete" if cut else "completed"
            told += self._close(self.status)
        return told

    def _say(self, text: str) -> list[dict[str, Any]]:
        told = [] if self._open_type == "message" else [*self._close(), *self._begin_message()]
        self._text += text
        if text:
            assert self._open is not None
            place = {**self._place(self._open), "content_index": 0}
            told.append({"type": "response.output_text.delta", **place, "delta": text, "logprobs": []})
        return told

    def _think(self, text: str) -> list[dict[str, Any]]:
        told = [] if self._open_type == "reasoning" else [*self._close(), *self._begin_reasoning()]
        self._text += text
        assert self._open is not None
        place = {**self._place(self._open), "content_index": 0}
        return [*told, {"type": "response.reasoning_text.delta", **place, "delta": text}]

    def _begin_reasoning(self) -> list[dict[str, Any]]:
        self._text = ""
        item: dict[str, Any] = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "status": "in_progress"}
        item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = item
        place = {**self._place(item), "content_index": 0}
        return [self._added(item), {"type": "response.content_part.added", **place, "part": _thought("")}]

    def _begin_message(self) -> list[dict[str, Any]]:
        self._text = ""
        item: dict[str, Any] = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "status": "in_progress"}
        item |= {"role": "assistant", "content": []}
        self.items.append(item)
        self._open = item
        place = {**self._place(item), "content_index": 0}
        return [self._added(item), {"type": "response.content_part.added", **place, "part": _part("")}]

    @property
    def _open_type(self) -> str | None:
        return self._open["type"] if self._open is not None else None

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return []
        self._open = None
        index = len(self.items) - 1
        item["status"] = status
        if item["type"] == "function_call":
            told = [{**self._place(item), "name": item["name"], "arguments": item["arguments"]}]
            told[0] = {"type": "response.function_call_arguments.done", **told[0]}
        else:
            thought = item["type"] == "reasoning"
            part = _thought(self._text) if thought else _part(self._text)
            item["content"] = [part]
            place = {**self._place(item), "content_index": 0}
            done: dict[str, Any] = {"type": "response.reasoning_text.done", **place, "text": self._text}
            if not thought:
                done |= {"type": "response.output_text.done", "logprobs": []}
            told = [
                done,
                {"type": "response.content_part.done", **place, "part": part},
            ]
        return [*told, {"type": "response.output_item.done", "output_index": index, "item": dict(item)}]

    def _called(self, delta: CallDelta) -> list[dict[str, Any]]:
        told = self._begin_call(delta) if delta.name is not None else []
        item = self._open
        assert item is not None
        if delta.arguments:
            item["arguments"] += delta.arguments
            kind = "response.function_call_arguments.delta"
            told.append({"type": kind, **self._place(item), "delta": delta.arguments})
        return [*told, *self._close()] if delta.done else told

    def _begin_call(self, delta: CallDelta) -> list[dict[str, Any]]:
        told = self._close()
        item: dict[str, Any] = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": delta.id, "name": delta.name, "arguments": ""}
        self.items.append(item)
        self._open = item
        return [*told, self._added(item)]

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1}

    def document(self, status: str) -> dict[str, Any]:
        """The response object."""
        body, error = self._body, self._error
        sampling = body.sampling()
        reasoning = {"effort": body.effort().level, "summary": None}
        fixed: dict[str, Any] = {"reasoning": reasoning, "background": False}
        fixed["previous_response_id"] = body.previous_response_id
        if body.conversation_id is not None:
            fixed["conversation"] = {"id": body.conversation_id}
        failed = {"code": "server_error", "message": error.message} if error is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": failed,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._call.served.name,
            "output": self.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": sampling["temperature"],
            "top_p": sampling.get("top_p", 1.0),
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "text": _plain(body.text) or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": self._usage(),
            "top_logprobs": 0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tool_calls": None,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
            "metadata": body.metadata or {},
            "store": self.stored,
            "service_tier": "default",
            **fixed,
        }

    def _usage(self) -> dict[str, Any] | None:
        if not self._call.results:
            return None
        usage = self._call.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._call.thinking_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _plain(model: Any) -> Any:
    return model.model_dump(by_alias=True, exclude_none=True) if hasattr(model, "model_dump") else model


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class ResponseWriter:
    """The stream of a response: typed events with running numbers."""

    def __init__(self, call: Call, output: ResponseOutput) -> None:
        self._call = call
        self._output = output
        self._number = 0

    def _tell(self, *documents: dict[str, Any]) -> bytes:
        written = []
        for document in documents:
            written.append(event({**document, "sequence_number": self._number}, document["type"]))
            self._number += 1
        return b"".join(written)

    def begin(self) -> bytes:
        """The response as it is before anything is written."""
        begun = self._output.document("in_progress")
        created, progress = ({"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress"))
        return self._tell(created, progress)

    def write(self, wave: Wave) -> bytes:
        """What the events add to the output items."""
        return self._tell(*(document for _, happened in wave for document in self._output.take(happened)))

    def end(self) -> bytes:
        """The whole response."""
        status = self._output.status
        self._output.keep()
        return self._tell({"type": f"response.{status}", "response": self._output.document(status)})

    def fail(self, error: ApiError) -> bytes:
        """The response as far as it came, and why it ended."""
        self._output.fail(error)
        self._output.keep()
        return self._tell({"type": "response.failed", "response": self._output.document("failed")})
