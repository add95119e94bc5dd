"""The choice of a replica for a request: who holds the longest beginning of it, against who has how much to do.

Pure and without a clock of its own, so that it runs under Ray, at a door and in the simulation alike.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.cluster.held import HeldIndex
from shoal.core.journal import BlockHash, Cleared, Removed, Stored
from shoal.engine.feed import BlockBatch

_KEYS = 65_536  # sessions whose replica is remembered
_FRESH_S = 1.0  # a report of load that is older says nothing of now


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What a choice weighs, in tokens of prompt to compute.

    recompute: what one token costs that a replica would have to compute though another holds it; above 1, for that work
    also delays others and its KV displaces what else is cached. running: what a token in the context of a request that
    runs there costs. promise_s: how long a request that was sent counts as held where it went, until events say so.
    max_blocks: the most blocks noted per replica.
    """

    recompute: float = 2.0
    running: float = 0.02
    promise_s: float = 10.0
    max_blocks: int = 2**20


@dataclass(slots=True)
class Route:
    """Where a request was sent. `held` of its tokens are expected to be there; `new` are to be computed."""

    replica: str
    slot: int
    held: int
    new: int
    running: int = 0
    open: bool = True


class Router:
    """Chooses among replicas by name. One thread; `now` is on any clock that does not go back.

    Fed by the replicas' batches of block changes (`apply`) and by what it is told of its own requests (`started`,
    `ended`). Between events it goes by its own promises, so late or lost events cost hits and never answers.
    """

    def __init__(self, block_size: int, config: RouterConfig | None = None) -> None:
        self.block_size = block_size
        self.config = config or RouterConfig()
        self.index = HeldIndex(self.config.max_blocks)
        self.escapes = 0  # requests that were sent away from who holds most, since it had too much to do
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self._seqs: dict[str, int] = {}
        self._keys: OrderedDict[str, str] = OrderedDict()
        # By slot. Tokens of our requests whose first token has not come; contexts of those that write; what a replica
        # has to do for others, and what it said of that last.
        self._queued, self._running, self._others, self._excess = (array("d") for _ in range(4))
        self._usable: list[bool] = []
        # What a request costs a slot whatever its prompt, from these; infinite where none is sent. Beside it the number
        # of the last request that was sent there. `_order` has both and the slot, the least busy first.
        self._base, self._last = array("d"), array("q")
        self._order: list[tuple[float, int, int]] = []
        self._sent = 0
        self._grow(8)

    def _grow(self, size: int) -> None:
        before = len(self._names)
        more = size - before
        self._names += [None] * more
        for loads in (self._queued, self._running, self._others, self._excess):
            loads.extend([0.0] * more)
        self._usable += [False] * more
        self._base.extend([math.inf] * more)
        self._last.extend([0] * more)
        self._order += [(math.inf, 0, slot) for slot in range(before, size)]
        self._order.sort()

    def _weigh(self, slot: int) -> None:
        """Something of a slot has changed, other than when a request was last sent there."""
        load = self._queued[slot] + self._others[slot] + self.config.running * self._running[slot]
        self._put(slot, load if self._usable[slot] else math.inf, self._last[slot])

    def _put(self, slot: int, base: float, last: int) -> None:
        order = self._order
        del order[bisect_left(order, (self._base[slot], self._last[slot], slot))]
        self._base[slot], self._last[slot] = base, last
        insort(order, (base, last, slot))

    # -- replicas -----------------------------------------------------------------------------------------------

    def add(self, replica: str) -> None:
        """A replica takes requests. Nothing is known of what it holds."""
        if replica in self._slots:
            return
        if None not in self._names:
            self._grow(2 * len(self._names))
        slot = self._names.index(None)
        self._names[slot] = replica
        self._slots[replica] = slot
        self._usable[slot] = True
        self._weigh(slot)

    def remove(self, replica: str) -> None:
        """A replica is gone, and all it held."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        self.index.clear(slot)
        self._names[slot] = None
        self._seqs.pop(replica, None)
        for loads in (self._queued, self._running, self._others, self._excess):
            loads[slot] = 0.0
        self._usable[slot] = False
        self._weigh(slot)

    def use(self, replica: str, usable: bool) -> None:
        """Send a replica no requests for a while, or again; what it holds stays known."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._usable[slot] = usable
            self._weigh(slot)

    @property
    def replicas(self) -> list[str]:
        """Those that are known."""
        return list(self._slots)

    def held_blocks(self, replica: str) -> int:
        """How many blocks a replica is known to hold."""
        return self.index.count(self._slots[replica])

    # -- what they tell -----------------------------------------------------------------------------------------

    def apply(self, replica: str, batch: BlockBatch, *, now: float | None = None) -> bool:
        """Take a batch in. False, and nothing is changed, where some before it are missing: ask for a snapshot.

        A snapshot begins with `Cleared` and may follow anything.
        `now` is on the clock of `batch.time_s`, to tell how old its load is; None: too old.
        """
        slot = self._slots.get(replica)
        if slot is None:
            return True
        snapshot = batch.changes[:1] == (Cleared(),)
        if not snapshot and self._seqs.get(replica) != batch.seq - 1:
            return False
        self._seqs[replica] = batch.seq
        for change in batch.changes:
            if isinstance(change, Stored):
                self.index.add(slot, change.hashes)
            elif isinstance(change, Removed):
                self.index.remove(slot, change.hashes)
            else:
                self.index.clear(slot)
        if now is not None and now - batch.time_s < _FRESH_S:
            # What it has to do beyond what we sent: only when it says so twice, for our own may be on their way.
            excess = max(batch.queued_tokens - self._queued[slot], 0.0)
            self._others[slot] = min(excess, self._excess[slot])
            self._excess[slot] = excess
            self._weigh(slot)
        return True

    def seq(self, replica: str) -> int | None:
        """The number of the last batch of a replica that was taken in."""
        return self._seqs.get(replica)

    # -- requests -----------------------------------------------------------------------------------------------

    def route(
        self, hashes: Sequence[BlockHash], tokens: int, now: float, *, key: str = "", without: Collection[str] = ()
    ) -> Route | None:
        """Where a prompt of `tokens` tokens goes, whose full blocks have these hashes; None when nobody takes any.

        `key` names a session, that is best kept together; `without` are replicas that are not to be asked.
        """
        if self.index.next_end < now:
            self.index.expire(now)
        refused = {self._slots[name] for name in without if name in self._slots} if without else ()
        for slot in refused:
            self._put(slot, math.inf, self._last[slot])
        slot, held, most = self._cheapest(hashes, tokens, self._slots.get(self._keys.get(key, "")) if key else None)
        takes = self._base[slot] < math.inf
        for each in refused:
            self._weigh(each)
        return self._send(slot, hashes, tokens, held, most, now, key) if takes else None

    def _cheapest(self, hashes: Sequence[BlockHash], tokens: int, kept: int | None) -> tuple[int, int, int]:
        """The slot that a prompt costs least, how many of its tokens that one holds, and the most that any holds.

        `kept` is the slot of its session. Of those that hold equally much only the least busy counts: one slot of each
        such set is looked at, and one of all.
        """
        worth, size, base = self.config.recompute, self.block_size, self._base
        slot = idle = self._order[0][2]
        held, most, kept_held = 0, 0, 0
        least = base[slot]
        for blocks, slots in self.index.depths(hashes):
            depth = min(blocks * size, tokens - 1)
            most = max(most, depth)
            at = idle if slots >> idle & 1 else self._least_of(slots)
            cost = base[at] - worth * depth
            if cost <= least:
                slot, held, least = at, depth, cost
            if kept is not None and slots >> kept & 1:
                kept_held = depth
        if kept is not None and base[kept] - worth * (kept_held + size) <= least:
            slot, held = kept, kept_held
        return slot, held, most

    def _least_of(self, slots: int) -> int:
        """The least busy of a set of slots, as bits; among equals the one that waits for a request longest."""
        if not slots & (slots - 1):
            return slots.bit_length() - 1
        many = slots.bit_count()
        if many * many > len(self._order):  # then one of them comes soon in the order of all
            return next(slot for _, _, slot in self._order if slots >> slot & 1)
        found, least = -1, (math.inf, 0)
        while slots:
            bit = slots & -slots
            slots ^= bit
            at = bit.bit_length() - 1
            cost = self._base[at], self._last[at]
            if cost < least or found < 0:
                found, least = at, cost
        return found

    def _send(
        self, slot: int, hashes: Sequence[BlockHash], tokens: int, held: int, most: int, now: float, key: str
    ) -> Route:
        name = self._names[slot]
        assert name is not None
        self.escapes += held < most
        route = Route(name, slot, held, tokens - held)
        self._queued[slot] += route.new
        self._sent += 1
        # As `_weigh`, with the new number; the slot takes requests, or it would not have been chosen.
        load = self._queued[slot] + self._others[slot] + self.config.running * self._running[slot]
        self._put(slot, load, self._sent)
        self.index.promise(slot, hashes, held // self.block_size, now + self.config.promise_s)
        if key:
            self._keys[key] = name
            self._keys.move_to_end(key)
            if len(self._keys) > _KEYS:
                self._keys.popitem(last=False)
        return route

    def started(self, route: Route) -> None:
        """The first token of a request has come: its prompt is computed."""
        if route.open and not route.running and self._is_there(route):
            self._queued[route.slot] -= route.new
            route.running = route.held + route.new
            self._running[route.slot] += route.running
            self._weigh(route.slot)

    def ended(self, route: Route) -> None:
        """A request has ended, however. Twice does no harm."""
        if route.open and self._is_there(route):
            if route.running:
                self._running[route.slot] -= route.running
            else:
                self._queued[route.slot] -= route.new
            self._weigh(route.slot)
        route.open = False

    def _is_there(self, route: Route) -> bool:
        return self._slots.get(route.replica) == route.slot

    def load(self, replica: str) -> tuple[int, int]:
        """Tokens queued at a replica and running there, as far as is known here."""
        slot = self._slots[replica]
        return int(self._queued[slot] + self._others[slot]), int(self._running[slot])
