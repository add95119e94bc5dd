"""A server in a thread of this process, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from shoal.agents import Rollout
from shoal.config import EngineConfig
from shoal.engine.aio import AsyncEngine
from shoal.engine.engine import Engine
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.server.config import ServerConfig
from shoal.server.hub import ModelHub
from shoal.server.run import bind, make_server

LETTERS = {str(token): 100 for token in range(ord("a"), ord("z") + 1)}
"""A bias under which the toy model writes readable text."""


def toy(step_s: float = 0.0, runner: FakeRunner | None = None, **settings: Any) -> Engine:
    """An engine on the toy model. Requests without a seed get the same ones in every run: some draw an early end."""
    config = EngineConfig(**{"seed": 0, **settings})
    return Engine(lambda: runner or FakeRunner(step_s=step_s), ByteTokenizer(), config)


class Live:
    """Usable with `with`; leaves nothing behind."""

    def __init__(
        self,
        engine: Engine | None,
        load: Callable[[str], Engine] | None = None,
        name: str = "toy",
        rollout: Callable[[AsyncEngine], Rollout] | None = None,
        **settings: Any,
    ) -> None:
        self.hub = ModelHub(load or (lambda name: toy()), name, engine)
        if rollout is not None and engine is not None:
            self.hub.rollout = rollout(AsyncEngine(engine))
        self.config = ServerConfig(**settings)
        self._listening = bind("127.0.0.1", 0)
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started = threading.Event()

        def ready(port: int) -> None:
            self.loop = asyncio.get_running_loop()
            started.set()

        self.server = make_server(self.hub, self.config, self._listening, ready)
        self._thread = threading.Thread(target=self.server.run, name="server", daemon=True)
        self._thread.start()
        assert started.wait(60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def engine(self) -> Engine:
        assert self.hub.served is not None
        return self.hub.served.engine

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Until no request is in the engine, no call holds a lease and the books are right.

        The next turn of a chat that has just been answered may be prepared meanwhile: it ends by itself.
        """
        end = time.monotonic() + timeout_s
        while not (self.idle and balanced(self.engine)):
            assert time.monotonic() < end, "requests are left, or blocks are held"
            time.sleep(0.01)

    @property
    def idle(self) -> bool:
        stats = self.engine.stats()
        assert self.hub.served is not None
        return stats.waiting == stats.running == self.hub.served.leases == 0

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(40)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def chat_body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, "logit_bias": LETTERS}
    return {**body, **fields}


def balanced(engine: Engine) -> bool:
    """Whether nobody holds a block. Those free, held and cached are all blocks at any time."""

    def check() -> bool:
        pool = engine._loop.scheduler.kv.pool
        assert pool.num_free + pool.num_held + pool.num_cached == pool.total
        return pool.num_held == 0

    return engine.call(check)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, its shape checked."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)
