"""KV blocks on disk, for an engine that must never wait for one.

One thread writes, some read. The engine's thread only looks at what is known here, leaves blocks to be written while
there is room in a bounded queue, and takes what has been read. A disk that fails, fills up or stalls is left alone for
a while: it costs hits, and is logged once.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from shoal.core.tiers import Digest
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.files import KVFiles

log = logging.getLogger("shoal.engine")

_QUEUED = 128 << 20  # bytes of blocks that wait to be written
_READERS = 2
_STALL_S = 2.0  # a write that takes longer than this is taken for a stalled disk
_PAUSE_S = 30.0  # that long a disk that failed or was too slow is left alone
_NICE = 10  # of the thread that writes: what computes goes first
_TOUCH_S = 60.0
_KEPT = 1 << 16  # blocks remembered as sure to be wanted
_CLEAN_EVERY = 64 << 20  # bytes written between two looks at the quota


class BlockRead:
    """Blocks on their way from the disk, in order. The engine takes them from the front as they come."""

    def __init__(self, digests: Sequence[Digest]) -> None:
        self.digests = digests
        self.began = time.monotonic()
        self.cancelled = False
        self._next = 0  # to be read
        self._taken = 0
        self._arrived: dict[int, NDArray[np.uint8] | None] = {}
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether the next one has come, or is known not to."""
        return self._taken in self._arrived

    def take(self) -> NDArray[np.uint8] | None:
        """The next one, which must be `ready`; None when it is not to be had: what follows is of no use."""
        data = self._arrived.pop(self._taken)
        self._taken += 1
        return data

    def claim(self) -> int | None:
        """A reader's next index; None when nothing is left to be read."""
        with self._lock:
            if self.cancelled or self._next >= len(self.digests):
                return None
            self._next += 1
            return self._next - 1

    def bring(self, index: int, data: NDArray[np.uint8] | None) -> None:
        """What a reader read. With None, nothing behind it is read any more."""
        if data is None:
            self.cancelled = True
        self._arrived[index] = data


