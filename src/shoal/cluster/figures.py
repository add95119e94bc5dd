"""What placing requests is worth, as figures with their bars: the simulation over sizes, policies and workloads."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.cluster.router import Router
from shoal.cluster.simulate import Machine, Simulation
from shoal.cluster.traffic import AgentTurns, Prefixes, TenantCalls, Traffic, fresh
from shoal.core.journal import Cleared, Stored
from shoal.engine.feed import BlockBatch

LOAD = 0.9  # of what replicas could do if every prefix were there
AFFINITY = 1.3  # times the throughput of a router that only remembers
RANDOM = 2.0  # times that of none
WARM = 2.0  # times the p90 of a single replica that holds all its prefixes
ROUTE_US = 50.0  # processor time of one choice among 256 replicas
CALLS = 200  # per replica: with fewer, one that falls behind has ended next to nothing when the last call comes


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy in one setting."""

    workload: str
    replicas: int
    policy: str
    late_s: float
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class FigureBar:
    """What a figure must be, and what it is."""

    name: str
    value: float
    limit: float
    most: bool = False

    @property
    def met(self) -> bool:
        """True when it is."""
        return self.value <= self.limit if self.most else self.value >= self.limit


def tenants_of(machine: Machine, replicas: int, seed: int, calls: int = CALLS, tenants: int = 150) -> TenantCalls:
    """The tenants' calls, so many for each replica, at `LOAD` of what they can do."""
    output = 100
    seconds = (1200 * machine.prompt_ms + output * (machine.step_ms / 8 + machine.row_ms)) / 1e3
    warm_rate = 0.5 * replicas / (7200 * machine.prompt_ms / 1e3)  # half of what replicas can do that hold nothing
    return TenantCalls(
        replicas * calls,
        LOAD * replicas / seconds,
        machine.block_size,
        tenants=tenants,
        output=output,
        warm_rate=warm_rate,
        seed=seed,
    )


def agents_of(machine: Machine, replicas: int, seed: int) -> AgentTurns:
    """AgentTurns of 40 turns, twelve a replica and 512 at most."""
    return AgentTurns(min(12 * replicas, 512), 20.0, machine.block_size, seed=seed)


def simulate(
    sizes: Sequence[int],
    *,
    machine: Machine | None = None,
    late_s: float = 5.0,
    seed: int = 0,
    calls: int = CALLS,
    tell: Callable[[PolicyRow], None] = lambda row: None,  # noqa: ARG005
) -> tuple[list[PolicyRow], list[FigureBar]]:
    """All settings, and the bars: `tell` hears of each row as it comes. `calls` are those of tenants, per replica."""
    machine = machine or Machine()
    rows: list[PolicyRow] = []
    for row in _rows(sizes, machine, late_s, seed, calls):
        tell(row)
        rows.append(row)
    cost = router_cost(seed)
    return rows, [
        *bars(rows),
        FigureBar("router: us a choice among 256 replicas, alone", cost.us, ROUTE_US, most=True),
        FigureBar("router: bytes a block that one replica holds", cost.block_bytes, 200, most=True),
        FigureBar("router: bytes for each further one that holds it", cost.copy_bytes, 200, most=True),
    ]


@dataclass(frozen=True, slots=True)
class RouterCost:
    """What a choice costs in processor time, and what is kept per block, measured on a full index."""

    us: float
    block_bytes: float
    copy_bytes: float


