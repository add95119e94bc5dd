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
from shoal.bench.systems import KINDS, Named, system_class
from shoal.bench.systems.base import Measured, Setup
from shoal.bench.timeline import RunTimes, agreement, metrics, summary
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

    @property
    def key(self) -> str:
        """`SYSTEM`, or `SYSTEM:VARIANT`."""
        return f"{self.system.key}:{self.variant}" if self.variant else self.system.key

    def done(self, runs: int, budget_s: float) -> bool:
        """True when it has failed, has all its runs, or has used its time."""
        enough = len(self.runs) >= _LEAST_RUNS and self.spent_s >= budget_s
        return self.error is not None or len(self.runs) >= runs or enough


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

    def level(self, workload: Workload, runs: int) -> dict[str, Any]:
        """Measure one level; its document."""
        contenders = self.contenders(workload)
        setup = Setup(workload.batch, workload.length, workload.trunk, workload.tokens * self._facts.kv_bytes_per_token)
        self._tell(f"{workload.scenario} {workload.level}")
        self._checked = None  # warming up and loading make heat too
        for contender in contenders:
            self._guarded(contender, partial(self._warm_up, contender, workload, setup))
        equality: dict[str, Any] = {}
        for number in range(runs):
            jobs = make_jobs(workload, self._text, number)
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                if not contender.done(runs, workload.budget_s):
                    self._guarded(contender, partial(self._run, contender, jobs, setup, workload.beside))
            if number == 0:
                equality = _equality(contenders)
        jobs = make_jobs(workload, self._text, 0)
        return {
            "scenario": workload.scenario,
            "level": workload.level,
            "workload": workload.to_json(),
            "ceiling": ceiling(workload, jobs, self._facts, self._machine),
            "results": {c.key: _document(c) for c in contenders},
            "equality": equality,
        }

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

    def _run(self, contender: Contender, jobs: Sequence[Job], setup: Setup, beside: str) -> None:
        worker = self._worker(contender)
        worker.prepare(replace(setup, variant=contender.variant))
        before, self._checked = self._checked or self._look(), None
        with busy(beside):
            timeline = contender.last = worker.run(jobs)
        after = self._checked = self._look()  # it is also the look before the next run
        contender.spent_s += timeline.wall_s
        throttled = not before.fit or after.before > 1 + self.gate.margin
        run = {**metrics(jobs, timeline), "throttled": throttled}
        contender.runs.append(run)
        mark = ", throttled" if throttled else ""
        self._tell(f"  {contender.key}: {timeline.wall_s:.2f} s, {run['tokens_per_s']:.0f} tok/s{mark}")


def _document(contender: Contender) -> dict[str, Any]:
    """Runs, the summary of those that may be quoted, and who came and went when in the last."""
    fit = [run for run in contender.runs if not run["throttled"]]
    names = [name for name in (fit[0] if fit else {}) if name != "throttled"]
    spans = []
    if contender.last is not None:
        spans = [[t.arrival_s, t.times[0], t.times[-1]] for t in contender.last.traces if t.times]
    document = {
        "runs": contender.runs,
        "throttled": len(contender.runs) - len(fit),
        "summary": {name: summary([run[name] for run in fit if name in run]) for name in names},
        "spans": spans,
    }
    return document if contender.error is None else {**document, "error": contender.error}


def _equality(contenders: Sequence[Contender]) -> dict[str, Any]:
    """How far the outputs of those that run the very same weights agree with the first one's, in the first round."""
    same = [c for c in contenders if c.last is not None and c.system.flavour != "q8"]
    if not same or same[0].last is None:
        return {}
    first = same[0].last
    return {c.key: agreement(first.traces, c.last.traces) for c in same[1:] if c.last is not None}
