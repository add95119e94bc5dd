"""One level of one scenario, all systems in turns: the only place where anything is timed against anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shoal.bench.beside import busy
from shoal.bench.ceiling import ModelFacts, ceiling
from shoal.bench.machine import Check, ThermalGate
from shoal.bench.sustained import SustainedLoad
from shoal.bench.systems import KINDS, Named, system_class
from shoal.bench.systems.base import Measured, Setup
from shoal.bench.timeline import RunTimes, agreement, metrics, paired, summary
from shoal.bench.worker import Worker
from shoal.bench.workloads import Job, Workload, make_jobs
from shoal.errors import BenchmarkError

_PAUSE_S = 0.5  # threads of the system before are idle again
_LEAST_RUNS = 2
_SAME_PROCESS = {"static": ""}
"""Variants that run in the process of another, because they share its model."""
COLD = Workload("cold", "1", 1, (40, 40), 16, 1)
Tell = Callable[[str], None]


@dataclass(slots=True)
class Contender:
    """A system in one of its variants, and the runs it has done of a level. `source.path` is its model file."""

    system: Named
    variant: str
    source: Measured
    runs: list[dict[str, Any]] = field(default_factory=list)
    spent_s: float = 0.0
    error: str | None = None
    last: RunTimes | None = None
    rates: list[float] = field(default_factory=list)  # of a lasting load: tokens a second, by second

    @property
    def key(self) -> str:
        """`SYSTEM`, or `SYSTEM:VARIANT`."""
        return f"{self.system.key}:{self.variant}" if self.variant else self.system.key

    def done(self, runs: int, budget_s: float) -> bool:
        """True when it has failed, has all its runs, or has used its time."""
        enough = len(self.runs) >= _LEAST_RUNS and self.spent_s >= budget_s
        return self.error is not None or len(self.runs) >= runs or enough

    @property
    def fit(self) -> int:
        """How many of its runs may be quoted."""
        return sum(not run["throttled"] for run in self.runs)


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often a level is run: `count` rounds, in which all systems get the same jobs one after another.

    Unless they are `wanted`, a system that has used its budget does fewer. Wanted ones are all done by all, and rounds
    with a throttled run are repeated until everybody has `count` fit runs or the level has taken `limit_s`; not when
    the gate has given up waiting, for then this machine is shared and the figures are ratios of what ran in turns.
    """

    count: int = 5
    wanted: bool = False
    limit_s: float = 900.0


def variants_of(system: Named) -> Mapping[str, str]:
    """The ways a system can run, and what they are called."""
    found: Mapping[str, str] = system_class(system.kind).VARIANTS
    return found


def why_missing(system: Named) -> str | None:
    """Why a system cannot be measured in this installation, or None."""
    reason: str | None = system_class(system.kind).missing()
    return reason


