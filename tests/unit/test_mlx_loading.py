"""What the MLX runner loads, and how it refuses what it cannot run."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import Engine, Request, SamplingParams
from shoal.config import EngineConfig
from shoal.engine.loading import make_runner
from shoal.errors import BackendError, ConfigError, ModelFormatError, RunnerError, ShoalError, UnsupportedModelError
from shoal.models import Store, oracle
from shoal.models.families import describe
from shoal.models.files import local_files
from shoal.models.gguf import read_gguf
from shoal.runners.base import Runner
from shoal.runners.mlx.backend import on_apple_silicon
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel, choose_runner
from tests.support import tiny_gguf
from tests.support.mlx_tiny import VOCAB, tiny_runner, write_tiny
from tests.support.native_tiny import write_blocks
from tests.support.runners import real_runner
from tests.support.tiny_models import write_model

mx = pytest.importorskip("mlx.core")


def load(path: Path, **settings: Any) -> Runner:
    config = EngineConfig.of(**{"runner": "mlx", "kv_memory": "8MiB", **settings})
    return make_runner(local_files("m", path), config, Store(path.parent / "home"))


def row_of(runner: Runner, tokens: list[int], seq_id: int = 1) -> Any:
    blocks = tuple(range(-(-len(tokens) // 32)))
    output = runner.execute(StepPlan(1, (ScheduledSequence(seq_id, tuple(tokens), 0, blocks, Want.LOGITS),)))
    assert output.logits is not None
    return output.logits[0].copy()


GGUFS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kind": "F16"}),
    ("llama", {"kind": "Q4_1", "tied": False}),
    ("llama", {"kind": "Q4_0", "rope_factors": True}),
    ("qwen2", {"kind": "Q8_0", "head_dim": 16}),
    ("qwen3", {"kind": "Q8_0", "tied": False}),
    ("qwen3", {"kind": "F32"}),
]


@pytest.mark.parametrize(("arch", "fields"), GGUFS, ids=[f"{a}-{f['kind']}" for a, f in GGUFS])
def test_a_gguf_computes_what_the_reference_computes(arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", arch, **fields)
    tokens = np.random.default_rng(1).integers(0, tiny_gguf.VOCAB, 40).tolist()
    exact = oracle.logits(describe(read_gguf(path)), tokens)[-1:]
    runner = load(path, precision="f32")  # a GPU takes float16 otherwise
    assert (runner.spec.architecture, runner.spec.context_length) == (arch, 512)
    assert oracle.mean_kl(exact, row_of(runner, tokens)[None]) < 1e-6
    runner.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_every_weight_lies_row_by_row(kind: str, tmp_path: Path) -> None:
    """MLX's CUDA kernels have no other; its CPU takes any strides, so that nothing else here would notice."""
    from mlx.utils import tree_flatten

    from shoal.runners.mlx.gguf import load_gguf

    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", "llama", kind=kind, tied=False)
    model = load_gguf(read_gguf(path), mx.float32)
    weights = {name: np.array(array, copy=False) for name, array in tree_flatten(model.parameters())}
    assert [name for name, array in weights.items() if not array.flags.c_contiguous] == []


