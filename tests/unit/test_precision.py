"""Matrices quantised at load: which change, that runners compute with what the description says, who refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.config import EngineConfig
from shoal.errors import ConfigError, ModelFormatError
from shoal.models import oracle
from shoal.models.decoder import Decoder, Weight
from shoal.models.files import local_files
from shoal.models.gguf import GgufTensor
from shoal.models.precision import AT_LOAD, Quantised, quantised
from shoal.runners.native.runner import NativeRunner, packed_path
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel, choose_runner
from tests.support.native_tiny import isas
from tests.support.tiny_hub import unfolded, write_directory
from tests.support.tiny_models import some_tokens, write_model


def decoder_of(path: Path) -> Decoder:
    return LocalModel.read(local_files("m", path)).decoder()


def test_wide_matrices_change_and_the_rest_stays(tmp_path: Path) -> None:
    before = decoder_of(write_model(tmp_path / "m.gguf", "qwen35moe", "F32"))
    after = quantised(before, "q8_0")
    assert after.tied == before.tied
    kinds = {path: weight.type for path, weight in after.weights()}
    changed = {path for path, kind in kinds.items() if kind == "Q8_0"}
    assert {path.removesuffix(".weight").rsplit(".", 1)[-1] for path in changed} >= {
        *("embedding", "head", "q", "k", "v", "z", "out", "gate", "up", "down")
    }
    assert not any("norm" in p or p.endswith((".bias", "router.weight", "alpha.weight", "conv")) for p in changed)
    again = quantised(after, "q8_0")
    assert all(a.tensor is b.tensor for (_, a), (_, b) in zip(again.weights(), after.weights(), strict=True))
    finer = quantised(decoder_of(write_model(tmp_path / "q4.gguf", "llama", "Q4_0")), "q8_0")
    assert "Q8_0" not in {weight.type for _, weight in finer.weights()}


@pytest.mark.parametrize("name", ["qwen3moe", "phi3", "gpt-oss"])  # stacked; fused; transposed, or MXFP4
def test_rows_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    decoder = decoder_of(write_directory(tmp_path / "hub", unfolded(name)))
    for model in (decoder, quantised(decoder, "q8_0")):
        for path, weight in model.weights():
            if len(weight.shape) < 2 or not weight.plain or path.endswith("bias"):
                continue
            whole = weight.encoded().reshape(-1, weight.encoded_rows(0, 1).shape[1])
            for first, count in ((0, 3), (len(whole) // 2 - 1, 4), (len(whole) - 2, 9)):
                assert np.array_equal(weight.encoded_rows(first, count), whole[first : first + count])


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weight = decoder_of(write_model(tmp_path / "m.gguf", "llama", "F32")).layers[0].mixer
    assert weight is not None
    stored = weight.out.weight
    data = stored.tensor.data.copy()
    data.view(np.float32)[5] = np.nan
    broken = Weight(Quantised(GgufTensor("w", "F32", stored.shape, data), "Q8_0"), stored.shape)
    with pytest.raises(ModelFormatError, match="no numbers"):
        broken.encoded_rows(0, 1)


@pytest.mark.skipif(not isas(), reason="the native kernels are not built")
@pytest.mark.parametrize("precision", AT_LOAD)
def test_the_native_runner_computes_with_quantised_weights(precision: str, tmp_path: Path) -> None:
    model = LocalModel.read(local_files("m", write_directory(tmp_path / "hub", unfolded("qwen3"))))
    config = EngineConfig.of(precision=precision, runner="native")
    heard: list[tuple[str, int, int]] = []
    runner = NativeRunner.load(
        model,
        kv_bytes=8 << 20,
        cache_dir=tmp_path,
        precision=config.precision,
        progress=lambda *told: heard.append(told),
    )
    assert runner.spec.precision == precision
    packed = packed_path(model.files, tmp_path, config.precision)
    assert packed.exists()
    assert not packed_path(model.files, tmp_path).exists()
    assert {what for what, _, _ in heard} == {"pack"}
    assert heard[-1][1] == heard[-1][2] < packed.stat().st_size < sum(f.stat().st_size for f in model.files.weights)
    tokens = tuple(some_tokens())
    plan = StepPlan(1, (ScheduledSequence(1, tokens, 0, tuple(range(-(-len(tokens) // 32))), Want.LOGITS),))
    found = runner.execute(plan).logits
    runner.close()
    assert found is not None
    plain = decoder_of(model.files.path)
    exact = oracle.logits(quantised(plain, precision), tokens)[-1:]
    assert oracle.mean_kl(exact, found) < 1e-3
    if precision == "q4_0":  # and not with the others
        assert oracle.mean_kl(oracle.logits(plain, tokens)[-1:], found) > 2 * oracle.mean_kl(exact, found)


@pytest.mark.skipif(not isas(), reason="the native kernels are not built")
def test_runners_refuse_a_precision_by_name(tmp_path: Path) -> None:
    model = LocalModel.read(local_files("m", write_model(tmp_path / "m.gguf", "llama", "F32")))
    assert choose_runner(EngineConfig(precision="q8_0"), model)[0] == "native"
    with pytest.raises(ConfigError, match=r"precision is 'bf16'.*native has auto, q8_0, q4_1, q4_0"):
        choose_runner(EngineConfig(precision="bf16", runner="native"), model)
    with pytest.raises(ConfigError, match=r"precision is 'q8_0'.*openvino has auto, bf16, f32"):
        choose_runner(EngineConfig(precision="q8_0", runner="openvino"), model)
    with pytest.raises(ConfigError, match="precision is 'q3'"):
        EngineConfig.of(precision="q3")
