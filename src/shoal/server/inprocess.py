"""The API without a socket: clients of OpenAI's SDK run on an engine of this very process, streaming included.

    async with AsyncEngine.load("smollm2-135m") as engine:
        client = async_openai(engine, "smollm2-135m")       # openai, openai-agents, pydantic-ai
        model = ChatOpenAI(**langchain_options(engine))     # LangChain, LangGraph

All agents of all frameworks in the process then share one batch and one prefix tree. The clients never close the
engine: that is left to the code that loaded it, after they are closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakKeyDictionary

from shoal.engine.aio import AsyncEngine
from shoal.errors import BackendError, ConfigError
from shoal.server.app import create_app
from shoal.server.config import ServerConfig
from shoal.server.hub import ModelHub

if TYPE_CHECKING:
    from fastapi import FastAPI
    from openai import AsyncOpenAI, OpenAI

    from shoal.engine.engine import Engine

T = TypeVar("T")
_HOST = "shoal.invalid"
BASE_URL = f"http://{_HOST}/v1"
"""What clients are given as address. It leads nowhere (RFC 2606), should one go around the engine by mistake."""


class EngineTransport:
    """An asynchronous transport for `httpx` and `httpx2` clients that calls the server's application.

    An answer's pieces arrive as the engine writes them; closing the answer early, or cancelling the call, ends its
    requests at the next token. Usable from any number of event loops. Of a client's timeouts only `read` applies.
    """

    def __init__(
        self, engine: AsyncEngine | Engine, name: str | None = None, config: ServerConfig | None = None
    ) -> None:
        """`name` is what clients call the model; without one, as its files do (`engine.spec.name`)."""
        self._name = name
        self._engine = engine.engine if isinstance(engine, AsyncEngine) else engine
        config = config or ServerConfig()
        self._config = dataclasses.replace(config, allowed_hosts=(*config.allowed_hosts, _HOST))
        # The application belongs to one event loop, since that is where the engine's events are sent.
        self._apps: WeakKeyDictionary[asyncio.AbstractEventLoop, FastAPI] = WeakKeyDictionary()

    def _app(self) -> FastAPI:
        loop = asyncio.get_running_loop()
        if loop not in self._apps:
            self._apps[loop] = create_app(ModelHub(_no_switch, self._name, self._engine, _no_switch), self._config)
        return self._apps[loop]

    async def handle_async_request(self, request: Any) -> Any:
        """The answer to a request of either library, as soon as it begins. Raises that library's ReadTimeout."""
        body = b"".join([piece async for piece in request.stream])
        call = await self.begin(request, body)
        library = _library(request)
        stream = _async_stream(library)(call)
        return library.Response(call.status, headers=call.headers, stream=stream, request=request)

    async def begin(self, request: Any, body: bytes) -> InProcessCall:
        """A call whose status and headers are known."""
        call = InProcessCall(self._app(), request, body)
        try:
            await call.start()
        except BaseException:
            await call.close()
            raise
        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing is held between calls."""


class SyncEngineTransport:
    """The same for synchronous clients: the application runs on an event loop in a thread of its own, until `close`."""

    def __init__(
        self, engine: AsyncEngine | Engine, name: str | None = None, config: ServerConfig | None = None
    ) -> None:
        """As `EngineTransport`."""
        self._inner = EngineTransport(engine, name, config)
        self._closing = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-inprocess", daemon=True)
        self._thread.start()

    def handle_request(self, request: Any) -> Any:
        """The answer to a request of either library, as soon as it begins. Raises that library's ReadTimeout."""
        library = _library(request)
        call = self.wait(self._inner.begin(request, b"".join(request.stream)), library)
        stream = _sync_stream(library)(call, self)
        return library.Response(call.status, headers=call.headers, stream=stream, request=request)

    def wait(self, work: Coroutine[Any, Any, T], library: ModuleType) -> T:
        """Run a coroutine on the transport's loop; it is cancelled when the waiting thread is interrupted.

        The library's `ReadError` when the transport is closed before the end.
        """
        with self._lock:
            if self._closing:
                work.close()
                raise library.ReadError("the transport is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise library.ReadError("the transport is closed") from None
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the calls that other threads wait for, with an error, and stop the thread. Idempotent."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class InProcessCall:
    """One call of the application, on the event loop it was made on. `status` and `headers` are known after `start`."""

    def __init__(self, app: FastAPI, request: Any, body: bytes) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._library = _library(request)
        self._request = request
        self._silence_s: float | None = request.extensions.get("timeout", {}).get("read")
        self._body: bytes | None = body
        self._sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # its bound is the answer's max_tokens
        self._gone = asyncio.Event()
        self._answering = asyncio.ensure_future(self._answer(app, _scope(request)))

    async def _answer(self, app: FastAPI, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self._sent.put_nowait(message)

    async def start(self) -> None:
        """Wait for the answer to begin."""
        message = await self._next()
        if message is None:
            await self._answering  # raises what the application raised
            raise AssertionError("the application ended without an answer")
        self.status, self.headers = message["status"], list(message["headers"])

    async def piece(self) -> bytes | None:
        """The next piece of the body, None after the last."""
        while (message := await self._next()) is not None:
            if message.get("body"):
                return bytes(message["body"])
        return None

    async def _next(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(self._silence_s):
                return await self._sent.get()
        except TimeoutError:
            message = f"no answer for {self._silence_s} s"
            raise self._library.ReadTimeout(message, request=self._request) from None

    async def close(self) -> None:
        """Tell the application that its client is gone, and wait until it has let go of everything. Idempotent."""
        self._gone.set()
        await asyncio.wait([self._answering])


def _scope(request: Any) -> dict[str, Any]:
    path, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": path,
        "root_path": "",
        "query_string": query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": None,
        "state": {},
    }


def _library(request: Any) -> ModuleType:
    """`httpx` or `httpx2`, whichever made the request: the answer must be of its classes."""
    return sys.modules[type(request).__module__.partition(".")[0]]


@cache
def _async_stream(library: Any) -> Any:
    class Pieces(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, call: InProcessCall) -> None:
            self._call = call

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while (piece := await self._call.piece()) is not None:
                yield piece

        async def aclose(self) -> None:
            await self._call.close()

    return Pieces


@cache
def _sync_stream(library: Any) -> Any:
    class Pieces(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, call: InProcessCall, transport: SyncEngineTransport) -> None:
            self._call = call
            self._transport = transport

        def __iter__(self) -> Iterator[bytes]:
            while (piece := self._transport.wait(self._call.piece(), library)) is not None:
                yield piece

        def close(self) -> None:
            with suppress(library.ReadError):  # the transport was closed first, and has ended the call
                self._transport.wait(self._call.close(), library)

    return Pieces


async def _cancel_others() -> None:
    """End whatever else runs on this event loop, and wait until it has."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _no_switch(name: str) -> Engine:
    raise ConfigError(
        f"the engine of this process cannot be switched to {name!r}", value=name, hint="load another engine for it"
    )


def async_openai(engine: AsyncEngine | Engine, name: str | None = None, **options: Any) -> AsyncOpenAI:
    """An `AsyncOpenAI` client on this engine, for itself, openai-agents and pydantic-ai.

    `name` is what calls give as `model`; without one, `engine.spec.name`. `options` go to the client's constructor.
    BackendError when the SDK is not installed.
    """
    sdk = _sdk()
    http = sdk.DefaultAsyncHttpxClient(transport=EngineTransport(engine, name))
    client: AsyncOpenAI = sdk.AsyncOpenAI(**{**_CLIENT, **options}, http_client=http)
    return client


def sync_openai(engine: AsyncEngine | Engine, name: str | None = None, **options: Any) -> OpenAI:
    """The same as an `OpenAI` client. Close it when you are done: it has a thread."""
    sdk = _sdk()
    http = sdk.DefaultHttpxClient(transport=SyncEngineTransport(engine, name))
    client: OpenAI = sdk.OpenAI(**{**_CLIENT, **options}, http_client=http)
    return client


def langchain_options(engine: AsyncEngine | Engine, name: str | None = None) -> dict[str, Any]:
    """Arguments for LangChain's `ChatOpenAI` (and `OpenAI`) that put it on this engine, sync calls and async ones."""
    sdk = _sdk()
    return {
        **_CLIENT,
        "model": name or engine.spec.name,
        "http_client": sdk.DefaultHttpxClient(transport=SyncEngineTransport(engine, name)),
        "http_async_client": sdk.DefaultAsyncHttpxClient(transport=EngineTransport(engine, name)),
    }


_CLIENT = {"base_url": BASE_URL, "api_key": "none", "max_retries": 0}  # nothing is lost on the way here


def _sdk() -> Any:
    try:
        import openai as sdk
    except ImportError as error:
        raise BackendError("the OpenAI SDK is not installed", hint="pip install openai") from error
    return sdk
