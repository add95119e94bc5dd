"""Runs sequences through a runner alone, or all together in random chunks, order and company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want

Row = NDArray[np.float32]


@dataclass(slots=True)
class Job:
    """A prompt and the tokens that are decoded after it whatever the logits say; `rows` are the logits it got.

    `done` tokens have their KV. It is to catch up with the tokens known: the prompt and one more for each row.
    """

    prompt: list[int]
    decoded: list[int]
    done: int = 0
    rows: list[Row] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.rows) > len(self.decoded)

    def next_chunk(self, most: int) -> tuple[int, Want]:
        left = len(self.prompt) + len(self.rows) - self.done
        return (left, Want.LOGITS) if left <= most else (most, Want.NOTHING)


def run_alone(runner: Runner, jobs: Sequence[Job]) -> None:
    """Each prompt in one pass, then its tokens one by one, with nobody else there."""
    for job in jobs:
        (table,) = _tables(runner, [job], list(range(runner.spec.num_blocks)))
        while not job.finished:
            _step(runner, [(0, job, table, job.next_chunk(1 << 30))])
        runner.release([0])


def run_together(runner: Runner, jobs: Sequence[Job], rng: random.Random) -> None:
    """Every step a random part of the jobs in random order, prompts in chunks of 1 to 300, blocks anywhere.

    Once in a while a sequence loses its KV and computes it again, the tokens it wrote included.
    """
    free = list(range(runner.spec.num_blocks))
    rng.shuffle(free)
    tables = _tables(runner, jobs, free)
    while waiting := [i for i, job in enumerate(jobs) if not job.finished]:
        members = rng.sample(waiting, rng.randint(1, len(waiting)))
        chunk = rng.choice([1, 2, 33, 300])
        _step(runner, [(i, jobs[i], tables[i], jobs[i].next_chunk(rng.randint(1, chunk))) for i in members])
        if rng.random() < 0.1:
            jobs[members[0]].done = 0
    runner.release(range(len(jobs)))


def _tables(runner: Runner, jobs: Sequence[Job], free: list[int]) -> list[tuple[int, ...]]:
    size = runner.spec.block_size
    return [tuple(free.pop() for _ in range(-(-(len(job.prompt) + len(job.decoded)) // size))) for job in jobs]


def _step(runner: Runner, items: Sequence[tuple[int, Job, tuple[int, ...], tuple[int, Want]]]) -> None:
    sequences = []
    for i, job, table, (count, want) in items:
        end = job.done + count
        tokens = tuple((job.prompt + job.decoded)[job.done : end])
        generated = min(max(0, end - len(job.prompt)), count)
        sequences.append(ScheduledSequence(i, tokens, job.done, table, want, generated))
    logits = runner.execute(StepPlan(0, tuple(sequences))).logits
    rows = iter(() if logits is None else logits)
    for _, job, _, (count, want) in items:
        job.done += count
        if want is Want.LOGITS:
            job.rows.append(next(rows).copy())
