"""What every call passes first: request ids, the API key, limits on the body, the log.

Plain ASGI, so that a streamed answer passes through without being touched, and the disconnect of a client is seen by
the code that awaits `receive`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.body import aside, check_shape
from shoal.server.config import ServerConfig
from shoal.server.errors import ApiError
from shoal.server.logs import log_call, logger
from shoal.server.metrics import Metrics
from shoal.server.origins import check_origin

OPEN_PATHS = frozenset({"/health", "/"})  # for probes and for browsers opening the page, which have no key
OPEN_FILES = "/page/"  # what the page consists of
_FREQUENT = frozenset({"/health", "/metrics", "/swarmbench/state", "/page/{name:path}"})  # not worth a line each
_SAFE_ID = re.compile(r"[\w.:-]{1,128}")


class Gate:
    """Middleware around the whole application. Keeps nothing between calls but counters."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._keys = [(_digest(key.encode()), scopes) for key, scopes in config.all_keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, send)
        try:
            check_origin(scope, self._config)
            self._check_key(scope)
            if scope["method"] in ("POST", "PATCH"):
                receive = _replay(await self._body(scope, receive), receive)
            await self._app(scope, receive, call.send)
        except ApiError as error:
            await self._refuse(error, scope, receive, call)
        except Exception:  # noqa: BLE001 - the last boundary: a client gets an answer, whatever a handler raised
            logger.exception("unexpected", extra={"fields": {"request_id": call.request_id}})
            await self._refuse(ApiError(500, "the server failed", code="internal_error"), scope, receive, call)
        finally:
            call.done(self._metrics)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, call: _Call) -> None:
        if call.status is None:
            error.headers.setdefault("Connection", "close")  # the rest of the body was not read
            await error.response(scope)(scope, receive, call.send)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FILES):
            return
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        token = token.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key")  # as Anthropic's SDK
        given = _digest(token)
        # All are compared, whichever it is: the time tells nothing.
        found = [scopes for digest, scopes in self._keys if hmac.compare_digest(given, digest)]
        if not token or not found:
            raise ApiError(
                401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        needed = scope_of(scope["method"], path)
        if needed is not None and needed not in found[0]:
            raise ApiError(403, f"this API key may not do that: it lacks {needed!r}", code="missing_scope")
        scope["state"]["caller"] = given.hex()[:16]

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, or an ApiError for one that is too large, too slow or too deep."""
        limit = self._config.max_body_bytes
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                body = await _read(receive, limit)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None
        await aside(len(body), lambda: check_shape(body, self._config.max_depth))
        return body


def scope_of(method: str, path: str) -> str | None:
    """What a key must be allowed to for a call; None for what any key may: looking at models, states and counters."""
    parts = path.strip("/").split("/")
    if parts[0] == "swarmbench" and parts[1:2] in (["runs"], ["threads"], ["graphs"]):
        return "generate" if method == "POST" else "history"
    if parts == ["v1", "events"]:  # what others have asked is in it
        return "manage"
    if parts[0] in ("swarmbench", "models") or parts[:2] == ["v1", "models"]:
        return None if method in ("GET", "HEAD") else "manage"
    return "generate" if method == "POST" else None


class _Call:
    """One call as the log and the metrics see it: id, status, time, and what the handler noted in `record`."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = _header(scope, b"x-request-id").decode("latin-1")
        self.request_id = given if _SAFE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        self.status: int | None = None
        self.record: dict[str, Any] = {"request_id": self.request_id}
        self._scope = scope
        self._send = send
        self._begin = time.perf_counter()
        scope.setdefault("state", {})["record"] = self.record

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if "note" in self.record:  # what a handler tells beside its answer
                message["headers"].append((b"x-shoal-note", self.record["note"].encode("ascii", "replace")))
        await self._send(message)

    def done(self, metrics: Metrics) -> None:
        elapsed = time.perf_counter() - self._begin
        route = self._scope.get("route")
        path = getattr(route, "path", "unknown")  # never the raw path: metrics would grow with it
        status = self.status or 499  # nothing was sent: the client went away first
        metrics.count_call(path, status, elapsed)
        level = logging.DEBUG if path in _FREQUENT else logging.INFO
        if logger.isEnabledFor(level):
            told = {"method": self._scope["method"], "path": path, "status": status}
            log_call({**self.record, **told, "latency_ms": round(elapsed * 1e3, 2)})


def _digest(key: bytes) -> bytes:
    """Digests have one length, so that the time of comparing them tells nothing of the key's."""
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


async def _read(receive: Receive, limit: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client went away", code="disconnected")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what the real one has: the disconnect."""
    pending = True

    async def replay() -> Message:
        nonlocal pending
        if pending:
            pending = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
