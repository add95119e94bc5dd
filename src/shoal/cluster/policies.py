"""The ways to place requests that the simulation compares: the real router, and what others do."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from shoal.cluster.router import Route, Router, RouterConfig
from shoal.cluster.traffic import Arrival
from shoal.core.journal import Cleared
from shoal.engine.feed import BlockBatch


class Policy(Protocol):
    """A way to place requests."""

    def choose(self, call: Arrival, now: float) -> str:
        """The replica that a call goes to."""
        ...

    def hear(self, replica: str, batch: BlockBatch) -> None:
        """A replica's news arrive."""
        ...

    def started(self, call: Arrival) -> None:
        """A call's first token has come."""
        ...

    def ended(self, call: Arrival) -> None:
        """A call has ended."""
        ...


class Precise:
    """The real router, fed with the replicas' events."""

    def __init__(self, names: Sequence[str], block_size: int, config: RouterConfig) -> None:
        self.router = Router(block_size, config)
        for name in names:
            self.router.add(name)
            self.router.apply(name, BlockBatch(0, 0.0, (Cleared(),), 0, 0))
        self._routes: dict[int, Route] = {}

    def choose(self, call: Arrival, now: float) -> str:
        """By what each holds and has to do."""
        route = self.router.route(call.hashes, len(call.prompt), now, key=call.session)
        assert route is not None
        self._routes[call.number] = route
        return route.replica

    def hear(self, replica: str, batch: BlockBatch) -> None:
        """Into the index."""
        assert self.router.apply(replica, batch)

    def started(self, call: Arrival) -> None:
        """Into the load."""
        self.router.started(self._routes[call.number])

    def ended(self, call: Arrival) -> None:
        """Out of the load."""
        self.router.ended(self._routes.pop(call.number))


class _Unfed:
    """A policy that replicas tell nothing; it counts its own calls."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self.names = list(names)
        self.loads = dict.fromkeys(names, 0)
        self.random = random.Random(seed)
        self._at: dict[int, str] = {}

    def choose(self, call: Arrival, now: float) -> str:  # noqa: ARG002 - the face of a policy
        """Pick, and count."""
        name = self._at[call.number] = self.pick(call)
        self.loads[name] += 1
        return name

    def pick(self, call: Arrival) -> str:  # noqa: ARG002 - chance looks at nothing
        """Any of them."""
        return self.random.choice(self.names)

    def hear(self, replica: str, batch: BlockBatch) -> None:
        """Nobody listens."""

    def started(self, call: Arrival) -> None:
        """It counts until its end."""

    def ended(self, call: Arrival) -> None:
        """One less."""
        self.loads[self._at.pop(call.number)] -= 1


class Affinity(_Unfed):
    """What a router does that only remembers where it sent what: the longest beginning, unless queues differ much.

    As Ray's prefix-aware router: below a tenth matched, the replica that was given least; when the longest and the
    shortest queue are more than `imbalance` calls apart, the shorter of two at random. What was sent is remembered up
    to the size of a replica's cache, the least recently used beginnings go first.
    """

    imbalance = 10
    least_match = 0.1

    def __init__(self, names: Sequence[str], seed: int, blocks: int) -> None:
        super().__init__(names, seed)
        self._blocks = blocks
        self._sent: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}

    def pick(self, call: Arrival) -> str:
        """By what was sent where."""
        if max(self.loads.values()) - min(self.loads.values()) > self.imbalance:
            name = min(self.random.sample(self.names, 2), key=self.loads.__getitem__)
        else:
            lengths = {name: _matched(sent, call.hashes) for name, sent in self._sent.items()}
            longest = max(lengths.values())
            if longest < self.least_match * len(call.hashes):
                name = min(self.names, key=lambda name: len(self._sent[name]))
            else:
                name = self.random.choice([name for name in self.names if lengths[name] == longest])
        self._remember(self._sent[name], call.hashes)
        return name

    def _remember(self, sent: OrderedDict[int, None], hashes: Sequence[int]) -> None:
        for value in reversed(hashes):  # the end of a prompt is forgotten before its beginning
            sent[value] = None
            sent.move_to_end(value)
        while len(sent) > self._blocks:
            sent.popitem(last=False)


def _matched(sent: OrderedDict[int, None], hashes: Sequence[int]) -> int:
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in sent:
            low = middle
        else:
            high = middle - 1
    return low


class Sessions(_Unfed):
    """Consistent hashing: all calls whose prompts begin alike go to one replica, however much it has to do."""

    def pick(self, call: Arrival) -> str:
        """By the first block."""
        return self.names[call.hashes[0] % len(self.names)]


def make_policy(name: str, replicas: Sequence[str], blocks: int, block_size: int, seed: int = 0) -> Policy:
    """A policy by its name, for replicas that have room for so many blocks."""
    match name:
        case "precise":
            return Precise(replicas, block_size, RouterConfig())
        case "affinity":
            return Affinity(replicas, seed, blocks)
        case "sessions":
            return Sessions(replicas, seed)
        case "random":
            return _Unfed(replicas, seed)
    raise ValueError(f"no policy is called {name!r}")
