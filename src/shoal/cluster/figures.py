"""What placing requests is worth, as figures with their bars: the simulation over sizes, policies and workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.cluster.simulate import Machine, Simulation, policies
from shoal.cluster.traffic import AgentTurns, TenantCalls, Traffic

LOAD = 0.9  # of what replicas could do if every prefix were there
AFFINITY = 1.3  # times the throughput of a router that only remembers
RANDOM = 2.0  # times that of none
WARM = 2.0  # times the p90 of a single replica that holds all its prefixes
_CALLS = {4: 300, 16: 150, 64: 60, 256: 30}  # per replica: large clusters settle sooner, and cost more to simulate


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


def tenants_of(machine: Machine, replicas: int, seed: int, calls: int | None = None, tenants: int = 150) -> TenantCalls:
    """The tenants' calls for so many replicas, at `LOAD` of what they can do."""
    output = 100
    seconds = (1200 * machine.prompt_ms + output * (machine.step_ms / 8 + machine.row_ms)) / 1e3
    count = replicas * _CALLS.get(replicas, 100) if calls is None else calls
    return TenantCalls(count, LOAD * replicas / seconds, machine.block_size, tenants=tenants, output=output, seed=seed)


def agents_of(machine: Machine, replicas: int, seed: int) -> AgentTurns:
    """AgentTurns of 40 turns, twelve a replica and 512 at most."""
    return AgentTurns(min(12 * replicas, 512), 20.0, machine.block_size, seed=seed)


def simulate(
    sizes: Sequence[int],
    *,
    machine: Machine | None = None,
    late_s: float = 5.0,
    seed: int = 0,
    tell: Callable[[PolicyRow], None] = lambda row: None,  # noqa: ARG005
) -> tuple[list[PolicyRow], list[FigureBar]]:
    """All settings, and the bars: `tell` hears of each row as it comes."""
    machine = machine or Machine()
    rows = []
    for row in _rows(sizes, machine, late_s, seed):
        tell(row)
        rows.append(row)
    return rows, bars(rows)


def _rows(sizes: Sequence[int], machine: Machine, late_s: float, seed: int) -> Iterator[PolicyRow]:
    warm = Simulation(machine, 1, policies(machine)["random"], 0.0)
    yield PolicyRow("tenants", 1, "warm", 0.0, warm.run(tenants_of(machine, 1, seed, calls=300, tenants=20)).summary())
    for replicas in sizes:
        for name, late in (
            ("precise", 0.0),
            ("precise", late_s),
            ("affinity", 0.0),
            ("sessions", 0.0),
            ("random", 0.0),
        ):
            yield _row("tenants", tenants_of(machine, replicas, seed), replicas, name, late, machine)
        for name in ("precise", "affinity", "random"):
            yield _row("agents", agents_of(machine, replicas, seed), replicas, name, 0.0, machine)


def _row(kind: str, workload: Traffic, replicas: int, policy: str, late_s: float, machine: Machine) -> PolicyRow:
    simulation = Simulation(machine, replicas, policies(machine)[policy], late_s)
    return PolicyRow(kind, replicas, policy, late_s, simulation.run(workload).summary())


def bars(rows: Sequence[PolicyRow]) -> list[FigureBar]:
    """What the rows must come to."""
    found = {(row.workload, row.replicas, row.policy, row.late_s > 0): row.figures for row in rows}
    warm = found["tenants", 1, "warm", False]["ttft_p90_s"]
    told = []
    for replicas in sorted({row.replicas for row in rows} - {1}):

        def rate(policy: str, late: bool = False, replicas: int = replicas) -> float:
            return found["tenants", replicas, policy, late]["calls_per_s"]

        ttft = found["tenants", replicas, "precise", False]["ttft_p90_s"]
        told += [
            FigureBar(f"{replicas}: precise / affinity, calls/s", rate("precise") / rate("affinity"), AFFINITY),
            FigureBar(f"{replicas}: precise / random, calls/s", rate("precise") / rate("random"), RANDOM),
            FigureBar(f"{replicas}: p90 to the first token / one warm replica's", ttft / warm, WARM, most=True),
            FigureBar(f"{replicas}: late events / affinity, calls/s", rate("precise", True) / rate("affinity"), 1.0),
        ]
    return told
