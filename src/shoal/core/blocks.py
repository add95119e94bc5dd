"""Block accounting: who holds which KV block."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.runners.plan import BlockId


class BlockPool:
    """Counts references to `total` blocks of KV.

    Invariant, after every call: free + held + cached == total, where a block is *held* while any sequence or pin
    refers to it, *cached* while only the prefix tree knows it, and *free* otherwise. Which tokens a block
    contains is the prefix tree's business; where it lies on the device is the runner's.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._refs = [0] * total
        self._in_tree = [False] * total
        self._free = list(range(total - 1, -1, -1))  # a stack, low ids on top: what was never used stays untouched
        self._held = 0
        self._cached = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody knows."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[BlockId]:
        """Those nobody knows."""
        return list(self._free)

    @property
    def num_held(self) -> int:
        """Blocks some sequence or pin refers to."""
        return self._held

    @property
    def num_cached(self) -> int:
        """Blocks only the prefix tree knows: they can be evicted."""
        return self._cached

    def refs(self, block: BlockId) -> int:
        """How many sequences and pins refer to the block."""
        return self._refs[block]

    def take(self) -> BlockId:
        """Move one free block to held, with one reference. IndexError when none is free: ask `num_free` first."""
        block = self._free.pop()
        self._refs[block] = 1
        self._held += 1
        return block

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each block, which must be held or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                if not self._in_tree[block]:
                    raise ValueError(f"block {block} is free and cannot be held")
                self._cached -= 1
                self._held += 1
            self._refs[block] += 1

    def drop(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Take one reference off each block; returns those that are only cached from now on."""
        cached: list[BlockId] = []
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is dropped more often than held")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._held -= 1
            if self._in_tree[block]:
                self._cached += 1
                cached.append(block)
            else:
                self._free.append(block)
        return cached

    def adopt(self, block: BlockId) -> None:
        """The prefix tree takes note of a held block, which will stay cached when its last holder goes."""
        if self._in_tree[block] or self._refs[block] == 0:
            raise ValueError(f"block {block} is in the tree already, or not held")
        self._in_tree[block] = True

    def disown(self, block: BlockId) -> None:
        """The prefix tree forgets a block: free at once when nobody holds it, else when its last holder goes."""
        if not self._in_tree[block]:
            raise ValueError(f"block {block} is not in the tree")
        self._in_tree[block] = False
        if self._refs[block] == 0:
            self._cached -= 1
            self._free.append(block)

    def check_integrity(self) -> None:
        """Recount everything from scratch; AssertionError names the first book that does not balance."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        held = {b for b in range(self.total) if self._refs[b] > 0}
        cached = {b for b in range(self.total) if self._refs[b] == 0 and self._in_tree[b]}
        assert self._held == len(held), f"held is {self._held}, counted {len(held)}"
        assert self._cached == len(cached), f"cached is {self._cached}, counted {len(cached)}"
        assert not free & held, f"free and held: {free & held}"
        assert not free & cached, f"free and cached: {free & cached}"
        assert len(free) + len(held) + len(cached) == self.total, "free + held + cached is not the total"
