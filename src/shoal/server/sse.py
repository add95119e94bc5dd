"""Server-sent events: an answer in pieces, comments while nothing comes, and an end in every case."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from shoal.server.config import ServerConfig
from shoal.server.errors import ApiError
from shoal.server.generation import Call, Wave, disconnected, unless_gone
from shoal.server.openai.fields import StreamOptions
from shoal.types import Event

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""A document as compact JSON."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(document: Any, name: str | None = None) -> bytes:
    """One event with a JSON document."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encode(document)}\n\n".encode("utf-8", "replace")


class Template:
    """A document that is written again and again with another string in one place; all else is encoded once."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        """`make` gives the document for a string."""
        mark = "\0here\0"
        self._before, self._after = encode(make(mark)).split(encode(mark))

    def fill(self, text: str) -> str:
        """The document with that string, as JSON."""
        return f"{self._before}{encode(text)}{self._after}"


class Writer(Protocol):
    """What an endpoint makes of the events of its call."""

    def begin(self) -> bytes:
        """What is said before the first event."""
        ...

    def write(self, wave: Wave) -> bytes:
        """What some events make; may be nothing."""
        ...

    def end(self) -> bytes:
        """What is said when every generation has ended."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """What is said when one has failed: the status has been sent by then."""
        ...


class ChoiceWriter(ABC):
    """The stream of a completion: chunks that have the same head and one choice each, then the usage, if asked for."""

    def __init__(self, call: Call, head: dict[str, Any], options: StreamOptions | None, per_prompt: int) -> None:
        """`per_prompt` is how many answers each prompt has."""
        self._call = call
        self._per_prompt = per_prompt
        self._usage = options is not None and bool(options.include_usage)
        self._head = {**head, "usage": None} if self._usage else head
        self._before = f'data: {encode(self._head)[:-1]},"choices":['

    @abstractmethod
    def choices(self, index: int, happened: Event) -> list[str]:
        """What an event of generation `index` makes, as JSON."""

    def begin(self) -> bytes:
        """Nothing: an answer begins with its first token."""
        return b""

    def write(self, wave: Wave) -> bytes:
        """The chunks that some events make."""
        before = self._before
        written = [f"{before}{choice}]}}\n\n" for index, happened in wave for choice in self.choices(index, happened)]
        return "".join(written).encode("utf-8", "replace")

    def end(self) -> bytes:
        """The usage and the end mark."""
        usage = {"choices": [], "usage": self._call.usage(per_prompt=self._per_prompt)}
        return (event({**self._head, **usage}) if self._usage else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return event(error.body)


class EventStream(Response):
    """Sends what a writer makes of a call and closes the call, also when the client goes away or stops reading.

    A comment goes out when nothing did for `keepalive_s`.
    """

    def __init__(self, writer: Writer, call: Call, config: ServerConfig) -> None:
        super().__init__(media_type="text/event-stream")
        self._writer = writer
        self._call = call
        self._keepalive_s = config.keepalive_s
        self._write_timeout_s = config.write_timeout_s
        self._writing_since: float | None = None
        self._quiet = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - a response's face
        """Run the stream to its end."""
        watching = [asyncio.ensure_future(self._watch_writes()), asyncio.ensure_future(self._watch_silence())]
        try:
            await unless_gone(self._gone(receive, watching[0]), self._run(send))
        finally:
            for watch in watching:
                watch.cancel()
            self._call.close()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        call, writer = self._call, self._writer
        try:
            await self._send(send, writer.begin())
            while not call.complete:
                wave = await call.next_wave()
                await self._send(send, writer.write(wave) if wave else KEEP_ALIVE)
            last = writer.end()
        except ApiError as error:
            call.record["error"] = error.code
            last = writer.fail(error)
        await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        if piece:
            self._quiet = False
            self._writing_since = time.monotonic()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._writing_since = None

    async def _watch_silence(self) -> None:
        """Have a comment sent when nothing was for a while. One timer a stream: one per token costs more."""
        while True:
            self._quiet = True
            await asyncio.sleep(self._keepalive_s)
            if self._quiet:
                self._call.nudge()

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


class WatchedStream(StreamingResponse):
    """A stream of pieces whose client is taken for gone when it leaves one unread for `write_timeout_s`."""

    def __init__(self, pieces: AsyncIterator[bytes], write_timeout_s: float, **settings: Any) -> None:
        super().__init__(pieces, **settings)
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream to its end."""

        stalled = False

        async def watched(message: Message) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        try:
            await super().__call__(scope, receive, watched)
        except Exception:  # the framework makes another error of it
            if not stalled:
                raise
            scope["state"]["record"]["error"] = "client_stalled"
