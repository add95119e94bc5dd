"""Tiny random models of every family and weight type through the native kernels, against the numpy reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.oracle import logits, mean_kl
from shoal.runners.native.runner import NativeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.support.native_tiny import SCALES_AT, isas, open_tiny, write_blocks
from tests.support.tiny_gguf import VOCAB, write_tiny

ISAS = isas()
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kind": "F16"}),
    ("llama", {"kind": "Q8_0", "tied": False}),
    ("llama", {"kind": "Q4_1"}),
    ("llama", {"kind": "Q4_0", "rope_factors": True}),
    ("qwen2", {"kind": "F16", "tied": False}),
    ("qwen2", {"kind": "Q8_0"}),
    ("qwen3", {"kind": "BF16", "tied": False}),
    ("qwen3", {"kind": "Q8_0", "head_dim": 64}),
    ("qwen3", {"kind": "Q8_0", "head_dim": 128}),
]


def rows_of(runner: NativeRunner, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows = []
    for begin, end in [(0, 3), (3, 40), *((i, i + 1) for i in range(40, len(tokens)))]:
        part = ScheduledSequence(1, tuple(tokens[begin:end]), begin, (9, 2, 5), Want.LOGITS)
        output = runner.execute(StepPlan(0, (part,)))
        assert output.logits is not None
        rows.append(output.logits[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("arch", "fields"), MODELS, ids=[f"{a}-{'-'.join(map(str, f.values()))}" for a, f in MODELS])
def test_a_tiny_model_computes_what_the_reference_computes(
    arch: str, fields: dict[str, Any], isa: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", arch, **fields)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 70).tolist()
    exact = logits(describe(read_gguf(path)), tokens)
    runner = open_tiny(path, isa=isa)
    assert (runner.spec.architecture, runner.spec.vocab_size, runner.spec.context_length) == (arch, VOCAB, 512)
    assert runner.isa == isa
    rows = rows_of(runner, tokens)
    runner.close()
    # Random weights magnify what is rounded: KV to bf16 and, where weights are quantised, activations to 8 bits.
    assert mean_kl(exact[[2, *range(39, 70)]], rows) < (1e-3 if fields["kind"] in ("F16", "BF16") else 2e-2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", sorted(SCALES_AT))
def test_every_quantised_type_keeps_its_weights(kind: str, isa: str, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "blocks.gguf", kind)
    tokens = np.random.default_rng(2).integers(0, 130, 50).tolist()
    exact = logits(describe(read_gguf(path)), tokens)
    runner = open_tiny(path, isa=isa)
    rows = rows_of(runner, tokens)
    runner.close()
    assert mean_kl(exact[[2, *range(39, 50)]], rows) < 3e-3
    least = 0.998 if (kind, isa) == ("Q3_K", "amx") else 0.999  # its codes, from 0 to 7, are rounded with their scale
    assert np.corrcoef(exact[-1], rows[-1])[0, 1] > least
