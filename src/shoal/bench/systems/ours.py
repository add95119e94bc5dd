"""This engine, in process: with its thread and its events, as a caller has it."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from shoal.bench.systems.base import Logits, Measured, Setup
from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.loading import OpenedModel, make_runner, open_model
from shoal.engine.warmup import warm_up
from shoal.errors import BenchmarkError
from shoal.models import Store
from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want, windows_in_turn
from shoal.runners.registry import RUNNERS, backend
from shoal.types import Event, Request, Result, SamplingParams, StepRecord


class Shoal:
    """An `Engine`. `unshared` has prefix sharing off, `one` a single thread; `static` is a batch loop by
    hand over its runner.
    """

    VARIANTS: ClassVar[dict[str, str]] = {
        "": "prefix sharing on",
        "unshared": "prefix sharing off",
        "unpacked": "weights packed anew",
        "warmed": "warmed up while it loads",
        "one": "on one thread",
        "static": "static batch by hand over the same runner",
    }

    def __init__(self, source: Measured) -> None:
        self._source = source
        self._engine: Engine | None = None
        self._runner: Runner
        self._settings: dict[str, Any] = {}
        self._variant = ""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @staticmethod
    def missing() -> str | None:
        """It is always here."""
        return None

    @property
    def pid(self) -> int:
        """It runs in this process."""
        return os.getpid()

    def prepare(self, setup: Setup) -> None:
        """Load the engine, unless one of the same settings is there."""
        self._variant = setup.variant
        settings = {
            "max_batch": setup.streams,
            "kv_memory": max(5 * setup.kv_bytes // 4, 512 << 20),
            "prefix_sharing": setup.variant != "unshared",
            **_where(self._source, 1 if setup.variant == "one" else self._source.threads),
        }
        if settings == self._settings:
            return
        self.close()
        config = EngineConfig.of(**settings)
        opened = self._open(config, setup.variant)

        def make() -> Runner:
            self._runner = opened.make_runner()  # kept: both ways of `overhead` measure the same pages of memory
            return self._runner

        self._engine = Engine(make, opened.codec, config)
        if setup.variant == "warmed":
            warm_up(self._engine)
        self._settings = settings

    def _open(self, config: EngineConfig, variant: str) -> OpenedModel:
        """The model; `unpacked` in a store of its own, where nothing has been derived from its file."""
        if variant != "unpacked":
            return open_model(self._source.model, config)
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="shoal-bench-")
        return open_model(str(self._source.path), config, Store(self._scratch.name))

    @property
    def engine(self) -> Engine:
        """The loaded engine."""
        if self._engine is None:
            raise BenchmarkError("the engine is not loaded", hint="call prepare first")
        return self._engine

    def describe(self) -> dict[str, Any]:
        """Versions and settings; those not named are the defaults."""
        from shoal import __version__

        spec, defaults = self.engine.spec, EngineConfig()
        return {
            "version": f"shoal {__version__}",
            "runner": spec.runner,
            "precision": spec.precision,
            "threads": self._source.threads,
            "max_batch": "the level's streams",
            "kv_memory": "512 MiB, or what the level's KV needs and a quarter more",
            "max_step_tokens": defaults.max_step_tokens,
            "max_stall_ms": defaults.max_stall_ms,
        }

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Submit as they arrive, listen, wait for the last. Cached prefixes are given up first."""
        self.engine.suspend(drop_kv=True)
        self.engine.resume()
        if self._variant == "static":
            return self.engine.call(partial(static_batch, self._runner, jobs))
        return _listen(self.engine, jobs)

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Token by token, the first half as prompt, the second as output: both kinds of kernels, where they differ."""
        store = Store()
        config = EngineConfig.of(**_where(self._source, self._source.threads))
        runner = make_runner(store.resolve(self._source.model), config, store)
        table = tuple(range(len(tokens) // runner.spec.block_size + 1))
        rows = np.empty((len(tokens), runner.spec.vocab_size), np.float32)
        for at, token in enumerate(tokens):
            windows = windows_in_turn(runner.spec, at, 1)
            generated = int(at >= len(tokens) // 2)
            part = ScheduledSequence(1, (token,), at, table, Want.LOGITS, generated, windows=windows)
            output = runner.execute(StepPlan(at, (part,)))
            assert output.logits is not None
            rows[at] = output.logits[0]
        runner.close()
        return rows

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._settings = {}
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _where(source: Measured, threads: int) -> dict[str, Any]:
    """The runner that is measured, and how many threads it has, unless it was asked for and has no such setting."""
    runner = source.options.get("runner", "auto")
    if runner in RUNNERS and "threads" not in backend(runner).HONOURS:
        return {"runner": runner}
    return {"runner": runner, "threads": threads}


def sampling(job: Job) -> SamplingParams:
    """Greedy; with a schema it ends when the schema does."""
    if job.schema is not None:
        return SamplingParams(max_tokens=job.max_tokens, json_schema=job.schema)
    return SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)


def _listen(engine: Engine, jobs: Sequence[Job]) -> RunTimes:
    """Run jobs through `submit`, each event stamped on the engine's thread as a sink gets it."""
    traces = [TokenTimes(job.arrival_s) for job in jobs]
    results: list[Result] = []
    steps: list[StepRecord] = []
    ended = threading.Semaphore(0)
    listener = steps.append
    engine.listen(listener)
    begin = time.perf_counter()

    def sink(trace: TokenTimes, event: Event) -> None:
        trace.add(event.tokens, time.perf_counter() - begin)
        if event.result is not None:
            results.append(event.result)
            ended.release()

    for number in sorted(range(len(jobs)), key=lambda i: jobs[i].arrival_s):
        job = jobs[number]
        time.sleep(max(job.arrival_s - (time.perf_counter() - begin), 0))
        request = Request(prompt_tokens=job.prompt, sampling=sampling(job))
        engine.submit(request, sink=partial(sink, traces[number]))
    for _ in jobs:
        ended.acquire()
    wall_s = time.perf_counter() - begin
    engine.unlisten(listener)
    for result in results:
        if result.error is not None:
            raise result.error
    return RunTimes(traces, wall_s, _facts(jobs, results, steps))