class DiskTier:
    """Writes and reads the blocks of one engine. Its public methods are called by the engine's thread.

    Invariant: what `has` says yes to was written whole, or waits in memory to be written. A digest that turns out to be
    gone is forgotten when it is asked for. Counters are totals since it was opened; `dropped` are blocks that were not
    written.
    """

    def __init__(self, files: KVFiles, buffers: Buffers, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called on the threads here when something was read, or there is room again.

        What was written goes to `buffers`, and what is read comes from there.
        """
        self.files = files
        self._buffers = buffers
        self.on_change = on_change
        self.dropped = self.written_bytes = self.read_bytes = 0
        self.fault: str | None = None  # why it is left alone, while it is
        self._index: set[Digest] = set()
        self._queue: OrderedDict[Digest, NDArray[np.uint8]] = OrderedDict()
        self._queued = 0
        self._touched_at: dict[Digest, float] = {}
        self._until: dict[Digest, float] = {}  # when what is sure to be wanted is, in seconds since the epoch
        self._soonest: list[tuple[float, Digest]] = []  # a heap of these; one that was kept again since says less
        self._touched: deque[Sequence[Digest]] = deque(maxlen=256)
        self._unwanted: list[Digest] = []
        self._readings: deque[BlockRead] = deque()
        self._writing_since: float | None = None
        self._paused_until = 0.0
        self._bytes_per_s: float | None = None
        self._measured = 0.0
        self._since_clean = 0
        self._closing = False
        self._change = threading.Condition()
        self._scanned = threading.Event()
        self._threads = [threading.Thread(target=self._write_all, name="shoal-kv-writer", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read_all, name=f"shoal-kv-reader-{n}", daemon=True) for n in range(_READERS)
        ]
        for thread in self._threads:
            thread.start()

    # -- asked by the engine's thread ---------------------------------------------------------------------------

    def wait_scanned(self, timeout_s: float) -> bool:
        """Wait until it is known what the directory holds, but no longer than that."""
        return self._scanned.wait(timeout_s)

    def has(self, digest: Digest) -> bool:
        """Whether it is here, as far as is known."""
        return digest in self._index or digest in self._queue

    def seconds_for(self, count_bytes: int) -> float:
        """How long that much will take to be read, from what was measured lately; 0 where nothing was."""
        if self._paused or self._stalled:
            return float("inf")
        if self._bytes_per_s is None or time.monotonic() - self._measured > _PAUSE_S:
            return 0.0
        return count_bytes / self._bytes_per_s

    def has_room(self, count_bytes: int) -> bool:
        """Whether `put` would take that much. One that is left alone takes everything, and drops it."""
        return self._idle_disk or self._queued + count_bytes <= _QUEUED

    def put(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        """Have a block written some time soon, `data` unchanged until then; dropped where that cannot be."""
        with self._change:
            if self._idle_disk or self._closing or self._queued + data.nbytes > _QUEUED:
                self.dropped += 1
                return
            self._queue[digest] = data
            self._queued += data.nbytes
            self._change.notify_all()

    def start_reading(self, digests: Sequence[Digest]) -> BlockRead:
        """Have blocks read, in this order."""
        reading = BlockRead(digests)
        with self._change:
            self._readings.append(reading)
            self._change.notify_all()
        return reading

    def finish(self, reading: BlockRead) -> None:
        """What was to be taken of a reading was, or is not waited for any longer."""
        reading.cancelled = True
        with self._change, contextlib.suppress(ValueError):
            self._readings.remove(reading)

    def observe(self, count_bytes: int, seconds: float) -> None:
        """Learn how fast the disk is: that much came in that time, nothing perhaps."""
        rate = max(count_bytes, 1) / max(seconds, 1e-6)
        self._bytes_per_s = rate if self._bytes_per_s is None else 0.5 * self._bytes_per_s + 0.5 * rate
        self._measured = time.monotonic()

    def touch(self, digests: Sequence[Digest]) -> None:
        """These were of use: note it on disk some time, of each at most once a minute."""
        now = time.monotonic()
        last = self._touched_at
        if len(last) > 2 * len(self._index) + 1024:
            last.clear()
        due = [digest for digest in digests if now - last.get(digest, -inf) >= _TOUCH_S and digest in self._index]
        if not due:
            return
        last.update(dict.fromkeys(due, now))
        with self._change:
            self._touched.append(due)
            self._change.notify_all()

    def keep(self, digests: Sequence[Digest], seconds: float) -> None:
        """These will be wanted within that time: others are deleted before them."""
        until = time.time() + seconds
        with self._change:
            for digest in digests:
                if until > self._until.get(digest, 0.0):
                    self._until[digest] = until
                    heapq.heappush(self._soonest, (until, digest))
            self._forget_soonest()
            self._touched.append(list(digests))
            self._change.notify_all()

    def _forget_soonest(self) -> None:
        """Of more than `_KEPT` keep those that are wanted the longest."""
        while len(self._until) > _KEPT:
            until, digest = heapq.heappop(self._soonest)
            if self._until.get(digest) == until:
                del self._until[digest]
        if len(self._soonest) > 2 * _KEPT:  # most were kept again since
            self._soonest = [(until, digest) for digest, until in self._until.items()]
            heapq.heapify(self._soonest)

    def forget(self, digests: Sequence[Digest]) -> None:
        """Keep these no longer: they are not found from now on, and deleted some time."""
        with self._change:
            self._unwanted += digests
            for digest in digests:
                self._index.discard(digest)
                data = self._queue.pop(digest, None)
                self._queued -= data.nbytes if data is not None else 0
            self._change.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all is written, or that long, or a disk that fails or stalls."""
        end = time.monotonic() + timeout_s
        with self._change:
            while self._queue and not self._idle_disk and (left := end - time.monotonic()) > 0:
                self._change.wait(min(left, 0.1))

    def close(self) -> None:
        """Write nothing more, and let the threads end when the disk lets them."""
        with self._change:
            self._closing = True
            self._queue.clear()
            self._readings.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join(0.2)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queued

    @property
    def known(self) -> int:
        """Blocks on disk, as far as is known."""
        return len(self._index)

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    @property
    def _stalled(self) -> bool:
        since = self._writing_since
        return since is not None and time.monotonic() - since > _STALL_S

    @property
    def _idle_disk(self) -> bool:
        return self._paused or self._stalled

    # -- the threads --------------------------------------------------------------------------------------------

    def _leave_alone(self, error: OSError) -> None:
        """The disk failed: say so once, and ask nothing of it for a while."""
        if self.fault is None:
            log.warning("the KV cache on disk (%s) is left alone for a while: %s", self.files.root, error)
        self.fault = str(error)
        self._paused_until = time.monotonic() + _PAUSE_S
        with self._change:
            self.dropped += len(self._queue)
            self._queue.clear()
            self._queued = 0

    def _write_all(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: a thread has a nice value of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._index |= self.files.digests()
            self._scanned.set()
            self._clean()
        except OSError as error:
            self._leave_alone(error)
            self._scanned.set()
        while True:
            with self._change:
                while not (self._closing or self._queue or self._touched or self._unwanted):
                    self._change.wait()
                if self._closing and not self._unwanted:
                    return
                unwanted, self._unwanted = self._unwanted, []
                touched = list(self._touched)
                self._touched.clear()
                item = next(iter(self._queue.items()), None)
            self.files.delete(unwanted)
            self._index.difference_update(unwanted)  # one may have been written meanwhile
            for digests in touched:
                self.files.touch(digests, self._until)
            if item is not None:
                self._write(*item)
                self.on_change()

    def _write(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        self._writing_since = time.monotonic()
        try:
            self.files.write(digest, data)
            if digest in self._until:
                self.files.touch([digest], self._until)
            self._since_clean += data.nbytes
            if self._since_clean > min(_CLEAN_EVERY, self.files.quota // 8):
                self._clean()
        except OSError as error:
            self._leave_alone(error)
            return
        finally:
            self._writing_since = None
        self.fault = None
        self.written_bytes += data.nbytes
        self._index.add(digest)
        with self._change:
            if self._queue.pop(digest, None) is not None:
                self._queued -= data.nbytes
                self._buffers.give(data)
            self._change.notify_all()

    def _clean(self) -> None:
        self._since_clean = 0
        self._index -= self.files.clean()

    def _read_all(self) -> None:
        while True:
            with self._change:
                while not (self._closing or self._readings):
                    self._change.wait()
                if self._closing:
                    return
                reading = self._readings[0]
                index = reading.claim()
                if index is None:
                    if self._readings and self._readings[0] is reading:
                        self._readings.popleft()
                    continue
            reading.bring(index, self._read(reading.digests[index]))
            self.on_change()

    def _read(self, digest: Digest) -> NDArray[np.uint8] | None:
        with self._change:
            data = self._queue.get(digest)
            if data is not None:
                return data.copy()  # the array will be used again when it is written
        try:
            data = self.files.read(digest, self._buffers)
        except OSError as error:
            self._leave_alone(error)
            return None
        if data is None:
            self._index.discard(digest)
            return None
        self.read_bytes += data.nbytes
        return data
