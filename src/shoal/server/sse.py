"""Server-sent events: an answer in pieces, comments while nothing comes, an end whoever goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.server.errors import ApiError
from shoal.server.generation import Call, disconnected, unless_gone

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(document: Any, name: str | None = None) -> bytes:
    """One event with a JSON document."""
    text = _encode(document)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Sends the pieces of an answer and closes its call, also when the client goes away or stops reading.

    An ApiError from the pieces becomes a last event: the status has been sent by then.
    """

    def __init__(self, pieces: AsyncIterator[bytes], call: Call, write_timeout_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self._pieces = pieces
        self._call = call
        self._write_timeout_s = write_timeout_s
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - a response's face
        """Run the stream to its end."""
        watching = asyncio.ensure_future(self._watch_writes())
        try:
            await unless_gone(self._gone(receive, watching), self._run(send))
        finally:
            watching.cancel()
            self._call.close()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        async with aclosing(self._guarded()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._writing_since = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._writing_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch_writes(self) -> None:
        """Returns once the client has left a piece unread for too long: it is taken for gone."""
        while self._writing_since is None or time.monotonic() - self._writing_since < self._write_timeout_s:
            await asyncio.sleep(self._write_timeout_s / 4)
        self._call.record["error"] = "client_stalled"

    @staticmethod
    async def _gone(receive: Receive, stalled: asyncio.Future[None]) -> None:
        """Returns when the client is gone, or as good as gone."""
        left = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((left, stalled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except ApiError as error:
            self._call.record["error"] = error.code
            yield event(error.body)
