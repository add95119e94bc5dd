"""KV of the CUDA runner in host memory and on disk: the bits of a run that never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.runners import load, runner, seq  # isort: skip - first, it tells Triton where to run

from shoal.errors import RunnerError
from shoal.runners.cuda.runner import CUDARunner
from shoal.runners.plan import StepPlan, Want
from shoal.types import Result, SamplingParams
from tests.cuda.tiny import prompts
from tests.support.tiers import Lab

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter


def answers(lab: Lab, asked: list[list[int]]) -> list[Result]:
    results = []
    for number, prompt in enumerate(asked):
        results.append(lab.result_of(prompt, SamplingParams(max_tokens=3, logprobs=5, ignore_eos=True), str(number)))
        lab.settle()
    return results


def test_a_restart_gives_the_bits_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    rng = random.Random(4)
    asked = [[rng.randrange(3, 70) for _ in range(70)] for _ in range(2)]
    longer = [[*prompt, *(rng.randrange(3, 70) for _ in range(5))] for prompt in asked]
    decoder, first = runner()
    settings: dict[str, Any] = {"max_batch": 2, "max_step_tokens": 48}
    expected = answers(Lab(runner=first, **settings), longer)
    first.close()

    def open_again() -> CUDARunner:
        return load(decoder)

    before = Lab(tmp_path / "kv", quota=1 << 30, runner=open_again(), **settings)
    answers(before, asked)
    before.close()
    before.runner.close()
    after = Lab(tmp_path / "kv", quota=1 << 30, runner=open_again(), **settings)
    found = answers(after, longer)
    after.close()
    after.runner.close()
    assert [result.receipt.disk_tokens for result in found] == [64, 64]
    assert [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in expected]


def test_only_blocks_that_are_full_are_read_and_only_of_their_size_written() -> None:
    _, made = runner()
    prompt = prompts(1, [40], 70)[0]
    made.execute(StepPlan(1, (seq(1, prompt, 0, range(2), Want.NOTHING),)))
    access = made.access
    data = np.empty(access.block_bytes, np.uint8)
    access.read_block(0, data)
    with pytest.raises(RunnerError, match="nothing was written"):
        access.read_block(1, data)
    with pytest.raises(RunnerError, match="out of range"):
        access.write_block(made.spec.num_blocks, data)  # the spare block is nobody's
    with pytest.raises(RunnerError, match="a block is"):
        access.write_block(2, data[:-1])
    access.write_block(2, data)
    access.discard_blocks([0])
    with pytest.raises(RunnerError, match="nothing was written"):
        access.read_block(0, data)
    made.close()
