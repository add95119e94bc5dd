"""Counts that do not depend on the machine: what the scheduler makes of each workload, on the toy model.

Steps, forward passes, tokens computed, rows projected to the vocabulary, blocks held at most. A simulated clock makes
the pacing of prompts the same everywhere, so a count that moves is a change of the code.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.bench.workloads import SCENARIOS, TEXT, Job, Workload, make_jobs
from shoal.config import EngineConfig
from shoal.engine.inputs import InputProcessor
from shoal.engine.loop import StepLoop
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepOutput, StepPlan, Want
from shoal.types import Event, Request, SamplingParams

_PASS_S, _TOKEN_S = 3e-3, 0.4e-3  # what a pass and a token of it take by the simulated clock


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Counting(FakeRunner):
    """The toy model, with every pass counted and the clock moved on."""

    def __init__(self, clock: _Clock, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, context_length=8192)
        self._clock = clock
        self.passes = self.tokens = self.projections = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        self.passes += plan.chain
        self.tokens += plan.num_tokens * plan.chain
        self.projections += plan.chain * sum(item.want is not Want.NOTHING for item in plan.sequences)
        self._clock.now += plan.chain * (_PASS_S + _TOKEN_S * plan.num_tokens)
        return super().execute(plan)


def counts() -> dict[str, dict[str, int]]:
    """The counts of every level that needs no real model, by "scenario level variant"."""
    text = ByteTokenizer().encode(TEXT.read_text("utf-8"), add_special=False)
    found = {}
    for workload in [workload for levels in SCENARIOS.values() for workload in levels]:
        if workload.schema or workload.scenario in ("serve", "agents"):
            continue
        for variant in workload.variants:
            if variant in ("", "unshared"):
                name = f"{workload.scenario} {workload.level} {variant}".rstrip()
                found[name] = _count(workload, make_jobs(workload, text, 0), sharing=not variant)
    return found


def _count(workload: Workload, jobs: Sequence[Job], *, sharing: bool) -> dict[str, int]:
    clock = _Clock()
    blocks = workload.batch * (workload.length // 32 + 2)
    runner = _Counting(clock, blocks)
    # What is drafted depends on what steps take, and so on the machine.
    config = EngineConfig(max_batch=workload.batch, prefix_sharing=sharing, speculation=False)
    loop = StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), config, clock=clock)
    coming = sorted(enumerate(jobs), key=lambda pair: pair[1].arrival_s)
    held = 0
    while coming or not loop.idle:
        while coming and (loop.idle or coming[0][1].arrival_s <= clock.now):
            number, job = coming.pop(0)
            clock.now = max(clock.now, job.arrival_s)
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
            request = Request(prompt_tokens=job.prompt, sampling=params)
            loop.add(str(number), loop.inputs.prepare(request), _ignore)
        loop.step()
        held = max(held, loop.scheduler.kv.pool.num_held)
    cached = loop.stats().cached_tokens
    return {
        "steps": loop.steps,
        "passes": runner.passes,
        "tokens": runner.tokens,
        "projections": runner.projections,
        "blocks_held": held,
        "cached_tokens": cached,
        "preemptions": loop.stats().preemptions,
    }


def _ignore(event: Event) -> None:  # noqa: ARG001 - a sink's face
    return


def differences(baseline: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """What differs from a baseline, a line each; levels that only one of both has as well."""
    lines = []
    for name in sorted(baseline.keys() | now.keys()):
        old, new = baseline.get(name), now.get(name)
        if old is None or new is None:
            lines.append(f"{name}: only {'now' if old is None else 'in the baseline'}")
            continue
        for count in sorted(old.keys() | new.keys()):
            if old.get(count) != new.get(count):
                lines.append(f"{name}: {count} was {old.get(count)}, is {new.get(count)}")
    return lines
