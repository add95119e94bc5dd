"""Moves blocks of KV between a runner and the further tiers, between steps, a slice at a time.

Out: full blocks of the prefix tree are copied to host memory and handed to the disk, as many after a step as it made.
Back: a request that waits is held while what the tiers have of its prefix is brought, until it is there or computing
would be as fast. All that changes the scheduler is a command, so a replay plans the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.commands import Forget, Hold, Restore
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Sequence, Status
from shoal.core.tiers import Digest, Outgoing, Paths, Tier, TierPlanner, WantedBlocks
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.disk import BlockRead, DiskTier
from shoal.engine.kv.host import HostTier
from shoal.errors import RunnerError
from shoal.runners.base import BlockAccess
from shoal.types import TierStats

log = logging.getLogger("shoal.engine")

_BUSY_BYTES = 8 << 20  # written to the device between two steps while others run
_IDLE_BYTES = 64 << 20  # and while nobody does
_OUT_BYTES = 4 << 20  # copied out at a time while nothing is to be computed
_TOKEN_S = 1e-3  # a prompt token's price while none was measured
_WORTH = 0.5  # of the time that computing would take, what bringing back may take
_WAIT_S = (0.05, 10.0)  # and its bounds
_SCAN_S = 0.5  # an engine starts without what its disk has not listed by then
_FLUSH_S = 5.0  # at the end, for blocks that are not written yet

Block = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Return:
    """What one waiting sequence is brought: `taken` digests of `wanted` are dealt with. Those from host come first."""

    seq: Sequence
    wanted: WantedBlocks
    host: deque[Block]
    reading: BlockRead | None
    until: float
    taken: int = 0
    read_bytes: int = 0

    @property
    def done(self) -> bool:
        return self.taken == len(self.wanted.digests)

    @property
    def ready(self) -> bool:
        return bool(self.host) or (self.reading is not None and self.reading.ready)


class Tiering:
    """The tiers of one engine, used by its thread between steps.

    Invariant: a sequence is held exactly while it is in line here; one is served at a time, since those behind it may
    want the same. A block that is brought back is written before anything else is scheduled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        access: BlockAccess,
        host: HostTier | None,
        disk: DiskTier | None,
        buffers: Buffers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self._host_limit = host.limit if host is not None else 0
        self.disk = disk
        self._buffers = buffers
        self._scheduler = scheduler
        self._access = access
        self._clock = clock
        secret = disk.files.secret if disk is not None else bytes(32)
        self._planner = TierPlanner(scheduler.kv.tree, Paths(access.identity, secret))
        self._line: deque[Sequence] = deque()
        self._return: _Return | None = None
        self._restored = {Tier.HOST: 0, Tier.DISK: 0}
        self._given_up = 0
        self._evictions = 0  # of the tree, when `_look_again` looked last
        self._looked = (0, 0)  # for which sequence, and after how many preemptions
        if disk is not None:
            disk.wait_scanned(_SCAN_S)

    # -- back -----------------------------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether somebody waits for KV to come back."""
        return self._return is not None or bool(self._line)

    @property
    def held(self) -> int:
        """How many sequences wait for KV to come back, without those that have ended meanwhile."""
        served = [self._return.seq] if self._return is not None else []
        return sum(seq.status is Status.WAITING for seq in (*served, *self._line))

    @property
    def ready(self) -> bool:
        """Whether `bring_back` has something to do now."""
        now = self._return
        return bool(self._line) if now is None else now.ready or self._clock() >= now.until

    @property
    def left_s(self) -> float:
        """How long the one that is served may still be waited for."""
        return max(self._return.until - self._clock(), 0.0) if self._return is not None else 0.0

    def arrived(self, seq: Sequence) -> None:
        """A sequence is in line for the batch: hold it where the tiers have more of its tokens than the device."""
        if self.disk is not None and self.disk.known:  # what only the device is asked for is of use on disk too
            tokens = self._scheduler.kv.tree_tokens(seq)
            self.disk.touch(self._planner.held(tokens, seq.spec.namespace, limit=len(tokens)))
        if seq.status is Status.WAITING and self._wanted(seq) is not None:
            self._scheduler.apply(Hold(seq.seq_id, held=True))
            self._line.append(seq)

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended: where its next turn is sure to come, the disk keeps it before others too."""
        if self.disk is not None and seq.spec.keep_s:
            tokens = self._scheduler.kv.tree_tokens(seq)
            digests = self._planner.held(tokens, seq.spec.namespace, limit=len(tokens))
            self.disk.keep(digests, seq.spec.keep_s)

    def bring_back(self) -> None:
        """Write what has come to the device, a bounded number of bytes, and let those go on that have waited enough."""
        self._forget_distrusted()
        self._look_again()
        left = _BUSY_BYTES if self._scheduler.running else _IDLE_BYTES
        while left > 0:
            if self._return is None:
                if not self._line:
                    return
                self._return = self._begin(self._line.popleft())
                continue
            now = self._return
            if now.seq.status is not Status.WAITING:  # it was ended
                self._end(now)
                continue
            left -= self._write(now, left)
            if now.done or self._clock() >= now.until:
                self._given_up += not now.done
                self._end(now)
            elif not now.ready:
                return

    def _look_again(self) -> None:
        """The first in line may have lost, while it waited or since it was preempted, what the device had of it."""
        scheduler = self._scheduler
        kv, queue = scheduler.kv, scheduler.queue
        evictions = kv.tree.evictions
        if evictions == self._evictions or not len(queue) or self.holding:
            return
        seq = next(iter(queue.candidates(scheduler.now)), None)
        full = len(scheduler.running) >= scheduler.max_running
        if seq is None or full or kv.blocks_for(len(seq.tokens)) > kv.available - len(scheduler.running):
            return  # it cannot join yet
        self._evictions = evictions
        if self._looked != (seq.seq_id, seq.preemptions):  # once: others may need the blocks more
            self._looked = seq.seq_id, seq.preemptions
            self.arrived(seq)

    def _forget_distrusted(self) -> None:
        """What a failed pass may have got wrong must not come back, in this process or the next."""
        digests = self._planner.take_distrusted()
        if not digests:
            return
        if self.host is not None:
            for digest in digests:
                self.host.forget(digest)
        if self.disk is not None:
            self.disk.forget(digests)

    def _wanted(self, seq: Sequence) -> WantedBlocks | None:
        kv = self._scheduler.kv
        if seq.scoring or not kv.sharing or kv.tree.max_cached == 0:
            return None
        tokens = kv.tree_tokens(seq)
        return self._planner.wanted(tokens, seq.spec.namespace, limit=len(tokens) - 1, known=self._knows)

    def _knows(self, digest: Digest) -> bool:
        return (self.host is not None and self.host.has(digest)) or (self.disk is not None and self.disk.has(digest))

    def _begin(self, seq: Sequence) -> _Return | None:
        """Start what the head of the line wants now, if it is worth it; it goes on at once otherwise."""
        wanted = self._wanted(seq) if seq.status is Status.WAITING else None
        if wanted is None:
            self._scheduler.apply(Hold(seq.seq_id, held=False))
            return None
        host: deque[Block] = deque()
        for digest in wanted.digests:
            data = self.host.get(digest) if self.host is not None else None
            if data is None:
                break
            host.append(data)
        rest = wanted.digests[len(host) :]
        now, size = self._clock(), self._scheduler.kv.block_size
        token_s = (self._scheduler.pacer.token_ms or _TOKEN_S * 1e3) / 1e3
        patience = min(max(len(wanted.blocks) * size * token_s * _WORTH, _WAIT_S[0]), _WAIT_S[1])
        reading = None
        if rest and self.disk is not None and self.disk.seconds_for(len(rest) * self._access.block_bytes) < patience:
            reading = self.disk.start_reading(rest)
        elif rest and not host:
            self._scheduler.apply(Hold(seq.seq_id, held=False))
            return None
        return _Return(seq, wanted, host, reading, now + patience)

    def _write(self, now: _Return, most: int) -> int:
        """Write what has come, about `most` bytes of it; returns how many were written."""
        written = 0
        while written < most and not now.done and now.ready:
            tier = Tier.HOST if now.host else Tier.DISK
            batch, missing = self._next_batch(now, tier, most - written)
            written += sum(data.nbytes for data in batch)
            if batch and not self._restore(now, batch, tier):
                missing = True
            now.taken += len(batch)
            if missing:
                now.until = 0.0  # what is behind it is of no use
                return written
        if not now.host and now.reading is None and not now.done:
            now.until = 0.0
        return written

    def _next_batch(self, now: _Return, tier: Tier, most: int) -> tuple[list[Block], bool]:
        """The next things of one tier, up to about `most` bytes; and whether one is not to be had."""
        batch: list[Block] = []
        count = 0
        while count < most and now.taken + len(batch) < len(now.wanted.digests):
            if tier is Tier.HOST:
                if not now.host:
                    break
                data: Block | None = now.host.popleft()
            else:
                if now.reading is None or not now.reading.ready:
                    break
                data = now.reading.take()
            if data is None or data.nbytes != self._bytes_of(now.taken + len(batch), now.wanted):
                return batch, True
            batch.append(data)
            count += data.nbytes
            if tier is Tier.DISK:
                now.read_bytes += data.nbytes
                if self.host is not None:
                    self.host.put(now.wanted.digests[now.taken + len(batch) - 1], data)
        return batch, False

    def _bytes_of(self, index: int, wanted: WantedBlocks) -> int:
        is_block = index < len(wanted.blocks)
        return self._access.block_bytes if is_block else self._scheduler.spec.checkpoint_bytes

    def _restore(self, now: _Return, batch: list[Block], tier: Tier) -> bool:
        """Put consecutive things of one tier on the device; False when nothing more can follow."""
        wanted, scheduler = now.wanted, self._scheduler
        count = min(len(wanted.blocks) - now.taken, len(batch))
        state = len(batch) > count
        scheduler.apply(Restore(now.seq.seq_id, wanted.first + now.taken, count, tier, state))
        restored = scheduler.take_restored()
        try:
            data_of = batch[restored.skipped : count]
            for block, window, data in zip(restored.blocks, restored.windows, data_of, strict=False):
                self._access.write_block(block, data, window)
                if tier is Tier.DISK:
                    self._buffers.give(data)
            if restored.checkpoint is not None:
                self._access.write_checkpoint(restored.checkpoint, restored.tokens, batch[-1])
        except RunnerError:
            log.exception("blocks of KV could not be put back")
            scheduler.apply(Forget(restored.blocks))
            return False
        self._restored[tier] += len(restored.blocks)
        return restored.skipped + len(restored.blocks) == count

    def _end(self, now: _Return) -> None:
        """The one that was served goes on, with whatever came."""
        self._return = None
        if now.reading is not None and self.disk is not None:
            self.disk.finish(now.reading)
            self.disk.observe(now.read_bytes, time.monotonic() - now.reading.began)
        if self.disk is not None and now.taken:
            self.disk.touch(now.wanted.digests[: now.taken])
        self._scheduler.apply(Hold(now.seq.seq_id, held=False))

    # -- out ------------------------------------------------------------------------------------------------------

    def copy_out(self, blocks: int | None = None) -> bool:
        """Copy up to that many blocks out of the device, or a slice; False when there was nothing to do, or no room."""
        if blocks is None:
            blocks = max(_OUT_BYTES // self._access.block_bytes, 1)
        self._forget_distrusted()
        copied = 0
        while copied < blocks:
            if self.disk is not None and not self.disk.has_room(self._access.block_bytes):
                break
            outgoing = self._planner.take(self._stored)
            if outgoing is None:
                break
            copied += 1
            try:
                self._copy(outgoing)
            except RunnerError:
                log.exception("a block of KV could not be read, and is not kept")
        return copied > 0

    def _copy(self, outgoing: Outgoing) -> None:
        if not self._stored(outgoing.digest):
            data = self._buffers.take(self._access.block_bytes)
            self._access.read_block(outgoing.block, data, outgoing.window)
            self._put(outgoing.digest, data)
        if outgoing.checkpoint is not None:
            state = self._planner.paths.state(outgoing.digest)
            self._put(state, self._access.read_checkpoint(outgoing.checkpoint))

    def skip(self) -> None:
        """What is on the device now is not copied out."""
        self._planner.clear()

    def _stored(self, digest: Digest) -> bool:
        """Whether nothing is left to be done for a block: the last tier has it."""
        if self.disk is not None:
            return self.disk.has(digest)
        return self.host is not None and self.host.has(digest)

    def _put(self, digest: Digest, data: Block) -> None:
        if self.host is not None:
            self.host.put(digest, data)
        if self.disk is not None:
            self.disk.put(digest, data)

    def empty_host(self) -> None:
        """Memory is short: keep nothing in host memory."""
        if self.host is not None:
            self.host.shrink(0)
            self.host.limit = 0

    def grow_host(self) -> None:
        """Memory is there again."""
        if self.host is not None:
            self.host.limit = self._host_limit

    # -- the end, and books ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let what is on the device be written, for a bounded time, and end the threads."""
        if self.disk is None:
            return
        end = time.monotonic() + _FLUSH_S
        while time.monotonic() < end and self.disk.fault is None:
            if not self.copy_out():
                if not len(self._planner):
                    break
                self.disk.flush(0.05)
        self.disk.flush(max(end - time.monotonic(), 0.0))
        self.disk.close()

    def stats(self) -> TierStats:
        """What the tiers hold, and what went through them."""
        host, disk = self.host, self.disk
        return TierStats(
            host_blocks=len(host) if host is not None else 0,
            host_bytes=host.bytes if host is not None else 0,
            disk_blocks=disk.known if disk is not None else 0,
            disk_queued_bytes=disk.queued_bytes if disk is not None else 0,
            disk_written_bytes=disk.written_bytes if disk is not None else 0,
            disk_read_bytes=disk.read_bytes if disk is not None else 0,
            restored_host_blocks=self._restored[Tier.HOST],
            restored_disk_blocks=self._restored[Tier.DISK],
            dropped_blocks=(disk.dropped if disk is not None else 0) + self._planner.lost,
            given_up=self._given_up,
            disk_fault=disk.fault if disk is not None else None,
        )
