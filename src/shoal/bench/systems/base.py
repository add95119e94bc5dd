"""What a measured system is, and the loop that drives those which are stepped from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a system must be ready for: at most `streams` sequences of `length` tokens, `kv_bytes` for all of them.

    `trunk` is the length of the beginning that all prompts share. `variant` is one of the system's `VARIANTS`.
    """

    streams: int
    length: int
    trunk: int
    kv_bytes: int
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The model under measurement: its name and file, threads to use, where derived files may be kept.

    `url` is the address of a server that is measured, `options` the settings a system takes beside.
    """

    model: str
    path: Path
    threads: int
    cache_dir: Path
    url: str = ""
    options: dict[str, str] = field(default_factory=dict)


class System(Protocol):
    """An engine under measurement, in a process of its own. Made from a `Measured`; loads when first needed.

    `VARIANTS` maps the ways it can run to what they are called. `missing` says why it cannot run here, or None.
    """

    VARIANTS: ClassVar[dict[str, str]]

    @staticmethod
    def missing() -> str | None:
        """Why this installation lacks it, or None."""

    @property
    def pid(self) -> int | None:
        """The process whose memory counts; None when it is not on this machine, or not known."""

    def prepare(self, setup: Setup) -> None:
        """Make ready for a workload; not timed."""

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Run the jobs to their ends, greedily, end tokens ignored."""

    def describe(self) -> dict[str, Any]:
        """Its version and every setting that matters, for the record. Known after `prepare`."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Logits [T, V] after each token of one text. BackendError where they cannot be had, saying why."""

    def close(self) -> None:
        """Free what it holds."""


class Stepped(Protocol):
    """A system that is stepped from outside."""

    def add(self, number: int, job: Job) -> None:
        """Take a request in."""

    def step(self) -> Iterable[tuple[int, list[int]]]:
        """Advance by one pass; the tokens that it gave, by request."""

    def drop(self) -> None:
        """Forget all requests and their KV."""


def drive(system: Stepped, jobs: Sequence[Job], clock: Callable[[], float] = time.perf_counter) -> RunTimes:
    """Feed jobs as they arrive and step until each has its tokens."""
    traces = [TokenTimes(job.arrival_s) for job in jobs]
    coming = sorted(range(len(jobs)), key=lambda i: (jobs[i].arrival_s, i))
    running: set[int] = set()
    system.drop()
    begin = clock()
    while coming or running:
        now = clock() - begin
        while coming and jobs[coming[0]].arrival_s <= now:
            number = coming.pop(0)
            system.add(number, jobs[number])
            running.add(number)
        if not running:
            time.sleep(max(jobs[coming[0]].arrival_s - (clock() - begin), 0))
            continue
        given = list(system.step())
        now = clock() - begin
        for number, tokens in given:
            traces[number].add(tokens, now)
            if len(traces[number].tokens) >= jobs[number].max_tokens:
                running.discard(number)
    return RunTimes(traces, clock() - begin)
