"""Prefixes that a next turn is sure to ask for: spared for a time, as the request that left them or a caller asks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shoal.core.eviction import Eviction

KEPT = 1 << 61  # the step in which a kept prefix counts as needed: later than whatever is announced


class Keeping:
    """Announces prefixes to the eviction until their time is over.

    Invariant: every prefix in here is announced once, with `KEPT`. At most `most_blocks` blocks are spared: more than
    there are blocks cannot be, and a thousand chats that were left must not grow the process. The one that ends first
    makes room.
    """

    def __init__(self, eviction: Eviction, most_blocks: int) -> None:
        self._eviction = eviction
        self._most = most_blocks
        self._kept: list[tuple[float, int, Sequence[int]]] = []  # heap by (end, count), with path hashes
        self._blocks = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, hashes: Sequence[int], until: float) -> None:
        """Spare the blocks with these path hashes until that time."""
        if not hashes or len(hashes) > self._most:
            return
        self._count += 1
        self._eviction.announce(hashes, KEPT)
        heapq.heappush(self._kept, (until, self._count, hashes))
        self._blocks += len(hashes)
        while self._blocks > self._most:
            self._drop()

    def expire(self, now: float) -> None:
        """Spare no longer what is not to be kept any more."""
        while self._kept and self._kept[0][0] <= now:
            self._drop()

    def _drop(self) -> None:
        _, _, hashes = heapq.heappop(self._kept)
        self._eviction.withdraw(hashes, KEPT)
        self._blocks -= len(hashes)
