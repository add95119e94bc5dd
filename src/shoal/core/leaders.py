"""Who is about to compute which blocks, so that others wait for them rather than compute them again."""

from __future__ import annotations

from shoal.core.kv import KVCacheManager
from shoal.core.prefix_tree import common_prefix
from shoal.core.sequence import Sequence
from shoal.runners.plan import SeqId


class Leaders:
    """Maps blocks-to-be, by path hash, to the running prefill that will compute them.

    Invariant: everyone in here is running and not done with its prompt. When a leader goes away, whoever waited for
    it is free to lead.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._computing: dict[int, Sequence] = {}

    @property
    def seq_ids(self) -> set[SeqId]:
        """Sequences whose blocks-to-be others may wait for."""
        return {seq.seq_id for seq in self._computing.values()}

    def register(self, seq: Sequence) -> None:
        """A sequence joined and will compute the full blocks that the tree lacked."""
        for value in seq.hashes[seq.computed // self._kv.block_size :]:
            self._computing.setdefault(value, seq)

    def unregister(self, seq: Sequence) -> None:
        """A sequence has computed its prompt, or left the batch."""
        for value in seq.hashes:
            if self._computing.get(value) is seq:
                del self._computing[value]

    def follow(self, seq: Sequence) -> bool:
        """Let `seq` wait when a running prefill is about to compute at least one more block it shares; True if so."""
        if not self._computing:
            return False
        size = self._kv.block_size
        leader, depth = None, 0
        for i, value in enumerate(seq.hashes):
            other = self._computing.get(value)
            if other is not None and (leader is None or other is leader):
                leader, depth = other, i + 1
            elif leader is not None:
                break
        if leader is None:
            return False
        until = min(common_prefix(self._kv.tree_tokens(leader), self._kv.tree_tokens(seq)), len(seq.tokens) - 1)
        if self._kv.checkpoints is not None:  # state goes on where a block ends and the leader still has tokens to feed
            until = min(until, len(leader.tokens) - 1) // size * size
        if until < (depth - 1) * size or leader.computed >= until:  # the hashes collided, or it is done
            return False
        self._kv.mark(leader, until)
        seq.waits_for, seq.waits_until = leader, until
        return True
