"""Running the application under uvicorn: the port printed, a stop that lets requests finish, exit status 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.errors import ConfigError
from shoal.server.app import create_app
from shoal.server.config import ServerConfig
from shoal.server.generation import Api
from shoal.server.hub import ModelHub
from shoal.server.swarmbench.routes import add_page

_AFTER_DRAIN_S = 3.0  # for the last bytes, once every request has been ended


class Server(uvicorn.Server):
    """uvicorn that stops in our order: no new requests, those in flight finish or are ended at the deadline, exit.

    A second signal does not wait.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listening: socket.socket,
        hub: ModelHub,
        drain_s: float,
        ready: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._hub = hub
        self._drain_s = drain_s
        self._ready = ready

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the socket it was made with."""
        await super().serve(sockets or [self._listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say on which port. Raises as `ModelHub.open`."""
        await self._hub.open()
        await super().startup(sockets)
        if self.started:
            self._ready(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the hub beside the connections: requests that it ends get their last words out."""
        closing = asyncio.ensure_future(self._hub.close(0.0 if self.force_exit else self._drain_s))
        await super().shutdown(sockets)
        if self.force_exit:  # a second signal
            self._hub.hurry()
        await closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for a stop in order; a second one, of whichever kind, does not wait."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but a stop that was asked for is not a failure: the signal is not raised again."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not on the main thread: another thread stops the server
                before[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Connection(H11Protocol):
    """A connection that ends when the head of a request does not come in time, or an answer is not read.

    Either would hold a socket for ever: one that is only closed waits until what was written has been read.
    """

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(
            high=0
        )  # so that writing pauses at the first byte that the system does not take
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """A client has sent something."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop()
        self._read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More is written than the client has read: who sends waits, and after the write timeout gives up."""
        super().pause_writing()
        # Twice that time, so that who sends has noted it in the log.
        self._unread = self.loop.call_later(2 * self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._read()
        super().resume_writing()

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._head_timeout_s, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.close()


def run(hub: ModelHub, config: ServerConfig, host: str, port: int, ready: Callable[[int], None] | None = None) -> None:
    """Serve until a signal comes. ConfigError when the address cannot be had."""
    make_server(hub, config, bind(host, port), ready).run()


def make_server(
    hub: ModelHub,
    config: ServerConfig,
    listening: socket.socket,
    ready: Callable[[int], None] | None = None,
    mounts: Sequence[Callable[[FastAPI, Api], None]] = (add_page,),
) -> Server:
    """A server on a socket that is bound, with SwarmBench or other `mounts`; `ready` hears of its port at its start."""
    settings = uvicorn.Config(
        create_app(hub, config, mounts=mounts),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # h11 also where httptools is installed, which is quicker and knows no limit on heads.
        http=partial(  # type: ignore[arg-type]
            Connection,
            head_timeout_s=config.body_timeout_s,
            write_timeout_s=config.write_timeout_s,
            max_connections=config.max_connections,
        ),
        ws="none",
        lifespan="off",  # the hub is closed in `shutdown`, in our order
        timeout_graceful_shutdown=int(config.drain_s + _AFTER_DRAIN_S) + 1,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return Server(settings, listening, hub, config.drain_s, ready or (lambda port: None))  # noqa: ARG005


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        if sys.platform != "win32":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}", value=f"{host}:{port}", hint="choose another --port or --host"
        ) from error
    return listening
