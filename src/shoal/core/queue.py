"""Sequences that wait for a place in the batch."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator

from shoal.core.sequence import RANKS, Sequence
from shoal.types import Priority

_HORIZON = 10  # a request without a deadline is taken to have one of this many ageing periods


class WaitingQueue:
    """Orders waiting sequences: priority class, lifted by ageing; the group that got least service; then, inside a
    group, the longest critical path; then the deadline.

    Among equals in all that, a request without a deadline counts as due after ten ageing periods: among such requests
    that is arrival order, and nobody is overtaken for ever. Service is counted in tokens fed; a group that appears
    starts level with the least served one, so that it is not served alone for as long as it was away.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lanes: dict[tuple[int, str, int], list[tuple[float, int, Sequence]]] = {}
        self._service: dict[str, float] = {}
        self._members: dict[str, int] = {}  # sequences of each group in the engine, running ones included
        self._length = 0
        self.deferring = False  # class low is no candidate, however long it has waited

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for lane in self._lanes.values() for entry in lane)

    def join(self, seq: Sequence) -> None:
        """A sequence enters the engine; it is not in the queue before `push`."""
        if seq.spec.group not in self._service:
            self._service[seq.spec.group] = min(self._service.values(), default=0.0)
        self._members[seq.spec.group] = self._members.get(seq.spec.group, 0) + 1

    def leave(self, seq: Sequence) -> None:
        """A sequence left the engine; a group without members is forgotten."""
        self._members[seq.spec.group] -= 1
        if self._members[seq.spec.group] == 0:
            del self._members[seq.spec.group], self._service[seq.spec.group]

    def serve(self, seq: Sequence, tokens: int) -> None:
        """Book `tokens` fed for the sequence's group."""
        self._service[seq.spec.group] += tokens

    def service(self, seq: Sequence) -> float:
        """Tokens fed for the sequence's group so far."""
        return self._service[seq.spec.group]

    def push(self, seq: Sequence) -> None:
        """Put a sequence in line. A preempted one comes before its equals, since it arrived before them."""
        due = min(seq.deadline, seq.arrival + _HORIZON * self._ageing_s)
        insort(self._lanes.setdefault((seq.rank, seq.spec.group, seq.spec.critical_path), []), (due, seq.seq_id, seq))
        self._length += 1

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out."""
        key = (seq.rank, seq.spec.group, seq.spec.critical_path)
        lane = self._lanes[key]
        lane.pop(next(i for i, entry in enumerate(lane) if entry[2] is seq))
        if not lane:
            del self._lanes[key]
        self._length -= 1

    def rank(self, seq: Sequence, now: float) -> int:
        """The sequence's priority class at `now`, lower is more urgent: one class up for each ageing period waited."""
        return seq.rank - int(max(now - seq.arrival, 0.0) / self._ageing_s)

    def candidates(self, now: float) -> Iterator[Sequence]:
        """Waiting sequences in the order they should join. End the iteration before changing the queue."""
        heads = []
        for (rank, group, path), lane in self._lanes.items():
            if self.deferring and rank >= RANKS[Priority.LOW]:
                continue
            due, tie, seq = lane[0]
            heads.append((self.rank(seq, now), self._service[group], -path, due, tie, 0, lane))
        heapq.heapify(heads)
        while heads:
            _, service, path, _, _, at, lane = heapq.heappop(heads)
            yield lane[at][2]
            if at + 1 < len(lane):
                due, tie, seq = lane[at + 1]
                heapq.heappush(heads, (self.rank(seq, now), service, path, due, tie, at + 1, lane))