class Harness:
    """Keeps a process per system and variant, and runs levels on them, one system at a time.

    Each round all systems get the same jobs, in an order that turns around from round to round; before each run the
    gate looks whether the machine is fit, and a run that began or ended on an unfit machine is marked as throttled.
    """

    def __init__(
        self,
        sources: Mapping[Named, Measured],
        gate: ThermalGate,
        *,
        text: Sequence[int],
        facts: ModelFacts,
        machine: Mapping[str, Any],
        tell: Tell,
    ) -> None:
        self.sources = sources
        self.gate = gate
        self._text = text
        self._facts = facts
        self._machine = machine
        self._tell = tell
        self._workers: dict[tuple[Named, str], Worker] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self._checked: Check | None = None

    def contenders(self, workload: Workload) -> list[Contender]:
        """Who takes part in a level."""
        found = []
        for system, source in self.sources.items():
            if system.kind.startswith("shoal") or workload.peers:
                known = variants_of(system)
                found += [Contender(system, variant, source) for variant in workload.variants if variant in known]
        return found

    def level(self, workload: Workload, rounds: Rounds) -> dict[str, Any]:
        """Measure one level; its document."""
        contenders = self.contenders(workload)
        setup = Setup(workload.batch, workload.length, workload.trunk, workload.tokens * self._facts.kv_bytes_per_token)
        self._tell(f"{workload.scenario} {workload.level}")
        self._checked = None  # warming up and loading make heat too
        if rounds.wanted:
            self.gate.new_level()
        if not workload.fresh:
            for contender in contenders:
                self._guarded(contender, partial(self._warm_up, contender, workload, setup))
        equality: dict[str, Any] = {}
        begin, number = time.monotonic(), 0
        if workload.seconds:
            rounds = Rounds(1)
        while number < rounds.count or self._once_more(contenders, rounds, time.monotonic() - begin):
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                if rounds.wanted or not contender.done(rounds.count, workload.budget_s):
                    self._guarded(contender, partial(self._once, contender, workload, number, setup))
            if number == 0:
                equality = _equality(contenders)
            number += 1
        jobs = make_jobs(workload, self._text, 0)
        relative = rounds.wanted and any(c.fit < rounds.count for c in contenders if c.error is None)
        return {
            "scenario": workload.scenario,
            "level": workload.level,
            "workload": workload.to_json(),
            "ceiling": ceiling(workload, jobs, self._facts, self._machine),
            "results": {c.key: _document(c, relative) for c in contenders},
            "relative": relative,
            "pairs": _pairs(contenders),
            "equality": equality,
        }

    def _once_more(self, contenders: Sequence[Contender], rounds: Rounds, took_s: float) -> bool:
        """Whether a round more may bring the fit runs that are wanted and missing."""
        if not rounds.wanted or self.gate.shut:
            return False
        missing = [c.key for c in contenders if c.error is None and c.fit < rounds.count]
        if missing and took_s >= rounds.limit_s:
            self._tell(f"  {', '.join(missing)}: throttled after {took_s:.0f} s, the limit; figures are relative")
            return False
        return bool(missing)

    def fidelity(self, system: Named, exact: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Mean divergence of a system from the exact logits, or why it cannot be said. A process of its own."""
        if not KINDS[system.kind].tells_logits:
            return {"missing": "it tells no logits"}
        worker = None
        try:
            worker = Worker(system.kind, self.sources[system])
            return worker.ask("fidelity", exact=exact, tokens=list(tokens))
        except BenchmarkError as error:
            return {"missing": error.message}
        finally:
            if worker is not None:
                worker.close()

    def close(self, variants_only: bool = False) -> None:
        """End the processes; with `variants_only` those that ran no default variant."""
        for name in [n for n in self._workers if n[1] or not variants_only]:
            self._workers.pop(name).close()

    # -- one system ---------------------------------------------------------------------------------------------

    def _guarded(self, contender: Contender, act: Callable[[], None]) -> None:
        """Let a system fail without the others: it is out of this level, and says why."""
        if contender.error is not None:
            return
        try:
            act()
        except BenchmarkError as error:
            contender.error = error.message
            self._tell(f"  {contender.key}: {error.message}")
            name = (contender.system, _SAME_PROCESS.get(contender.variant, contender.variant))
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.kill()

    def _worker(self, contender: Contender) -> Worker:
        """The process of a contender; a new one also tells what a cold start takes."""
        name = (contender.system, _SAME_PROCESS.get(contender.variant, contender.variant))
        if name not in self._workers:
            begin = time.perf_counter()
            worker = self._workers[name] = Worker(contender.system.kind, contender.source)
            if not contender.variant:
                self.loaded[contender.system.key] = self._cold(worker, begin)
        return self._workers[name]

    def _cold(self, worker: Worker, begin: float) -> dict[str, Any]:
        """Seconds from nothing to a loaded system, of its first run ever, and of the same run when warm."""
        kv_bytes = COLD.tokens * self._facts.kv_bytes_per_token
        worker.prepare(Setup(1, COLD.length, 0, kv_bytes))
        load_s = time.perf_counter() - begin
        first, *later = (worker.run(make_jobs(COLD, self._text, seed)) for seed in range(4))
        warm = [timeline.wall_s for timeline in later]
        described = worker.ask("describe")["configuration"]
        return {
            "configuration": described,
            "cold": {"load_s": load_s, "first_run_s": first.wall_s, "warm_run_s": summary(warm)["median"]},
        }

    def _warm_up(self, contender: Contender, workload: Workload, setup: Setup) -> None:
        """Load what the level needs and touch it once; not measured."""
        worker = self._worker(contender)
        worker.prepare(replace(setup, variant=contender.variant))
        first = make_jobs(workload, self._text, -1)[0]
        worker.run([replace(first, prompt=first.prompt[:64], max_tokens=4, schema=None)])

    def _look(self) -> Check:
        """Let the threads of the run before become idle, then let the gate look."""
        time.sleep(_PAUSE_S)
        return self.gate.check()

    def _once(self, contender: Contender, workload: Workload, number: int, setup: Setup) -> None:
        """One run between two looks at the machine."""
        ready = replace(setup, variant=contender.variant)
        if workload.fresh:
            act = partial(self._first, contender, workload, number, ready)
        elif workload.seconds:
            act = partial(self._lasting, contender, workload, ready)
        else:
            act = partial(self._run, contender, make_jobs(workload, self._text, number), ready, workload.beside)
        before, self._checked = self._checked or self._look(), None
        run = act()
        after = self._checked = self._look()  # it is also the look before the next run
        contender.spent_s += run["wall_s"]
        throttled = not before.fit or after.before > 1 + self.gate.margin
        run |= {"throttled": throttled and not workload.seconds}  # of a lasting load that is what is measured
        contender.runs.append(run)
        mark = ", throttled" if run["throttled"] else ""
        self._tell(f"  {contender.key}: {run['wall_s']:.2f} s, {run['tokens_per_s']:.0f} tok/s{mark}")

    def _run(self, contender: Contender, jobs: Sequence[Job], setup: Setup, beside: str) -> dict[str, Any]:
        worker = self._worker(contender)
        worker.prepare(setup)
        with busy(beside):
            timeline = contender.last = worker.run(jobs)
        return metrics(jobs, timeline)

    def _first(self, contender: Contender, workload: Workload, number: int, setup: Setup) -> dict[str, Any]:
        """A process from its start to its first answers, and the same again when it is warm."""
        begin = time.perf_counter()
        worker = Worker(contender.system.kind, contender.source)
        try:
            worker.prepare(setup)
            load_s = time.perf_counter() - begin
            first, warm = (make_jobs(workload, self._text, 2 * number + i) for i in range(2))
            timeline = contender.last = worker.run(first)
            again = worker.run(warm)
        finally:
            worker.close()
        told = {"load_s": load_s, "cold_s": load_s + timeline.wall_s, "warm_s": again.wall_s}
        return {**metrics(first, timeline), **told}

    def _lasting(self, contender: Contender, workload: Workload, setup: Setup) -> dict[str, Any]:
        """The same burst again and again; then how long the machine takes to be as quick as before."""
        worker = self._worker(contender)
        worker.prepare(setup)
        load = SustainedLoad()
        begin, number = time.perf_counter(), 0
        while time.perf_counter() - begin < workload.seconds:
            jobs = make_jobs(workload, self._text, number)
            load.add(time.perf_counter() - begin, worker.run(jobs))
            number += 1
        contender.rates = load.rates()
        recovery_s = self.gate.recovery_s(workload.seconds)
        return load.metrics() | ({} if recovery_s is None else {"recovery_s": recovery_s})


_PAIRED = ("wall_s", "tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s", "joules")


def _pairs(contenders: Sequence[Contender]) -> dict[str, Any]:
    """The first contender over each other one, of the rounds that both ran: by contender and metric."""
    if not contenders:
        return {}
    first, found = contenders[0], {}
    for other in contenders[1:]:
        pairs = list(zip(first.runs, other.runs, strict=False))
        told = {
            name: paired([a[name] for a, _ in pairs], [b[name] for _, b in pairs])
            for name in _PAIRED
            if pairs and all(name in run for pair in pairs for run in pair)
        }
        if told:
            found[other.key] = told
    return found


def _document(contender: Contender, relative: bool) -> dict[str, Any]:
    """Runs, the summary of those that may be quoted, and who came and went when in the last.

    Where only ratios can be said (`relative`) the summary is of all runs, since they stand beside each other.
    """
    fit = [run for run in contender.runs if relative or not run["throttled"]]
    names = [name for name in (fit[0] if fit else {}) if name != "throttled"]
    spans = []
    if contender.last is not None:
        spans = [[t.arrival_s, t.times[0], t.times[-1]] for t in contender.last.traces if t.times]
    document = {
        "runs": contender.runs,
        "throttled": len(contender.runs) - contender.fit,
        "summary": {name: summary([run[name] for run in fit if name in run]) for name in names},
        "spans": spans,
        **({"rates": contender.rates} if contender.rates else {}),
    }
    return document if contender.error is None else {**document, "error": contender.error}


def _equality(contenders: Sequence[Contender]) -> dict[str, Any]:
    """How far the outputs of those that run the very same weights agree with the first one's, in the first round."""
    same = [c for c in contenders if c.last is not None and not c.system.other_file]
    if not same or same[0].last is None:
        return {}
    first = same[0].last
    return {c.key: agreement(first.traces, c.last.traces) for c in same[1:] if c.last is not None}