def test_mixed_bits_load_as_they_are(tmp_path: Path) -> None:
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    files = write_tiny(tmp_path / "m", "llama")
    model, config = load_model(files.path)
    wide = {"group_size": 32, "bits": 8}
    nn.quantize(model, 32, 4, class_predicate=lambda p, m: hasattr(m, "to_quantized") and ("down" not in p or wide))
    mx.save_safetensors(str(files.path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    downs = {f"model.layers.{i}.mlp.down_proj": wide for i in range(2)}
    config["quantization"] = {"group_size": 32, "bits": 4, **downs}
    (files.path / "config.json").write_text(json.dumps(config))
    runner = load(files.path)
    assert runner.spec.precision == "float32/q4/q8"
    expected = np.array(model(mx.array([[5, 6, 7]]))[0, -1])
    assert np.abs(row_of(runner, [5, 6, 7]) - expected).max() < 1e-4
    runner.close()


def test_prompt_positions_never_reach_the_projection(tmp_path: Path) -> None:
    """Eight prompts of 500 tokens over 60,000 entries would be 960 MB of logits; what is used stays far below."""
    runner = load(write_tiny(tmp_path / "m", "llama", vocab_size=60_000).path, kv_memory="32MiB")
    rng = np.random.default_rng(0)
    items = tuple(
        ScheduledSequence(
            i, tuple(rng.integers(0, 60_000, 500).tolist()), 0, tuple(range(16 * i, 16 * i + 16)), Want.ARGMAX
        )
        for i in range(8)
    )
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.execute(StepPlan(1, items))
    assert runner.peak_bytes is not None
    assert runner.peak_bytes - before < 200 << 20
    runner.close()


def refused(kind: type[ShoalError], path: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(kind) as caught:
        load(path, **settings)
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value)


def test_a_model_type_that_mlx_lm_lacks_is_named(tmp_path: Path) -> None:
    files = write_tiny(tmp_path / "m", "llama")
    config = json.loads((files.path / "config.json").read_text())
    (files.path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    refused(UnsupportedModelError, files.path, "nonesuch", "update mlx-lm")


@pytest.mark.parametrize("damage", ["no weights", "half a file", "a tensor missing", "no config", "no json", "a list"])
def test_missing_and_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = write_tiny(tmp_path / "m", "llama").path
    weights, config = path / "model.safetensors", path / "config.json"
    if damage == "no weights":
        weights.unlink()
    elif damage == "half a file":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "a tensor missing":
        mx.save_safetensors(str(weights), {"model.norm.weight": mx.ones(64)})
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text("{" if damage == "no json" else "[]")
    refused(ModelFormatError, path, str(path))


def test_a_family_that_its_models_lack_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "gemma3")
    refused(UnsupportedModelError, path, "scaled embeddings")
    with pytest.raises(UnsupportedModelError, match="scaled embeddings"):
        choose_runner(EngineConfig(runner="mlx"), LocalModel.read(local_files("m", path)))


@pytest.mark.parametrize(("kind", "limit"), [("Q4_K", 1e-6), ("Q6_K", 1e-3)])
def test_k_quants_keep_their_codes_or_are_rounded_to_eight_bits(kind: str, limit: float, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", kind)
    tokens = np.random.default_rng(1).integers(0, 100, 30).tolist()
    exact = oracle.logits(describe(read_gguf(path)), tokens)[-1:]
    runner = load(path, precision="f32")
    assert oracle.mean_kl(exact, row_of(runner, tokens)[None]) < limit
    runner.close()


def test_a_cache_that_cannot_be_batched_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import llama
    from mlx_lm.models.cache import ChunkedKVCache

    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [ChunkedKVCache(32) for _ in self.layers])
    refused(UnsupportedModelError, write_tiny(tmp_path / "m", "llama").path, "ChunkedKVCache", "llama")


def test_a_model_that_errs_in_a_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import llama

    original = llama.Model.__call__

    def blind(self: Any, inputs: Any, cache: Any = None) -> Any:
        for layer in cache:
            if hasattr(layer, "left_padding"):  # as if it never masked
                layer.left_padding = mx.zeros_like(layer.left_padding)
        return original(self, inputs, cache)

    monkeypatch.setattr(llama.Model, "__call__", blind)
    refused(UnsupportedModelError, write_tiny(tmp_path / "m", "llama").path, "in a batch than alone")


def test_without_mlx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else find(name))
    with pytest.raises(BackendError, match=r"mlx_lm not installed.*pip install 'shoal\[mlx\]'"):
        choose_runner(EngineConfig(runner="mlx"))


def test_another_thread_gets_a_typed_error(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path / "m", "llama")
    caught: list[BaseException] = []

    def touch() -> None:
        for call in (lambda: row_of(runner, [1, 2]), lambda: runner.release([1]), runner.close):
            try:
                call()
            except RunnerError as error:
                caught.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert [str(error).count("another thread") for error in caught] == [1, 1, 1]
    assert row_of(runner, [1, 2]).shape == (VOCAB,)  # and its own thread goes on
    runner.close()
    with pytest.raises(RunnerError, match="closed"):
        row_of(runner, [1, 2])


def test_an_engine_loads_and_runs_the_model_on_its_own_thread(tmp_path: Path) -> None:
    requests = [
        Request(prompt_tokens=(5, 6, 7, i), sampling=SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)
    ]
    with Engine(lambda: tiny_runner(tmp_path / "m", "llama"), None, EngineConfig(decode_chunk=3)) as engine:
        together = [result.tokens for result in engine.run(requests).results]
        alone = [engine.run([request]).results[0].tokens for request in requests]
        stats = engine.stats()
    assert together == alone
    assert stats.peak_bytes is not None
    assert stats.peak_bytes > stats.weight_bytes


@pytest.mark.parametrize("damaged", [False, True])
def test_a_process_ends_quietly_after_its_engine(tmp_path: Path, damaged: bool) -> None:
    path = write_tiny(tmp_path / "m", "llama").path
    if damaged:
        (path / "model.safetensors").write_bytes(b"nonsense")
    code = f"""
from pathlib import Path
from shoal import Engine, EngineConfig, Request, SamplingParams
from shoal.errors import ModelFormatError
from shoal.engine.loading import make_runner
from shoal.models import Store
from shoal.models.files import local_files

config = EngineConfig(runner="mlx", kv_memory="8MiB", decode_chunk=3)
try:
    files = local_files("m", Path({str(path)!r}))
    with Engine(lambda: make_runner(files, config, Store(Path({str(tmp_path)!r}))), None, config) as engine:
        engine.run([Request(prompt_tokens=(5, 6, i), sampling=SamplingParams(max_tokens=9)) for i in range(3)])
except ModelFormatError:
    print("refused")
print("ended")
"""
    expected = ["refused", "ended"] if damaged else ["ended"]
    for _ in range(1 if damaged else 3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"threads": 2}, "threads"), ({"kv_memory": 512}, "kv_memory"), ({"memory": 1000}, "memory")],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    files = write_tiny(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=word):
        make_runner(files, EngineConfig.of(**{"runner": "mlx", **settings}), Store(tmp_path))


