"""What an engine holds, told to others: numbered batches of changes in its prefix tree, beside what it has to do.

Costs nothing until somebody listens. A reader asks for what came after the last number it has; when that is no longer
there it takes a snapshot and goes on from the snapshot's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.journal import BlockJournal, Change, Removed, Stored
from shoal.engine.loop import StepLoop
from shoal.errors import EngineClosedError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_KEPT_BLOCKS = 65_536  # in batches that are kept for readers who come back
_KEPT_BATCHES = 4_096
_LOOK_S = 1.0  # whether the engine still lives
_LOAD_S = 0.05  # a change of load alone is told that often at most


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """What changed in one step. `seq` is one more than that of the batch before; a restarted engine's are higher.

    `queued_tokens` have still to be computed for prompts, `running_tokens` are the contexts of requests in the batch.
    """

    seq: int
    time_s: float
    changes: tuple[Change, ...]
    queued_tokens: int
    running_tokens: int


class BlockFeed:
    """The batches of one engine, for any number of readers on other threads.

    Invariant: `seq` grows by one with each batch, and a snapshot has the number of the last batch that is in it.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._journal: BlockJournal | None = None
        self._seq = time.time_ns() // 1_000_000 * 1_000  # beyond all that an engine of before can have given
        self._kept: deque[BlockBatch] = deque()
        self._kept_blocks = 0
        self._load = (0, 0)
        self._load_at = 0.0
        self._readers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` on the engine's thread whenever there is a new batch. It must not block."""
        if self._journal is None:
            self._journal = BlockJournal(self._loop.scheduler.kv.tree)
            self._loop.step_starters.append(self._flush)
        self._readers.append(wake)

    def _stop(self) -> None:
        """With the last reader gone nothing is noted any more."""
        assert self._journal is not None
        self._journal.close()
        self._journal = None
        with self._lock:
            self._kept.clear()
            self._kept_blocks = 0
            self._seq += 1  # what happens meanwhile is in no batch: readers that come back see the gap

    def snapshot(self) -> BlockBatch:
        """All that is held now, as changes that begin with `Cleared`. Somebody listens."""
        assert self._journal is not None
        self._flush()
        return BlockBatch(self._seq, time.time(), tuple(self._journal.snapshot()), *self._load)

    def _flush(self) -> bool:
        """Make a batch of what is new; False when nobody listens any more."""
        if self._journal is None:
            return False
        if not self._readers:
            self._stop()
            return False
        changes, load, now = self._journal.take(), self._loop.load(), time.monotonic()
        quiet = now - self._load_at < _LOAD_S and load != (0, 0)
        if not changes and (load == self._load or quiet):
            return True
        self._load, self._load_at = load, now
        with self._lock:
            self._seq += 1
            batch = BlockBatch(self._seq, time.time(), tuple(changes), *load)
            self._kept.append(batch)
            self._kept_blocks += _blocks(batch)
            while len(self._kept) > _KEPT_BATCHES or (self._kept_blocks > _KEPT_BLOCKS and len(self._kept) > 1):
                self._kept_blocks -= _blocks(self._kept.popleft())
        for wake in tuple(self._readers):
            wake()
        return True

    # -- on any thread ------------------------------------------------------------------------------------------

    def leave(self, wake: Callable[[], None]) -> None:
        """Take back what was given to `listen`; when nobody is left the engine stops to take notes, soon."""
        with contextlib.suppress(ValueError):
            self._readers.remove(wake)

    def since(self, seq: int) -> list[BlockBatch] | None:
        """The batches after number `seq`, in order; None where some of them are gone: take a snapshot."""
        with self._lock:
            if seq == self._seq:
                return []
            if not self._kept or seq < self._kept[0].seq - 1 or seq > self._seq:
                return None
            return [batch for batch in self._kept if batch.seq > seq]


def _blocks(batch: BlockBatch) -> int:
    return sum(len(change.hashes) for change in batch.changes if isinstance(change, Stored | Removed))


async def follow(engine: Engine, after: int | None = None) -> AsyncIterator[BlockBatch]:
    """The batches after number `after` as they come; a snapshot first without one, and where batches are gone.

    EngineClosedError when the engine is closed, or fails.
    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # that event loop is closed
            loop.call_soon_threadsafe(news.set)

    feed = engine.feed
    assert feed is not None
    await asyncio.to_thread(engine.call, lambda: feed.listen(wake))
    try:
        while True:
            news.clear()
            batches = None if after is None else feed.since(after)
            if batches is None:
                batches = [await asyncio.to_thread(engine.call, feed.snapshot)]
            for batch in batches:
                after = batch.seq
                yield batch
            if not batches:
                await _wait(news, engine)
    finally:
        feed.leave(wake)


async def _wait(news: asyncio.Event, engine: Engine) -> None:
    """Until there is news; an engine that ends gives none."""
    while not news.is_set():
        if engine.closed:
            raise EngineClosedError("the engine is closed", hint="load it again") from engine.failure
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await news.wait()
