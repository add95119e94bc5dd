"""Block events over ZeroMQ, read as a router of vLLM reads them: with pyzmq, msgspec and types of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cluster import kvevents
from shoal.cluster.kvevents import KVEventsConfig, KVPublisher
from shoal.core.journal import Cleared, Stored, content_hashes
from shoal.engine.feed import BlockBatch
from shoal.errors import BackendError, ConfigError
from shoal.server.hub import ModelHub
from shoal.types import Namespace
from tests.support.live import Live, toy

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'shoal[cluster]'")

LOOPBACK = "tcp://127.0.0.1:0"
PROMPT = "The quick brown fox jumps over the lazy dog, again and again: " * 3


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):  # type: ignore[misc, call-arg]
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):  # type: ignore[misc, call-arg]
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """A router: hears of batches, and asks for those it missed."""

    def __init__(self, publisher: KVPublisher, room: int = 1000) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.rcvhwm = room
        self.sub.subscribe(b"kv@")
        self.sub.connect(publisher.publish_address)
        self.replay = self.context.socket(zmq.DEALER)
        if publisher.replay_address is not None:
            self.replay.connect(publisher.replay_address)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def next(self, timeout_s: float = 20.0) -> tuple[int, Batch]:
        assert self.sub.poll(1000 * timeout_s), "nothing is published"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv@pod@toy"
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)

    def until(self, kind: type[Event]) -> tuple[int, Any]:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            number, batch = self.next()
            for event in batch.events:
                if isinstance(event, kind):
                    return number, event
        raise AssertionError(f"no {kind.__name__} came")

    def since(self, first: int) -> dict[int, Batch]:
        """What is sent again from a number on, by number, in their order."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found: dict[int, Batch] = {}
        while True:
            assert self.replay.poll(20_000), "the replay does not end"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return found
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload, type=Batch)


@contextmanager
def published(publisher: KVPublisher, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, Subscriber]]:
    """A server of the toy model whose events are published, and one who is known to hear them."""
    before = ModelHub.__init__

    def made(hub: ModelHub, *given: Any) -> None:
        before(hub, *given)
        publisher.attach(hub)

    with monkeypatch.context() as patched:
        patched.setattr(ModelHub, "__init__", made)
        live = Live(toy())
    subscriber = Subscriber(publisher)
    try:
        while not subscriber.sub.poll(50):  # a subscription takes effect some time after it was made
            assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).is_success
        yield live, subscriber
    finally:
        subscriber.close()
        live.stop()


def publisher(**fields: Any) -> KVPublisher:
    return KVPublisher(KVEventsConfig(**{"publish": LOOPBACK, "replay": LOOPBACK, "topic": "kv@pod@toy", **fields}))


def complete(live: Live, prompt: str) -> None:
    assert live.post("/v1/completions", {"prompt": prompt, "max_tokens": 2}).is_success


def test_a_router_of_vllm_hears_of_blocks_by_the_numbers_of_the_http_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with published(publisher(), monkeypatch) as (live, subscriber):
        complete(live, PROMPT)
        number, stored = subscriber.until(BlockStored)
        tokens = list(PROMPT.encode())[: len(stored.block_hashes) * stored.block_size]
        assert stored.token_ids == tokens
        assert stored.block_hashes == content_hashes(tokens, Namespace(), stored.block_size)
        assert (stored.parent_block_hash, stored.medium, stored.lora_id, stored.lora_name) == (None, "GPU", None, None)
        with live.http.stream("GET", f"/v1/events?after={number - 1}") as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines) == f"id: {number}"
            [same] = [e for e in json.loads(next(lines)[6:])["events"] if e["type"] == "BlockStored"]
        assert same == {"type": "BlockStored", **msgspec.structs.asdict(stored)}


def test_who_missed_some_gets_them_again_and_who_comes_late_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    with published(publisher(), monkeypatch) as (live, subscriber):
        complete(live, PROMPT)
        last, _ = subscriber.until(BlockStored)
        subscriber.sub.unsubscribe(b"kv@")  # what comes now is missed
        for word in ("first", "second", "third"):
            complete(live, f"{word} {PROMPT}")
        end, told = time.monotonic() + 60, b""
        while not all(word in told for word in (b"first", b"second", b"third")):  # an answer may overtake its events
            assert time.monotonic() < end, told
            again = subscriber.since(last + 1)
            stored = [e for batch in again.values() for e in batch.events if isinstance(e, BlockStored)]
            told = bytes(token for event in stored for token in event.token_ids)
        assert list(again) == list(range(last + 1, last + 1 + len(again)))
        [(number, snapshot)] = subscriber.since(0).items()
        assert number >= max(again)
        assert isinstance(snapshot.events[0], AllBlocksCleared)
        held = {value for event in snapshot.events[1:] for value in event.block_hashes}
        assert held >= {value for event in stored for value in event.block_hashes}
        subscriber.replay.send_multipart([b"", b"no number"])  # nothing that anybody could answer
        assert not any(batch.events for batch in subscriber.since(number + 1).values())  # its load may have changed


def test_another_model_begins_with_all_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    with published(publisher(), monkeypatch) as (live, subscriber):
        complete(live, PROMPT)
        last, _ = subscriber.until(BlockStored)
        assert live.post("/models/load", {"model": "other"}).is_success
        number, _ = subscriber.until(AllBlocksCleared)
        assert number > last
        complete(live, PROMPT)
        subscriber.until(BlockStored)


def test_a_subscriber_that_reads_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvevents, "_KEPT_MESSAGES", 4)
    made = publisher(replay=None)
    silent = Subscriber(made, room=1)
    batch = BlockBatch(1, 0.0, (Cleared(), Stored(None, (1,), (10**6,) * 20_000)), 0, 0)
    try:
        while not silent.sub.poll(50):
            made._send(batch, 32)
        for _ in range(600):  # 60 MB; one that waited would end in the test's time limit
            made._send(batch, 32)
        read = 0
        while silent.sub.poll(300):
            silent.sub.recv_multipart()
            read += 1
        assert read < 400  # most were dropped, and not kept
    finally:
        silent.close()
        asyncio.run(made.close())


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5557", "tcp://", "tcp://host", "tcp://h:99999", "udp://h:1", "tcp://a b:1"]
)
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events is") as refused:
        KVEventsConfig(publish=address)
    assert refused.value.value == address
    with pytest.raises(ConfigError, match="--kv-events-replay is"):
        KVEventsConfig(publish=LOOPBACK, replay=address)
    told = CliRunner().invoke(app, ["serve", "--port", "0", "--kv-events", address])
    assert (told.exit_code, f"--kv-events is {address!r}" in told.stderr) == (2, True)


def test_a_taken_port_and_a_missing_package_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = publisher(replay=None)
    taken = made.publish_address
    for fields in ({"publish": taken}, {"replay": taken}):
        with pytest.raises(ConfigError, match="cannot listen on") as refused:
            publisher(**fields)
        assert refused.value.value == taken
    asyncio.run(made.close())
    again = publisher(publish=taken)
    asyncio.run(again.close())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pyzmq is not installed"):
        publisher()


def test_who_can_read_is_known() -> None:
    assert not KVEventsConfig(publish="tcp://127.0.0.1:1", replay="tcp://[::1]:2").open_to_others
    assert KVEventsConfig(publish="tcp://*:1").open_to_others
    assert KVEventsConfig(publish="tcp://localhost:1", replay="tcp://10.0.0.1:2").open_to_others
