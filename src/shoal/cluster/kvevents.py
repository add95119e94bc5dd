"""What a server holds, published over ZeroMQ as vLLM does: for llm-d, Dynamo and other routers that subscribe.

A message of the PUB socket is a topic, the number of a batch in 8 bytes (big-endian), and the batch in msgpack: an
array of time, events and data parallel rank; an event is an array of its name and its fields in vLLM's order. A ROUTER
socket takes the number of the first batch that a subscriber lacks and sends those from there on, then the number -1
and nothing. The batches and their numbers are those of `/v1/events`; where some are gone a snapshot stands for them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shoal.engine.engine import Engine
from shoal.engine.feed import BlockBatch, BlockFeed, follow
from shoal.errors import BackendError, ConfigError, EngineClosedError
from shoal.server.block_events import kv_event
from shoal.server.hub import ModelHub

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("shoal.cluster")

_ADDRESS = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s:/\[\]*@]+):([0-9]{1,5})")
_KEPT_MESSAGES = 1000  # for a subscriber that reads too slowly; what comes beyond is dropped, and it sees the gap
_REPLAY_MESSAGES = 8192  # more than a feed keeps batches, so that one replay fits
_REQUEST_BYTES = 256  # a request to replay has 8
_SILENT_MS = 15_000  # a subscriber that answers no heartbeat for so long is let go, with what was kept for it
_LOOK_S = 0.5  # whether another model is served
_NUMBER = 8
_END = (-1).to_bytes(_NUMBER, "big", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where block events are published. Checked when built; raises `ConfigError`.

    publish: the address of the PUB socket, `tcp://HOST:PORT`; `*` is every address of the machine, port 0 a free one.
    replay: that of the ROUTER socket (None: nothing is sent again). topic: what stands before each message; llm-d
    wants `kv@POD@MODEL`.
    """

    publish: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for name, address in (("kv-events", self.publish), ("kv-events-replay", self.replay)):
            found = None if address is None else _ADDRESS.fullmatch(address)
            if address is not None and (found is None or int(found[2]) > 65_535):
                raise ConfigError(
                    f"--{name} is {address!r}", value=address, limit="tcp://HOST:PORT", hint="give tcp://HOST:PORT"
                )

    @property
    def open_to_others(self) -> bool:
        """True when more than this machine's own processes can read."""
        hosts = [found[1] for found in map(_ADDRESS.fullmatch, (self.publish, self.replay or self.publish)) if found]
        return not all(host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts)


class KVPublisher:
    """Publishes what the model of a hub holds, from the hub's opening to its closing, whichever model that is.

    Invariant: nothing here waits for a subscriber. What one does not read is dropped beyond a bound, on either socket.
    Made on any thread, used on the event loop of the hub.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Listens at once. ConfigError: an address cannot be had. BackendError: pyzmq is not installed."""
        if importlib.util.find_spec("zmq") is None:
            raise BackendError("pyzmq is not installed", hint="pip install 'shoal[cluster]'")
        import zmq
        import zmq.asyncio

        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._serving: Engine | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._publish = self._context.socket(zmq.PUB, socket_class=zmq.Socket)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.router_mandatory = 1  # an error, in place of silence, when a client takes no more
        self._replay.maxmsgsize = _REQUEST_BYTES
        try:
            self.publish_address = _bind(self._publish, config.publish, _KEPT_MESSAGES, "kv-events")
            self.replay_address = config.replay and _bind(
                self._replay, config.replay, _REPLAY_MESSAGES, "kv-events-replay"
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def attach(self, hub: ModelHub) -> None:
        """Publish what a hub's model holds, once the hub opens; end with it."""

        async def begin() -> None:
            self._tasks = [asyncio.ensure_future(self._follow(hub)), asyncio.ensure_future(self._answer())]

        hub.opening.append(begin)
        hub.closing.append(self.close)

    async def close(self) -> None:
        """Publish no more, and free the addresses."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._context.destroy(linger=0)

    async def _follow(self, hub: ModelHub) -> None:
        """Publish each batch of the model that is served; a model that takes its place begins with a snapshot."""
        while True:
            served = hub.served
            if served is not None and served.engine.feed is not None and not served.engine.closed:
                try:
                    async with aclosing(follow(served.engine)) as batches:  # type: ignore[type-var]
                        async for batch in batches:
                            self._serving = served.engine
                            self._send(batch, served.engine.spec.block_size)
                except EngineClosedError:
                    self._serving = None
            await asyncio.sleep(_LOOK_S)

    def _send(self, batch: BlockBatch, block_size: int) -> None:
        """To every subscriber that has room for it; a PUB socket never waits."""
        self._publish.send_multipart((self._topic, *self._message(batch, block_size)))

    def _message(self, batch: BlockBatch, block_size: int) -> tuple[bytes, bytes]:
        events = [tuple(kv_event(change, block_size).values()) for change in batch.changes]
        return batch.seq.to_bytes(_NUMBER, "big"), self._encoder.encode((batch.time_s, events, None))

    async def _answer(self) -> None:
        """Send batches again to whoever asks, one after another."""
        import zmq

        while self.replay_address is not None:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER:
                log.warning("a request to replay has %d frames: it wants an empty one and 8 bytes", len(frames) - 1)
                continue
            try:
                await self._send_again(frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as error:
                log.warning("a replay ends early, its client has gone or takes no more: %s", error)

    async def _send_again(self, client: bytes, first: int) -> None:
        import zmq

        engine = self._serving
        if engine is not None and engine.feed is not None:
            for batch in await _from(first, engine, engine.feed):
                message = self._message(batch, engine.spec.block_size)
                await self._replay.send_multipart((client, b"", *message), flags=zmq.NOBLOCK)
                await asyncio.sleep(0)  # streams go on between two
        await self._replay.send_multipart((client, b"", _END, b""), flags=zmq.NOBLOCK)


async def _from(first: int, engine: Engine, feed: BlockFeed) -> list[BlockBatch]:
    """The batches from a number on, or the snapshot that stands for them; none of an engine that has just ended."""
    batches = feed.since(first - 1)
    if batches is not None:
        return batches
    try:
        return [await asyncio.to_thread(engine.call, feed.snapshot)]
    except EngineClosedError:
        return []


def _bind(socket: zmq.Socket[bytes], address: str, kept: int, name: str) -> str:
    """Listen; returns the address with its port. ConfigError where that cannot be."""
    import zmq

    socket.linger = 0
    socket.sndhwm = kept
    socket.rcvhwm = 100
    socket.ipv6 = "[" in address
    socket.heartbeat_ivl = socket.heartbeat_timeout = _SILENT_MS
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--{name} cannot listen on {address}: {error}", value=address, hint="choose another address or port"
        ) from error
    return str(socket.last_endpoint.rstrip(b"\0").decode())