def test_cache_limit_is_mlx_s_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_limit"):
        choose_runner(EngineConfig(runner="openvino", runner_options={"cache_limit": "1MiB"}))
    before = mx.set_cache_limit(1 << 30)
    runner = load(write_tiny(tmp_path / "m", "llama").path, runner_options={"cache_limit": "3MiB"})
    assert mx.set_cache_limit(before) == 3 << 20
    runner.close()


def test_auto_takes_mlx_on_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_runner(EngineConfig())[0] != "mlx"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert on_apple_silicon()
    assert choose_runner(EngineConfig()) == ("mlx", "Apple silicon")


def test_the_default_model_agrees_with_the_native_kernels() -> None:
    """A short run of the real file: the same best token, or a near-tie; and the same tokens alone and in a batch."""
    from shoal.errors import ModelNotFoundError

    prompt = [1, 345, 2213, 998, 45, 1200, 7, 18]
    try:
        native = real_runner("native")
        runner = real_runner("mlx", kv_memory="64MiB")
    except (BackendError, ModelNotFoundError) as error:
        pytest.skip(str(error))
    exact, row = row_of(native, prompt), row_of(runner, prompt)
    second, best = np.partition(row, -2)[-2:]
    assert int(exact.argmax()) == int(row.argmax()) or best - second < 2 * np.abs(exact - row).max()
    assert np.abs(exact - row).max() < 1.0  # the native kernels quantise activations
    runner.release([1])
    again = ScheduledSequence(2, tuple(prompt), 0, (3,), Want.LOGITS)
    output = runner.execute(StepPlan(2, (again, ScheduledSequence(3, (5, 6), 0, (4,), Want.LOGITS))))
    assert output.logits is not None
    assert np.abs(output.logits[0] - row).max() < 1e-2
    native.close()
    runner.close()