def router_cost(seed: int, replicas: int = 256, calls: int = 4000) -> RouterCost:
    """Fill a router with 2,000 blocks of its own for each replica and 150 prefixes on eight each; then choose."""
    choose, size = random.Random(seed), 32
    router, prefixes = Router(size), Prefixes(150, 6000, size)
    names = [f"replica-{number}" for number in range(replicas)]
    for name in names:
        router.add(name)
        router.apply(name, BlockBatch(0, 0.0, (Cleared(),), 0, 0))
    seqs = dict.fromkeys(names, 0)

    def hold(name: str, hashes: Sequence[int]) -> None:
        seqs[name] += 1
        assert router.apply(name, BlockBatch(seqs[name], 0.0, (Stored(None, tuple(hashes), ()),), 0, 0))

    shared = [prefixes.extend(tenant, ())[1] for tenant in range(len(prefixes))]
    tracemalloc.start()
    for name in names:
        hold(name, [choose.getrandbits(64) for _ in range(2000)])
    alone = tracemalloc.get_traced_memory()[0] / len(router.index)
    holders = [choose.sample(names, 8) for _ in shared]
    for hashes, those in zip(shared, holders, strict=True):
        hold(those[0], hashes)
    before = tracemalloc.get_traced_memory()[0]
    for hashes, those in zip(shared, holders, strict=True):
        for name in those[1:]:
            hold(name, hashes)
    copies = (tracemalloc.get_traced_memory()[0] - before) / sum(7 * len(hashes) for hashes in shared)
    tracemalloc.stop()
    prompts = [prefixes.extend(choose.randrange(150), fresh(number, 1200))[1] for number in range(calls)]
    gc.collect()
    gc.disable()  # a collection would look at all that the simulations before have left
    try:
        begin = time.thread_time()
        for number, hashes in enumerate(prompts):
            route = router.route(hashes, 7200, number / 1000)
            assert route is not None
            router.started(route)
            router.ended(route)
        return RouterCost((time.thread_time() - begin) / calls * 1e6, alone, copies)
    finally:
        gc.enable()


def _rows(sizes: Sequence[int], machine: Machine, late_s: float, seed: int, calls: int) -> Iterator[PolicyRow]:
    warm = Simulation(machine, 1, "random", 0.0)
    yield PolicyRow("tenants", 1, "warm", 0.0, warm.run(tenants_of(machine, 1, seed, calls=300, tenants=20)).summary())
    for replicas in sizes:
        for name, late in (
            ("precise", 0.0),
            ("precise", late_s),
            ("affinity", 0.0),
            ("sessions", 0.0),
            ("random", 0.0),
        ):
            yield _row("tenants", tenants_of(machine, replicas, seed, calls), replicas, name, late, machine)
        for name in ("precise", "affinity", "random"):
            yield _row("agents", agents_of(machine, replicas, seed), replicas, name, 0.0, machine)


def _row(kind: str, workload: Traffic, replicas: int, policy: str, late_s: float, machine: Machine) -> PolicyRow:
    simulation = Simulation(machine, replicas, policy, late_s)
    return PolicyRow(kind, replicas, policy, late_s, simulation.run(workload).summary())


def bars(rows: Sequence[PolicyRow]) -> list[FigureBar]:
    """What the rows must come to."""
    found = {(row.workload, row.replicas, row.policy, row.late_s > 0): row.figures for row in rows}
    warm = found["tenants", 1, "warm", False]["ttft_p90_s"]
    told = []
    for replicas in sorted({row.replicas for row in rows} - {1}):

        def rate(policy: str, late: bool = False, replicas: int = replicas) -> float:
            return found["tenants", replicas, policy, late]["calls_per_s"]

        precise = found["tenants", replicas, "precise", False]
        ttft, route_us = precise["ttft_p90_s"], precise["route_us"]
        told += [
            FigureBar(f"{replicas}: precise / affinity, calls/s", rate("precise") / rate("affinity"), AFFINITY),
            FigureBar(f"{replicas}: precise / random, calls/s", rate("precise") / rate("random"), RANDOM),
            FigureBar(f"{replicas}: p90 to the first token / one warm replica's", ttft / warm, WARM, most=True),
            FigureBar(f"{replicas}: late events / affinity, calls/s", rate("precise", True) / rate("affinity"), 1.0),
            FigureBar(f"{replicas}: us a choice within the simulation", route_us, ROUTE_US, most=True),
        ]
    return told
