"""Files of random weights: read, run, and the size of the real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.bench.ceiling import ModelFacts
from shoal.bench.shapes import FORMATS, SHAPES, write_shape
from shoal.errors import ConfigError
from shoal.models.decoder import Attention, Mixture
from shoal.models.families import describe
from shoal.models.gguf import read_gguf


@pytest.mark.parametrize("kind", FORMATS)
def test_a_shape_is_written_in_every_format(kind: str, tmp_path: Path) -> None:
    path = write_shape(tmp_path / "m.gguf", "smollm2-135m", kind, layers=1)
    model, shape = read_gguf(path), SHAPES["smollm2-135m"]
    assert (model.n_embd, model.vocab_size) == (shape.embd, shape.vocab)
    assert model.tensors["blk.0.ffn_up.weight"].shape == (shape.ff, shape.embd)
    values = model.tensors["blk.0.ffn_up.weight"].dequantize()
    assert np.isfinite(values).all()
    assert 0.2 < values.std() * shape.embd**0.5 < 4.0


def test_a_mixed_format_has_better_types_where_it_matters(tmp_path: Path) -> None:
    tensors = read_gguf(write_shape(tmp_path / "m.gguf", "qwen3-0.6b", "q4_k_m", layers=4)).tensors
    assert {t.type for name, t in tensors.items() if "ffn_down" in name} == {"Q4_K", "Q6_K"}
    assert tensors["token_embd.weight"].type == "Q6_K"
    assert {t.type for name, t in tensors.items() if "ffn_up" in name} == {"Q4_K"}


@pytest.mark.parametrize(("shape", "layers"), [("qwen3-30b-a3b-4l", 1), ("qwen3.5-4b-8l", 4)])
def test_mixtures_and_hybrids_are_described_by_their_family(
    shape: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, shape, replace(SHAPES[shape], vocab=2048))
    path = write_shape(tmp_path / "m.gguf", shape, "q4_k_m", layers=layers)
    model, facts = describe(read_gguf(path)), ModelFacts.of(path)
    assert (len(model.layers), model.width) == (layers, SHAPES[shape].embd)
    last = model.layers[-1]
    assert isinstance(last.mixer, Attention)
    assert (last.mixer.gate is None) == (SHAPES[shape].delta is None)
    assert isinstance(last.feed_forward, Mixture) == (SHAPES[shape].experts is not None)
    assert facts.weight_bytes < path.stat().st_size
    if isinstance(last.feed_forward, Mixture):  # a token reads its own experts, not all
        assert facts.weight_bytes < 0.7 * path.stat().st_size


def test_what_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shape"):
        write_shape(tmp_path / "m.gguf", "gpt-9", "q4_0")
    with pytest.raises(ConfigError, match="format"):
        write_shape(tmp_path / "m.gguf", "qwen3-4b", "q9_k")
