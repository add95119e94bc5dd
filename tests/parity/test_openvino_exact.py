"""A sequence gets the same bits whoever else is in the batch and however its prompt is cut, on the real model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shoal.runners.openvino.runner import Precision
from tests.parity.conftest import LoadRunner
from tests.parity.schedules import Job, run_alone, run_together

DECODED = 4  # tokens after each prompt


def random_jobs(rng: random.Random, vocab_size: int, most: int) -> list[Job]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    lengths = [rng.choice([1, 2, rng.randint(3, 64), rng.randint(1, most)]) for _ in range(rng.randint(2, 12))]
    return [Job(tokens(n), tokens(DECODED)) for n in lengths]


@pytest.mark.parametrize(("precision", "seed"), [("auto", s) for s in range(5)] + [("f32", s) for s in range(5, 7)])
def test_random_schedules_change_no_bit(load_runner: LoadRunner, precision: Precision, seed: int) -> None:
    runner = load_runner(precision)
    if not runner.spec.exact:
        pytest.skip("this CPU's kernels make no such promise")
    rng = random.Random(seed)
    alone = random_jobs(rng, runner.spec.vocab_size, most=900 if seed == 0 else 250)
    together = [Job(job.prompt, job.decoded) for job in alone]
    run_alone(runner, alone)
    run_together(runner, together, rng)
    for a, b in zip(alone, together, strict=True):
        assert len(a.rows) == len(b.rows) == DECODED + 1
        for at, (row, other) in enumerate(zip(a.rows, b.rows, strict=True)):
            assert np.array_equal(row, other), f"row {at} of a prompt of {len(a.prompt)} differs"
