"""Replicas of the engine under Ray Serve, behind the same API; requests with one prefix go to one replica.

    pip install 'shoal[cluster]'
    python examples/ray_serve.py --model smollm2-135m --replicas 2

Each replica is one engine with the whole server application. The way to it is Ray's: an ingress takes the HTTP call,
names a session after what its prompt begins with, and Ray's consistent-hash router gives each session its replica, so
that a prefix is computed and kept once in the cluster. A replica that is full passes calls on to the next in the ring.
A client that goes away ends its request in the replica, as it does with one server.
"""

# No `from __future__ import annotations`: Ray looks at the annotations of the ingress.
import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.responses import JSONResponse, Response, StreamingResponse

# Ray's prefix-aware router would do without a key, but ray.serve.llm cannot be imported unless vLLM or SGLang is there.
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
MAX_BODY_BYTES = 8 * 2**20  # as the server's
KEY_CHARACTERS = 128  # of a prompt's begin: calls that agree in them go to one replica


@dataclass(frozen=True)
class Call:
    """One HTTP call on its way to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


@serve.deployment(
    max_ongoing_requests=64,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
)
class Replica:
    """One engine and the server's application, called without a socket."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        from shoal.server.app import create_app
        from shoal.server.hub import ModelHub

        self._engine = load(model, settings)
        self._app = create_app(ModelHub(lambda name: load(name, settings), model, self._engine))

    async def call(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The messages of the answer: its start, then its body in pieces."""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await sent.put(dict(message))

        async def answer() -> None:
            try:
                await self._app(_scope(call), receive, send)
            finally:
                await sent.put(None)  # also when it ends without a word, or raises

        answering = asyncio.ensure_future(answer())
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            gone.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([answering])

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed."""
        if self._engine.failure is not None:
            raise RuntimeError(f"the engine has failed: {self._engine.failure}")


def load(model: str, settings: dict[str, Any]) -> Any:
    """An engine; the name `toy` gives the toy model, to try the cluster without a real one."""
    from shoal.config import EngineConfig
    from shoal.engine.engine import Engine

    if model != "toy":
        return Engine.load(model, **settings)
    from shoal.runners.fake import ByteTokenizer, FakeRunner

    return Engine(FakeRunner, ByteTokenizer(), EngineConfig(**settings))


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": call.headers,
        "client": None,
        "server": None,
        "state": {},
    }


async def _body(request: Request) -> bytes | None:
    """The body of a call; None for one that is too large."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def error(message: str, code: str) -> dict[str, Any]:
    """An error as the server's own look."""
    kind = "invalid_request_error" if code == "body_too_large" else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _bodies(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message.get("body", b"")


def session_of(body: bytes) -> str:
    """The session a call belongs to: what its prompt begins with, whatever the endpoint; empty when it has none."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = fields.get("messages") or fields.get("prompt") or fields.get("input") or ""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        prompt = " ".join(str(message.get("content")) for message in prompt)
    space = fields.get("prompt_cache_key") or ""  # prefixes are shared only within one
    return f"{space} {str(prompt)[:KEY_CHARACTERS]}" if prompt else ""


ingress = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment(ray_actor_options={"num_cpus": 0})  # it only passes on; the cores are for the replicas
@serve.ingress(ingress)
class Ingress:
    """Takes calls in and hands them to the replica that Ray's router picks."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    @ingress.api_route("/{path:path}", methods=["GET", "POST"])
    async def pass_on(self, path: str, request: Request) -> Response:
        """One call."""
        body = await _body(request)
        if body is None:
            return JSONResponse(error(f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large"), 413)
        query = request.scope["query_string"]
        call = Call(request.method, f"/{path}", query, list(request.headers.raw), body)
        messages = self._replicas.options(stream=True, session_id=session_of(body)).call.remote(call)
        start = await anext(messages, None)
        if start is None:
            return JSONResponse(error("the replica ended without an answer", "engine_unavailable"), 503)
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        headers_out = {name: value for name, value in pairs if name != "x-request-id"}  # Ray adds that
        return StreamingResponse(_bodies(messages), start["status"], headers_out)


def build(model: str, replicas: int, **settings: Any) -> Any:
    """The application, for `serve.run`."""
    return Ingress.bind(Replica.options(num_replicas=replicas).bind(model, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(build(options.model, options.replicas), blocking=True)


if __name__ == "__main__":
    main()
