"""The books recounted from scratch: what tests call after every step."""

from __future__ import annotations

from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Status


def check_integrity(scheduler: Scheduler) -> None:
    """Recount every book of a scheduler between two steps; AssertionError names the first that does not balance."""
    pool = scheduler.kv.pool
    scheduler.kv.tree.check_integrity()
    refs = [0] * pool.total
    for blocks in scheduler.pinned.values():
        for block in blocks:
            refs[block] += 1
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING, f"sequence {seq.seq_id} runs, but is {seq.status}"
        assert 0 <= seq.computed < len(seq.tokens), f"sequence {seq.seq_id} has nothing to feed"
        assert len(seq.blocks) >= scheduler.kv.blocks_for(seq.computed), f"sequence {seq.seq_id} lacks blocks"
        for block in seq.blocks:
            refs[block] += 1
        if seq.copy_source is not None:
            refs[seq.copy_source] += 1
    if scheduler.kv.windows is not None:
        scheduler.kv.windows.check_integrity(scheduler.running)
    for block in range(pool.total):
        assert pool.refs(block) == refs[block], f"block {block}: {pool.refs(block)} references, {refs[block]} holders"
    waiting = list(scheduler.queue)
    assert len(waiting) == len(scheduler.queue), "the queue has lost count"
    for seq in waiting:
        assert seq.status is Status.WAITING, f"sequence {seq.seq_id} waits, but is {seq.status}"
        assert not seq.blocks, f"sequence {seq.seq_id} waits and holds blocks"
    assert len(waiting) + len(scheduler.running) == len(scheduler), "a sequence neither waits nor runs"
    assert scheduler.leaders <= {seq.seq_id for seq in scheduler.running}, "a leader is not running"
