"""Parts of a step by themselves: scheduler, sampling, the admission of a known prompt, books under many prompts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import psutil
from scripts.measure.common import MODEL, SETTINGS, spread

from shoal import EngineConfig, Request, SamplingParams
from shoal.bench.systems.ours import sampling as greedy
from shoal.bench.workloads import TEXT, Job, Workload, make_jobs
from shoal.core.audit import check_integrity
from shoal.engine.inputs import InputProcessor
from shoal.engine.loading import make_runner
from shoal.engine.loop import StepLoop
from shoal.models import Store, load_tokenizer
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.sampling.sampler import SamplerState, sample

STEPS = 64


def make_loop(**settings: Any) -> StepLoop:
    """The synchronous loop on the real model, without a thread of its own."""
    store = Store()
    config = EngineConfig.of(**SETTINGS, **settings)
    runner = make_runner(store.resolve(MODEL), config, store)
    return StepLoop(runner, InputProcessor(runner.spec, None, 0), config)


def jobs(count: int, length: int, output: int, seed: int = 0) -> list[Job]:
    text = load_tokenizer(Store().resolve(MODEL)).encode(TEXT.read_text("utf-8"), add_special=False)
    return make_jobs(Workload("parts", str(count), count, (length, length), output, count), text, seed)


def add(loop: StepLoop, name: str, job: Job) -> Any:
    request = Request(prompt_tokens=job.prompt, sampling=greedy(job))
    return loop.add(name, loop.inputs.prepare(request), lambda event: None)


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
        for i, job in enumerate(jobs(32, 40, STEPS, seed=number)):
            add(loop, f"{number}-{i}", job)
        spent[0], begin, steps = 0.0, time.perf_counter(), 0
        while not loop.idle:
            loop.step()
            steps += 1
        if number:
            shares.append(100 * spent[0] / (time.perf_counter() - begin))
            per_step.append(1e3 * spent[0] / steps)
    loop.runner.close()
    return {"percent_of_step": spread(shares), "ms_per_step": spread(per_step)}


def sampling(runs: int) -> dict[str, Any]:
    """Milliseconds to sample 8 rows of the logits of real text, by kind."""
    loop = make_loop()
    runner = loop.runner
    some = jobs(8, 40, 1)
    items = tuple(ScheduledSequence(i, job.prompt, 0, (2 * i, 2 * i + 1), Want.LOGITS) for i, job in enumerate(some))
    logits = np.array(runner.execute(StepPlan(0, items)).logits)
    figures: dict[str, Any] = {}
    for name, params in {
        "temperature": SamplingParams(temperature=0.8),
        "top_p": SamplingParams(temperature=0.8, top_p=0.95),
        "top_k": SamplingParams(temperature=0.8, top_k=40),
        "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
    }.items():
        states = [SamplerState(params, i, runner.spec.vocab_size, some[0].prompt) for i in range(8)]
        taken = []
        for _ in range(40 * runs):
            begin = time.perf_counter()
            sample(logits, states)
            taken.append((time.perf_counter() - begin) * 1e3)
        figures[f"{name}_ms"] = spread(taken)
    runner.close()
    return figures


def second(runs: int) -> dict[str, Any]:
    """Tokens that a second identical request of 1,001 tokens computes, and milliseconds its admission takes."""
    loop = make_loop()
    job = jobs(1, 1001, 1)[0]
    computed, admission = [], []
    for number in range(20 * runs):
        state = add(loop, f"r{number}", job)
        begin = time.perf_counter()
        loop.scheduler._next_to_join(0.0)
        loop.scheduler._join(state.seq, 0.0)
        if number:
            admission.append((time.perf_counter() - begin) * 1e3)
        loop.scheduler._preempt(state.seq)
        while not loop.idle:
            loop.step()
        computed.append(state.seq.computed_tokens)
    loop.runner.close()
    return {"computed_tokens": computed[1], "first_computed": computed[0], "admission_ms": spread(admission)}


def distinct(runs: int) -> dict[str, Any]:
    """100,000 distinct prompts through a small budget of the toy model: memory and books."""
    del runs
    runner = FakeRunner(num_blocks=64)
    loop = StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), EngineConfig(max_batch=16))
    process, sizes = psutil.Process(), []
    for number in range(100_000):
        add(loop, str(number), Job(tuple(f"{number:07d} ".encode() * 5), 1))
        if number % 16 == 15:
            while not loop.idle:
                loop.step()
        if number % 10_000 == 9_999:
            check_integrity(loop.scheduler)
            sizes.append(round(process.memory_info().rss / 2**20, 1))
    return {
        "rss_mib_each_10000": sizes,
        "evictions": loop.stats().evictions,
        "cached_blocks": loop.scheduler.kv.pool.num_cached,
    }
