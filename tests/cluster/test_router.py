"""Who gets a request: the longest beginning held, against what there is to do; late and lost events cost hits only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shoal.cluster.held import HeldIndex
from shoal.cluster.router import Route, Router, RouterConfig
from shoal.core.journal import Change, Cleared, Removed, Stored, content_hashes
from shoal.engine.feed import BlockBatch
from shoal.types import Namespace

SIZE = 4


def hashes(tokens: Sequence[int]) -> list[int]:
    return content_hashes(tokens, Namespace(), SIZE)


def batch(seq: int, *changes: Change, queued: int = 0, time_s: float = 0.0) -> BlockBatch:
    return BlockBatch(seq, time_s, changes, queued, 0)


def stored(tokens: Sequence[int]) -> Stored:
    return Stored(None, tuple(hashes(tokens)), ())


def router(*names: str, **config: float) -> Router:
    made = Router(SIZE, RouterConfig(**config))  # type: ignore[arg-type]
    for name in names:
        made.add(name)
        assert made.apply(name, batch(0, Cleared()))
    return made


def route(to: Router, tokens: Sequence[int], now: float = 0.0, **options: object) -> Route:
    chosen = to.route(hashes(tokens), len(tokens), now, **options)  # type: ignore[arg-type]
    assert chosen is not None
    return chosen


PROMPT = list(range(21))


def test_who_holds_the_longest_beginning_gets_the_request() -> None:
    to = router("a", "b", "c")
    to.apply("b", batch(1, stored(PROMPT[:8])))
    to.apply("c", batch(1, stored(PROMPT[:16])))
    chosen = route(to, PROMPT)
    assert (chosen.replica, chosen.held, chosen.new) == ("c", 16, 5)
    to.apply("c", batch(2, Removed(tuple(hashes(PROMPT)[2:4]))))
    to.ended(chosen)
    assert route(to, PROMPT, 100.0).held == 8


def test_what_a_request_must_compute_is_never_nothing() -> None:
    to = router("a")
    to.apply("a", batch(1, stored(PROMPT[:20])))
    assert route(to, PROMPT[:20]).new == 1


def test_a_holder_with_too_much_to_do_is_escaped() -> None:
    to = router("a", "b", recompute=2.0)
    to.apply("a", batch(1, stored(PROMPT[:20])))
    first = [route(to, [*PROMPT[:20], *range(100 + n, 130 + n)]) for n in range(6)]
    assert first[0].replica == "a"
    assert {chosen.replica for chosen in first} == {"a", "b"}
    assert to.escapes >= 1


def test_a_running_request_weighs_less_than_a_waiting_one_and_an_ended_one_nothing() -> None:
    to = router("a")
    chosen = route(to, PROMPT)
    assert to.load("a") == (21, 0)
    to.started(chosen)
    to.started(chosen)
    assert to.load("a") == (0, 21)
    to.ended(chosen)
    to.ended(chosen)
    assert to.load("a") == (0, 0)


def test_siblings_that_come_before_any_event_go_where_the_first_went() -> None:
    to = router("a", "b", "c")
    trunk = list(range(400))
    assert len({route(to, [*trunk, n]).replica for n in range(3)}) == 1
    assert (
        len({route(to, [*trunk, n], 60.0).replica for n in range(50, 53)}) == 1
    )  # the promise has ended; they agree anew


def test_siblings_of_a_short_prefix_stay_together_before_any_event() -> None:
    """As `shoal cluster compare`: prefixes of fifteen blocks, two replicas that are idle."""
    to, prefix = router("a", "b"), list(range(15 * SIZE))
    assert len({route(to, [*prefix, *range(1000 + 9 * n, 1008 + 9 * n)]).replica for n in range(3)}) == 1


def test_a_gap_is_seen_and_a_snapshot_mends_it() -> None:
    to = router("a", "b")
    assert to.apply("a", batch(1, stored(PROMPT[:8])))
    assert not to.apply("a", batch(3, stored(PROMPT[:16])))
    assert to.seq("a") == 1
    assert to.held_blocks("a") == 2
    assert to.apply("a", batch(3, Cleared(), stored(PROMPT[:12])))
    assert to.held_blocks("a") == 3
    assert to.apply("a", batch(4, Removed(tuple(hashes(PROMPT)[2:3]))))


def test_a_session_stays_where_it_was_among_equals() -> None:
    to = router("a", "b", "c", "d")
    first = route(to, PROMPT[:3], key="k")
    to.ended(first)
    assert all(_end(to, route(to, [50 + n, 51, 52], key="k")).replica == first.replica for n in range(9))


def _end(to: Router, chosen: Route) -> Route:
    to.ended(chosen)
    return chosen


def test_what_others_send_counts_when_it_is_told_twice() -> None:
    to = router("a", "b")
    for seq in (1, 2):
        assert to.apply("a", batch(seq, queued=500, time_s=10.0), now=10.1)
    assert route(to, PROMPT).replica == "b"
    assert to.apply("b", batch(1, queued=9000, time_s=10.0), now=20.0)  # too old to say anything
    assert to.load("b")[0] == 21


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_equals_take_turns(count: int) -> None:
    to = router(*(f"r{n}" for n in range(count)))
    chosen = [_end(to, route(to, [1000 * n, 1, 2])).replica for n in range(3 * count)]
    assert {name: chosen.count(name) for name in to.replicas} == dict.fromkeys(to.replicas, 3)
    common = list(range(8))  # a beginning that all hold makes nobody special
    for name in to.replicas:
        to.apply(name, batch(1, stored(common)))
    chosen = [_end(to, route(to, [*common, 1000 * n, 1, 2])).replica for n in range(3 * count)]
    assert {name: chosen.count(name) for name in to.replicas} == dict.fromkeys(to.replicas, 3)


def test_the_unusable_and_the_excluded_get_nothing() -> None:
    to = router("a", "b")
    to.use("a", False)
    assert route(to, PROMPT).replica == "b"
    assert to.route(hashes(PROMPT), 21, 0.0, without={"b"}) is None
    to.use("a", True)
    assert route(to, PROMPT, without={"b"}).replica == "a"
    to.remove("a")
    to.remove("b")
    assert to.route(hashes(PROMPT), 21, 0.0) is None
    full = router(*(f"r{n}" for n in range(8)))  # as many as there is room for at first
    for n in range(100):
        assert full.route(hashes(PROMPT), 21, 0.0, without=set(full.replicas)) is None
        assert _end(full, route(full, PROMPT[:3], without={f"r{n % 8}"})).replica != f"r{n % 8}"


def test_a_replica_that_takes_the_place_of_another_inherits_nothing() -> None:
    to = router("a")
    old = route(to, PROMPT)
    to.apply("a", batch(1, stored(PROMPT)))
    to.remove("a")
    to.add("b")
    assert to.held_blocks("b") == 0
    assert route(to, PROMPT).held == 0
    to.ended(old)
    assert to.load("b") == (21, 0)


@pytest.mark.parametrize("seed", range(4))
def test_depths_are_what_looking_at_every_block_gives(seed: int) -> None:
    choose = random.Random(seed)
    index, truth = HeldIndex(10_000), {slot: set[int]() for slot in range(9)}
    prompts = [hashes([choose.randrange(2) for _ in range(60)]) for _ in range(6)]
    for step in range(300):
        slot, prompt = choose.randrange(9), choose.choice(prompts)
        cut = choose.randrange(len(prompt) + 1)
        if choose.random() < 0.6:
            index.add(slot, prompt[:cut])
            truth[slot] |= set(prompt[:cut])
        elif choose.random() < 0.9:
            gone = [value for other in prompts for value in other if set(prompt[cut:]) & {value}]
            below = [value for other in prompts if set(gone) & set(other) for value in other[cut:]]
            index.remove(slot, below)
            truth[slot] -= set(below)
        else:
            index.clear(slot)
            truth[slot].clear()
        wanted = choose.choice(prompts)
        found = {slot: depth for depth, mask in index.depths(wanted) for slot in range(9) if mask >> slot & 1}
        for slot, blocks in truth.items():
            depth = next((i for i, value in enumerate(wanted) if value not in blocks), len(wanted))
            assert found.get(slot, 0) == depth, step
            assert index.count(slot) == len(blocks)


def test_what_comes_and_goes_for_ever_leaves_nothing_behind() -> None:
    index = HeldIndex(10_000)
    for wave in range(400):
        index.add(3, range(100 * wave, 100 * wave + 100))
        index.remove(3, range(100 * wave, 100 * wave + 60))
        index.add(3, range(100 * wave, 100 * wave + 10))
        index.remove(3, range(100 * wave, 100 * wave + 99))
    assert index.count(3) == len(index) == 400
    assert len(index._came[3]) < 2 * 400 + 2000
    index.add(4, range(39_990, 40_000))
    index.clear(3)
    assert (index.count(3), index.count(4), len(index)) == (0, 10, 10)


def test_the_index_is_bounded_and_promises_end() -> None:
    index = HeldIndex(5)
    index.add(0, range(100))
    assert index.count(0) == len(index) == 5
    index.promise(1, range(50, 60), 0, until=3.0)
    assert index.depths(range(50, 60)) == [(8, 2)]  # every fourth is noted
    assert index.depths([*range(50, 57), 70]) == [(4, 2)]
    index.add(2, range(50, 55))
    index.promise(2, range(50, 70), 5, until=4.0)
    assert sorted(index.depths(range(50, 70))) == [(8, 2), (20, 4)]
    index.expire(3.5)
    assert index.depths(range(50, 70)) == [(20, 4)]
    index.expire(4.5)
    assert index.depths(range(50, 70)) == [(5, 4)]


class Simple:
    """The same choice as one formula over all replicas and all blocks, in nothing but sets."""

    def __init__(self, names: Sequence[str]) -> None:
        self.held = {name: set[int]() for name in names}
        self.promises: list[tuple[float, str, list[int]]] = []
        self.last = dict.fromkeys(names, 0)
        self.sent = 0

    def depths(self, name: str, wanted: Sequence[int], now: float) -> tuple[int, int]:
        """Blocks of a prompt that one holds; and with those promised behind them, of which every fourth is noted."""
        promised = {value for until, to, noted in self.promises if to == name and until >= now for value in noted}
        held = depth = next((n for n, value in enumerate(wanted) if value not in self.held[name]), len(wanted))
        while (noted := depth // 4 * 4 + 4) <= len(wanted) and wanted[noted - 1] in promised:
            depth = noted
        return held, depth

    def check(self, to: Router, tokens: Sequence[int], now: float, chosen: Route, loads: dict[str, float]) -> None:
        """The route is one of the cheapest; of those that hold as much in the same way, the least busy, then rested."""
        wanted = hashes(tokens)
        depths = {name: self.depths(name, wanted, now) for name in self.held}
        tokens_held = {name: min(depth * SIZE, len(tokens) - 1) for name, (_, depth) in depths.items()}
        cost = {name: loads[name] - to.config.recompute * tokens_held[name] for name in self.held}
        assert chosen.held == tokens_held[chosen.replica]
        assert cost[chosen.replica] == min(cost.values())
        equals = [name for name in self.held if depths[name] == depths[chosen.replica]]
        assert chosen.replica == min(equals, key=lambda name: (loads[name], self.last[name], equals.index(name)))
        self.sent += 1
        self.last[chosen.replica] = self.sent
        self.promises.append((now + to.config.promise_s, chosen.replica, wanted[chosen.held // SIZE // 4 * 4 + 3 :: 4]))


@pytest.mark.parametrize(("seed", "count"), [(0, 3), (1, 12), (2, 40), (3, 40)])
def test_choices_are_those_of_the_plain_formula(seed: int, count: int) -> None:
    choose, names = random.Random(seed), [f"r{n}" for n in range(count)]
    to, simple, now = router(*names), Simple(names), 0.0
    seqs, opened = dict.fromkeys(names, 0), list[Route]()
    trunks = [[choose.randrange(10**6) for _ in range(choose.randrange(8, 160))] for _ in range(4)]
    for _ in range(500):
        now += choose.random() * 0.2
        tokens = [*choose.choice(trunks), *(choose.randrange(10**6) for _ in range(choose.randrange(40)))]
        name = choose.choice(names)
        if choose.random() < 0.4:
            seqs[name] += 1
            if choose.random() < 0.2 and simple.held[name]:
                gone = set(choose.choice([hashes(trunk) for trunk in trunks])[1:])  # a trunk's first block stays
                gone |= {value for value in simple.held[name] if value not in {v for t in trunks for v in hashes(t)}}
                simple.held[name] -= gone
                assert to.apply(name, batch(seqs[name], Removed(tuple(gone))))
            else:
                simple.held[name] |= set(hashes(tokens))
                assert to.apply(name, batch(seqs[name], stored(tokens)))
        elif opened and choose.random() < 0.4:
            old = opened.pop(choose.randrange(len(opened)))
            to.started(old)
            if choose.random() < 0.3:
                opened.append(old)
            else:
                to.ended(old)
        else:
            loads = {
                each: queued + to.config.running * running for each in names for queued, running in [to.load(each)]
            }
            opened.append(route(to, tokens, now))
            simple.check(to, tokens, now, opened[-1], loads)
    assert simple.sent > 150