def _facts(jobs: Sequence[Job], results: Sequence[Result], steps: Sequence[StepRecord]) -> dict[str, float]:
    facts: dict[str, float] = {
        "cached_tokens": sum(result.receipt.cached_tokens for result in results),
        "computed_tokens": sum(result.receipt.computed_tokens for result in results),
        "steps": len(steps),
    }
    outside = [step.ms - step.execute_ms for step in steps if not step.prefill_tokens]
    if outside:
        facts["outside_ms"] = statistics.median(outside)
    if jobs[0].schema is not None:
        facts["valid"] = sum(_parses(result.text) for result in results) / len(results)
    return facts


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def static_batch(runner: Runner, jobs: Sequence[Job]) -> RunTimes:
    """All jobs as one static batch, as one would write it by hand: equal lengths, no scheduler, no events, no stops."""
    size, count = runner.spec.block_size, jobs[0].max_tokens
    each = -(-(max(len(job.prompt) for job in jobs) + count) // size)
    tables = [tuple(range(i * each, (i + 1) * each)) for i in range(len(jobs))]
    traces = [TokenTimes(0.0) for _ in jobs]
    begin = time.perf_counter()
    for step in range(count):
        parts = []
        for i, job in enumerate(jobs):
            fed, start = (job.prompt, 0) if step == 0 else ((traces[i].tokens[-1],), len(job.prompt) + step - 1)
            windows = windows_in_turn(runner.spec, start, len(fed), i, len(jobs))
            parts.append(ScheduledSequence(i, fed, start, tables[i], Want.ARGMAX, int(step > 0), windows=windows))
        output = runner.execute(StepPlan(step, tuple(parts)))
        now = time.perf_counter() - begin
        for i, trace in enumerate(traces):
            trace.add(output.argmax[i], now)
    runner.release(range(len(jobs)))
    return RunTimes(traces, time.perf_counter() - begin)
