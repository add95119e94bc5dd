"""The runner on the default model against exact float32 arithmetic over the same file's weights."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.models import ModelFiles
from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.oracle import logits, mean_kl
from shoal.runners.openvino.runner import Precision
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.parity.conftest import LoadRunner

Rows = NDArray[np.float32]


@pytest.fixture(scope="module")
def exact(model_files: ModelFiles, text_tokens: list[int]) -> Rows:
    return logits(describe(read_gguf(model_files.path)), text_tokens)


@pytest.mark.parametrize("precision", ["auto", "f32"])
def test_the_runner_says_nearly_what_the_file_says(
    exact: Rows, load_runner: LoadRunner, text_tokens: list[int], precision: Precision
) -> None:
    """The first half of the text as chunks of prompts, the second as decoded tokens: both kinds of kernels."""
    runner = load_runner(precision)
    table = tuple(range(len(text_tokens) // runner.spec.block_size + 1))
    half = len(text_tokens) // 2
    rows = np.empty_like(exact)
    for at, token in enumerate(text_tokens):
        part = ScheduledSequence(1, (token,), at, table, Want.LOGITS, generated=int(at >= half))
        output = runner.execute(StepPlan(at, (part,)))
        assert output.logits is not None
        rows[at] = output.logits[0]
    divergence, agreement = mean_kl(exact, rows), np.mean(exact.argmax(-1) == rows.argmax(-1))
    print(f"{runner.spec.precision}: mean KL {divergence:.5f}, top-1 agreement {agreement:.4f}")
    assert divergence <= 0.006
    assert agreement >= 0.95
