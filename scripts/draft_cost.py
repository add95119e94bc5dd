"""What looking drafts up and choosing them costs, by streams: alone, and beside a model's passes.

    python scripts/draft_cost.py RESULT                   of `shoal bench --scenario speculation`: its texts, no model
    python scripts/draft_cost.py --rounds 24 story,1 ...  levels of that bench on the real model, on and off in turns

Alone, everything a drafter touches is in the cache; between passes that read the weights little of it is. "Swept" is
alone with 24 MB read before each step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.drafting import DraftSimulation
from shoal.bench.hindsight import PassCost, WrittenText
from shoal.bench.speculation import LEVELS, SpeculationBench, TaskLevel
from shoal.config import EngineConfig
from shoal.core.draft import Drafter
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Sequence
from shoal.engine.engine import Engine
from shoal.engine.loading import open_model
from shoal.types import StepRecord


class TimedDrafter(Drafter):
    """A drafter that adds up the seconds that its thread computes in it: what it waits for a core is not its own."""

    seconds = 0.0
    _inside = False

    def _timed(self, call: Any, *given: Any) -> Any:
        if self._inside:
            return call(*given)
        self._inside, begin = True, time.thread_time()
        try:
            return call(*given)
        finally:
            self._inside, self.seconds = False, self.seconds + time.thread_time() - begin

    def follow(self, seq: Sequence, least: float = 0.0) -> None:
        self._timed(super().follow, seq, least)

    def leave(self, seq: Sequence) -> None:
        self._timed(super().leave, seq)

    def plan(self, *given: Any) -> bool:
        return bool(self._timed(super().plan, *given))


def time_drafter(scheduler: Scheduler) -> TimedDrafter:
    """Give a scheduler that has served nobody a timed drafter."""
    drafter = scheduler._drafter = TimedDrafter(scheduler.spec.max_rows)
    return drafter


def replay(document: Any, *, swept: bool) -> dict[str, tuple[float, int, int, int]]:
    """By level: microseconds of the drafter a step, steps, drafted and right tokens; levels in turn, as measured.

    With `swept` a step reads 24 MB before the drafter's turn comes, as a pass reads weights.
    """
    ballast = np.zeros(24 << 20, np.uint8)
    simulations: dict[str, tuple[DraftSimulation, TimedDrafter]] = {}
    found = {}
    for level in document["levels"]:
        cost = PassCost(document["costs_ms"][level["model"]], level["streams"])
        if level["model"] not in simulations:
            simulation = DraftSimulation(cost)
            simulations[level["model"]] = simulation, time_drafter(simulation.scheduler)
        simulation, drafter = simulations[level["model"]]

        def sweeping(rows: int, cost: PassCost = cost) -> float:
            ballast.sum(dtype=np.uint8)
            return cost(rows)

        simulation.cost, before = sweeping if swept else cost, drafter.seconds
        steps = drafted = right = 0
        for number, group in enumerate(level["texts"]):
            texts = [WrittenText(tuple(prompt), tuple(output)) for prompt, output in group if output]
            done = simulation.run(texts, f"{level['level']} {number}", temperature=level["temperature"])
            steps, drafted, right = steps + done.steps, drafted + done.drafted, right + done.accepted
        found[level["level"]] = (drafter.seconds - before) / steps * 1e6, steps, drafted, right
    return found


def alone(document: Any) -> None:
    """The drafter over a result's texts: the least of three, in the cache and out of it."""
    print(f"{'workload, streams':28}{'us a step':>10}{'swept':>8}{'steps':>8}{'drafted':>9}{'right':>7}")
    warm, cold = ([replay(document, swept=swept) for _ in range(3)] for swept in (False, True))
    for name, (_, steps, drafted, right) in warm[0].items():
        us, swept = (min(found[name][0] for found in runs) for runs in (warm, cold))
        print(f"{name:28}{us:10.1f}{swept:8.1f}{steps:8}{drafted:9}{right:7}")


def typical_s(steps: Seq[StepRecord]) -> float:
    """Seconds of these steps, each taking the median of those with so many sequences and drafts: no step held up."""
    by_rows: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        by_rows[step.batch, step.drafted].append(step.ms)
    return sum(statistics.median(ms) * len(ms) for ms in by_rows.values()) / 1e3


def outside_us(steps: Seq[StepRecord]) -> float:
    """The median of what these steps spent outside of the runner, in microseconds."""
    return statistics.median((step.ms - step.execute_ms) * 1e3 for step in steps)


def beside(levels: Seq[TaskLevel], rounds: int, model: str, threads: int | None) -> None:
    """Each level `rounds` times with drafts and without, in turns, on one engine: both read the same weights."""
    bench = SpeculationBench(model, "native", threads, print)
    config = EngineConfig.of(runner="native", threads=threads, max_batch=32, prefix_sharing=False)
    opened = open_model(model, config)
    engine = Engine(opened.make_runner, opened.codec, config)
    drafter = time_drafter(engine._loop.scheduler)
    print(f"{'workload, streams':20}{'us a step':>10}{'of a step':>10}{'times plain: quartiles':>24}{'typical':>9}"
          f"{'passes':>8}{'drafted':>9}{'right':>7}{'us outside of passes, off and on':>34}")  # fmt: skip
    for level in levels:
        done: dict[bool, list[StepRecord]] = {True: [], False: []}
        spent, ratios = 0.0, []
        for number in range(rounds):
            outputs, seconds = {}, {}
            for on in (True, False) if number % 2 else (False, True):
                before = drafter.seconds
                report = engine.run(
                    [
                        replace(request, sampling=replace(request.sampling, speculate=on))
                        for request in bench._requests(level, number)
                    ]
                )
                steps = [step for step in report.steps if step.decode_tokens and not step.prefill_tokens]
                done[on] += steps
                seconds[on] = sum(step.ms for step in steps)
                outputs[on] = [result.tokens for result in report.results]
                spent += (drafter.seconds - before) * on
            if outputs[True] != outputs[False]:
                raise SystemExit(f"{level.name}: what was written differs with speculation")
            ratios.append(seconds[False] / seconds[True])
        total = sum(step.ms for step in done[True]) / 1e3
        low, middle, high = statistics.quantiles(ratios, n=4)
        drafted, right = (sum(getattr(step, name) for step in done[True]) for name in ("drafted", "accepted"))
        print(f"{level.name:20}{spent / len(done[True]) * 1e6:10.1f}{spent / total:10.2%}"
              f"{low:10.3f}{middle:7.3f}{high:7.3f}{typical_s(done[False]) / typical_s(done[True]):9.3f}"
              f"{len(done[True]) / len(done[False]):8.3f}{drafted:9}{right:7}"
              f"{outside_us(done[False]):24.0f}{outside_us(done[True]):10.0f}", flush=True)  # fmt: skip
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="+", help="a result, or levels such as story,8")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if Path(given.wanted[0]).is_file():
        for path in given.wanted:
            alone(json.loads(Path(path).read_text("utf-8")))
        return
    names = {level.name.replace(" ", ""): level for level in LEVELS if not level.forced}
    unknown = [name for name in given.wanted if name not in names]
    if unknown:
        raise SystemExit(f"no such level: {', '.join(unknown)}; there are {', '.join(names)}")
    beside([names[name] for name in given.wanted], given.rounds, given.model, given.threads)


if __name__ == "__main__":
    main()
