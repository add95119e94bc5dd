"""What the figures share: prompts, medians, the model's files."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal import Engine, EngineConfig, Request, SamplingParams
from shoal.intake import Intake
from shoal.loading import make_runner
from shoal.loop import StepLoop
from shoal.models import Store
from shoal.types import Report

MODEL = "smollm2-135m"
THREADS = os.cpu_count() or 1
SETTINGS: dict[str, Any] = {}
"""What every engine here is loaded with: the runner that `--runner` named."""


def model_path() -> Path:
    return Store().resolve(MODEL).path


def make_loop(**settings: Any) -> StepLoop:
    """The synchronous loop on the real model, without a thread of its own."""
    store = Store()
    config = EngineConfig.of(**SETTINGS, **settings)
    runner = make_runner(store.resolve(MODEL), config, store)
    return StepLoop(runner, Intake(runner.spec, None, 0), config)


def load(**settings: Any) -> Engine:
    return Engine.load(MODEL, **SETTINGS, **settings)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 40000) for _ in range(length)] for _ in range(count)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def run(engine: Engine, tokens: Sequence[Sequence[int]], count: int) -> Report:
    report = engine.run([Request(prompt_tokens=t, sampling=greedy(count)) for t in tokens])
    for result in report.results:
        if result.error is not None:
            raise result.error
    return report


def forget(engine: Engine) -> None:
    """Give up all cached prefixes, so that the next run is cold."""
    engine.suspend(drop_kv=True)
    engine.resume()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def interleaved(runs: int, **measures: Callable[[], float]) -> dict[str, list[float]]:
    """Each measure `runs` times, in turns, after one round that does not count."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for round_number in range(runs + 1):
        names = list(measures) if round_number % 2 else list(reversed(measures))
        for name in names:
            time.sleep(0.5)  # threads of the one before are idle again
            value = measures[name]()
            if round_number:
                values[name].append(value)
    return values
