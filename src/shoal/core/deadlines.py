"""When sequences must end."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from shoal.core.sequence import Sequence
from shoal.runners.plan import SeqId


class Deadlines:
    """The deadlines of live sequences, earliest first.

    A sequence that ends leaves its entry behind; there are never more than twice as many entries as live sequences,
    and a few.
    """

    def __init__(self, live: Mapping[SeqId, Sequence]) -> None:
        """`live` is the scheduler's own table: it changes as sequences come and go."""
        self._live = live
        self._heap: list[tuple[float, SeqId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, seq: Sequence) -> None:
        """A sequence has a deadline, or an earlier one than before."""
        if seq.deadline == math.inf:
            return
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(other.deadline, seq_id) for seq_id, other in self._live.items() if other.deadline < math.inf]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (seq.deadline, seq.seq_id))

    def due(self, now: float) -> Iterator[Sequence]:
        """Live sequences whose deadline is not later than `now`, which the caller ends one by one."""
        while self._heap and self._heap[0][0] <= now:
            seq = self._live.get(heapq.heappop(self._heap)[1])
            if seq is not None and seq.deadline <= now:
                yield seq
