"""Tiny random models of every family through conversion, graph and runner, against the numpy reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.oracle import logits, mean_kl
from shoal.runners.openvino import loading
from shoal.runners.openvino import runner as runner_module
from shoal.runners.openvino.runner import OpenVINORunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.support.tiny_gguf import VOCAB, write_tiny

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kind": "F16"}),
    ("llama", {"kind": "Q8_0", "head_dim": 16, "tied": False}),
    ("llama", {"kind": "Q4_1"}),
    ("llama", {"kind": "Q4_0", "rope_factors": True}),
    ("qwen2", {"kind": "F16", "tied": False}),
    ("qwen2", {"kind": "Q8_0"}),
    ("qwen3", {"kind": "BF16", "tied": False}),
    ("qwen3", {"kind": "Q8_0", "head_dim": 64}),
    ("qwen3", {"kind": "F32"}),
]


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not quantised, whose error random weights would magnify: what is left is the graph's own."""

    def core() -> Any:
        made = loading.open_core()
        made.set_property("CPU", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
        return made

    monkeypatch.setattr(runner_module, "open_core", core)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("arch", "fields"), MODELS, ids=[f"{a}-{'-'.join(map(str, f.values()))}" for a, f in MODELS])
def test_a_tiny_model_computes_what_the_reference_computes(arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", arch, **fields)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 70).tolist()
    model = read_gguf(path)
    exact = logits(describe(model), tokens)
    runner = OpenVINORunner.load(path, kv_bytes=1 << 22, cache_dir=tmp_path / "cache", precision="f32")
    assert (runner.spec.architecture, runner.spec.vocab_size, runner.spec.context_length) == (arch, VOCAB, 512)

    rows = []
    for begin, end in [(0, 3), (3, 40), *((i, i + 1) for i in range(40, 70))]:
        part = ScheduledSequence(1, tuple(tokens[begin:end]), begin, (9, 2, 5), Want.LOGITS)
        output = runner.execute(StepPlan(0, (part,)))
        assert output.logits is not None
        rows.append(output.logits[0].copy())
    runner.close()
    ends = [2, *range(39, 70)]
    # Files that are 8 bits or less are kept exactly; wider ones are rounded to 8 bits.
    assert mean_kl(exact[ends], np.stack(rows)) < (1e-6 if fields["kind"] in ("Q8_0", "Q4_0") else 5e-3)
