"""Which replicas hold which blocks: a block's hash to a set of replicas, as the bits of a number.

A replica holds a block only together with all blocks before it, so along a prompt these sets shrink, and where they
change is found by halving. What is looked at lies all over a large table that no cache holds: the fewer looks, the
better.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence

from shoal.core.journal import BlockHash

_SLACK = 1024  # blocks that a slot holds no more and that are noted still, beside as many as it holds
_GUESSES = 4096  # beginnings of prompts, by a part of their hash, of which it is kept how far they were held last
_STRIDE = 4  # of so many blocks of a prompt the last is noted in a promise; with 8 siblings of short prefixes part


class HeldIndex:
    """What replicas are known to hold, and what they were promised to be given.

    Replicas are slots, numbers from 0. A promise says that a request with these blocks is on its way to a slot; it
    counts as held until it ends, for events come later than the next request. It is noted for every fourth block of a
    prompt, and those before are promised with it. At most `limit` blocks are kept per slot:
    of one that tells of more, those are ignored.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[BlockHash, int] = {}
        self._promised: dict[BlockHash, int] = {}
        self._ends: deque[tuple[float, int, Sequence[BlockHash]]] = deque()
        self.next_end = math.inf  # when the first promise ends
        self._count: dict[int, int] = {}
        self._came: dict[int, array[int]] = {}  # what each slot was given, also what it holds no more: to clear it by
        self._bits: list[int] = []  # one number object per slot, shared by all blocks that it alone holds
        self._guesses = array("I", bytes(4 * _GUESSES))

    def __len__(self) -> int:
        return len(self._held)

    def count(self, slot: int) -> int:
        """How many blocks a slot holds, promises aside."""
        return self._count.get(slot, 0)

    def add(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """A slot holds these blocks from now on."""
        bit, held, before = self._bit(slot), self._held, self._count.get(slot, 0)
        new: list[BlockHash] = []
        for value in hashes:
            mask = held.get(value, 0)
            if not mask & bit:
                if before + len(new) >= self.limit:
                    break
                held[value] = mask | bit if mask else bit
                new.append(value)
        self._count[slot] = before + len(new)
        came = self._came.setdefault(slot, array("Q"))
        came.extend(new)
        if len(came) > 2 * self._count[slot] + _SLACK:
            self._came[slot] = array("Q", dict.fromkeys(value for value in came if held.get(value, 0) & bit))

    def remove(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """A slot holds these no more; what it did not hold does not matter."""
        bit, held, count = self._bit(slot), self._held, self._count.get(slot, 0)
        for value in hashes:
            mask = held.get(value, 0)
            if mask & bit:
                count -= 1
                self._leave(held, value, mask, bit)
        self._count[slot] = count

    def clear(self, slot: int) -> None:
        """A slot holds nothing, and nothing is promised there; looks at what it was given and at all promises."""
        bit, held, promised = self._bit(slot), self._held, self._promised
        for value in self._came.pop(slot, ()):
            mask = held.get(value, 0)
            if mask & bit:
                self._leave(held, value, mask, bit)
        for value in [value for value, mask in promised.items() if mask & bit]:
            self._leave(promised, value, promised[value], bit)
        self._count.pop(slot, None)

    def promise(self, slot: int, hashes: Sequence[BlockHash], held: int, until: float) -> None:
        """A prompt's blocks from number `held` on will come to a slot; in place of events up to the time `until`."""
        noted = hashes[held // _STRIDE * _STRIDE + _STRIDE - 1 :: _STRIDE]
        if noted:
            bit, promised = self._bit(slot), self._promised
            for value in noted:
                mask = promised.get(value, 0)
                promised[value] = mask | bit if mask else bit
            self._ends.append((until, slot, noted))
            self.next_end = min(self.next_end, until)

    def expire(self, now: float) -> None:
        """Forget promises that end before `now`; they are made in the order of their ends."""
        while self._ends and self._ends[0][0] < now:
            _, slot, hashes = self._ends.popleft()
            bit = self._bit(slot)
            for value in hashes:
                mask = self._promised.get(value, 0)
                if mask & bit:
                    self._leave(self._promised, value, mask, bit)
        self.next_end = self._ends[0][0] if self._ends else math.inf

    def _bit(self, slot: int) -> int:
        while slot >= len(self._bits):
            self._bits.append(1 << len(self._bits))
        return self._bits[slot]

    def _leave(self, index: dict[BlockHash, int], value: BlockHash, mask: int, bit: int) -> None:
        mask &= ~bit
        if not mask:
            del index[value]
        elif mask & (mask - 1):
            index[value] = mask
        else:
            index[value] = self._bit(mask.bit_length() - 1)

    def _held_ends(self, hashes: Sequence[BlockHash], first: int) -> list[tuple[int, int]]:
        """As `_ends` of what is held. Nearly always all end where those of the last prompt with this beginning did."""
        held, place = self._held, hashes[0] % _GUESSES
        guess = self._guesses[place]
        if (
            0 < guess <= len(hashes)
            and held.get(hashes[guess - 1], 0) & first == first
            and (guess == len(hashes) or not held.get(hashes[guess], 0) & first)
        ):
            return [(guess, first)]
        ends = _ends(held, hashes, first)
        self._guesses[place] = ends[0][0]
        return ends

    def depths(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """How many of a prompt's blocks are held, and by whom: (blocks, bits of slots).

        A slot is in one entry at most, that of the longest beginning that it holds.
        """
        if not hashes:
            return []
        begin, promised = hashes[0], self._promised
        first = self._held.get(begin, 0)
        ends: list[tuple[int, int]] = []
        if first:
            ends = self._held_ends(hashes, first)
        ends.append((0, ~first))  # all others hold nothing
        found: list[tuple[int, int]] = []
        for depth, slots in ends:
            noted = depth // _STRIDE * _STRIDE + _STRIDE
            more = promised.get(hashes[noted - 1], 0) & slots if noted <= len(hashes) else 0
            if more:
                beyond = _ends(promised, hashes[noted - 1 :: _STRIDE], more)
                found += [(noted + _STRIDE * (further - 1), those) for further, those in beyond]
                slots &= ~more
            if depth and slots:
                found.append((depth, slots))
        return found


def _ends(index: dict[BlockHash, int], hashes: Sequence[BlockHash], first: int) -> list[tuple[int, int]]:
    """How far blocks are held by `first`, the slots that hold the first one: (blocks, bits of slots), fewest first."""
    low, high = 1, len(hashes) + 1
    while high - low > 1:  # as long as all end at one place, which is nearly always
        middle = (low + high) // 2
        at_middle = index.get(hashes[middle - 1], 0) & first
        if at_middle == first:
            low = middle
        elif not at_middle:
            high = middle
        else:
            break
    if high - low == 1:
        return [(low, first)]
    found: list[tuple[int, int]] = []
    stack = [(low, first, high, 0)]  # a number of blocks, who holds them, a higher one, who holds those
    while stack:
        low, at_low, high, at_high = stack.pop()
        if at_low == at_high:
            continue
        if high - low == 1:
            found.append((low, at_low & ~at_high))
            continue
        middle = (low + high) // 2
        # What is not held at `low` is not held behind it, whatever late events say.
        at_middle = index.get(hashes[middle - 1], 0) & at_low
        stack.append((middle, at_middle, high, at_high & at_middle))
        stack.append((low, at_low, middle, at_middle))
    return found
