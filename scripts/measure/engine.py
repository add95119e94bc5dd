"""The engine against a hand-written loop over the same runner, batch scaling, and its own parts of a step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from scripts.measure.common import greedy, interleaved, load, make_loop, median, prompts, run, spread

from shoal import Request, SamplingParams
from shoal.loop import StepLoop
from shoal.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.base import Runner
from shoal.sampling import SamplerState, sample

STEPS = 64


def batch(runs: int) -> dict[str, Any]:
    """Aggregate decode tok/s at batch 1 to 32, in turns."""
    with load(max_batch=32) as engine:
        values = interleaved(
            runs,
            **{
                str(n): lambda n=n: run(engine, prompts(n, 40, seed=n), STEPS).decode_tokens_per_s  # type: ignore[misc]
                for n in (1, 2, 4, 8, 16, 32)
            },
        )
    one = median(values["1"])
    return {
        "tokens_per_s": {n: spread(v) for n, v in values.items()},
        "scaling": {n: round(median(v) / one, 2) for n, v in values.items()},
    }


def overhead(runs: int) -> dict[str, Any]:
    """Milliseconds of a decode step at batch 8: engine (with its thread), loop, and bare calls of the runner."""
    loop = make_loop()

    def bare() -> float:
        return _bare(loop.runner, 8)

    def inside() -> float:
        return _loop(loop, 8)

    values = interleaved(runs, bare=bare, loop=inside)
    loop.runner.close()
    with load() as engine:

        def whole() -> float:
            tokens = prompts(8, 40)
            begin = time.perf_counter()
            report = run(engine, tokens, STEPS)
            del begin
            pure = [s.ms for s in report.steps if not s.prefill_tokens and s.batch == 8]
            return median(pure)

        values["engine_step"] = [whole() for _ in range(runs + 1)][1:]
        execute = []
        for _ in range(runs):
            report = run(engine, prompts(8, 40), STEPS)
            execute.append(median([s.ms - s.execute_ms for s in report.steps if not s.prefill_tokens and s.batch == 8]))
    return {
        "step_ms": {name: spread(v) for name, v in values.items()},
        "outside_the_runner_ms": spread(execute),
        "loop_over_bare": round(median(values["loop"]) / median(values["bare"]), 4),
    }


def _bare(runner: Runner, width: int) -> float:
    """Median milliseconds of a step in a static batch, as one would write it by hand."""
    size = runner.spec.block_size
    each = -(-(40 + STEPS) // size)
    tables = [tuple(range(i * each, (i + 1) * each)) for i in range(width)]
    first = runner.execute(
        StepPlan(
            0,
            tuple(ScheduledSequence(i, tuple(p), 0, tables[i], Want.ARGMAX) for i, p in enumerate(prompts(width, 40))),
        )
    )
    tokens = {i: first.argmax[i][0] for i in range(width)}
    taken = []
    for at in range(40, 40 + STEPS - 1):
        begin = time.perf_counter()
        output = runner.execute(
            StepPlan(at, tuple(ScheduledSequence(i, (tokens[i],), at, tables[i], Want.ARGMAX, 1) for i in range(width)))
        )
        tokens = {i: output.argmax[i][0] for i in range(width)}
        taken.append((time.perf_counter() - begin) * 1e3)
    runner.release(range(width))
    return median(taken)


def _loop(loop: StepLoop, width: int) -> float:
    loop.scheduler.preempt_all(drop_cached=True)
    for i, tokens in enumerate(prompts(width, 40)):
        request = Request(prompt_tokens=tokens, sampling=greedy(STEPS))
        loop.add(f"r{i}", loop.intake.admit(request), lambda event: None)
    taken = []
    while not loop.idle:
        begin = time.perf_counter()
        record = loop.step()
        if record is not None and not record.prefill_tokens and record.batch == width:
            taken.append((time.perf_counter() - begin) * 1e3)
    return median(taken)


def scheduler_time(runs: int) -> dict[str, Any]:
    """Share of step time spent in scheduler and prefix tree at 32 streams."""
    loop = make_loop(max_batch=32)
    scheduler, spent = loop.scheduler, [0.0]

    def timed(function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            spent[0] += time.perf_counter() - begin
            return result

        return wrapper

    scheduler.schedule, scheduler.commit = timed(scheduler.schedule), timed(scheduler.commit)  # type: ignore[method-assign]
    shares, per_step = [], []
    for number in range(runs + 1):
        for i, tokens in enumerate(prompts(32, 40, seed=number)):
            loop.add(
                f"{number}-{i}",
                loop.intake.admit(Request(prompt_tokens=tokens, sampling=greedy(STEPS))),
                lambda e: None,
            )
        spent[0], begin, steps = 0.0, time.perf_counter(), 0
        while not loop.idle:
            loop.step()
            steps += 1
        if number:
            shares.append(spent[0] / (time.perf_counter() - begin))
            per_step.append(1e3 * spent[0] / steps)
    loop.runner.close()
    return {"share_of_step": spread(shares), "ms_per_step": spread(per_step)}


def sampling(runs: int) -> dict[str, Any]:
    """Milliseconds to sample 8 rows of real logits, and the share of a step with 8 sampled streams."""
    loop = make_loop()
    runner = loop.runner
    items = tuple(
        ScheduledSequence(i, tuple(p), 0, (2 * i, 2 * i + 1), Want.LOGITS) for i, p in enumerate(prompts(8, 40))
    )
    logits = np.array(runner.execute(StepPlan(0, items)).logits)
    figures: dict[str, Any] = {}
    for name, params in {
        "temperature": SamplingParams(temperature=0.8),
        "top_p": SamplingParams(temperature=0.8, top_p=0.95),
        "top_k": SamplingParams(temperature=0.8, top_k=40),
        "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
    }.items():
        states = [SamplerState(params, i, runner.spec.vocab_size, prompts(1, 500)[0]) for i in range(8)]
        taken = []
        for _ in range(40 * runs):
            begin = time.perf_counter()
            sample(logits, states)
            taken.append((time.perf_counter() - begin) * 1e3)
        figures[f"{name}_ms"] = spread(taken)
    runner.close()
    with load() as engine:
        for name, params in (
            ("greedy", greedy(STEPS)),
            ("top_p", SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=0.8, top_p=0.95)),
        ):
            report = engine.run([Request(prompt_tokens=t, sampling=params) for t in prompts(8, 40)])
            pure = [s for s in report.steps if not s.prefill_tokens and s.batch == 8]
            figures[f"{name}_outside_runner_share"] = round(
                sum(s.ms - s.execute_ms for s in pure) / sum(s.ms for s in pure), 4
            )
    return figures
