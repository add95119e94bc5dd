"""Every family's page and the oracle, against numbers that llama.cpp and transformers gave for the same tiny models.

The numbers are in tests/data/families; scripts/compare_families.py makes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models import oracle
from shoal.models.decoder import Attention, Decoder, DeltaNet, Mixture
from shoal.models.families import FAMILIES, describe
from shoal.models.gguf import read_gguf
from shoal.models.safetensors import read_safetensors
from tests.support.tiny_hub import HUB, unfolded, write_directory
from tests.support.tiny_models import MODELS, some_tokens, write_model
from tests.support.tiny_writer import Tiny

DATA = Path(__file__).parents[1] / "data/families"
GGUF: dict[str, Any] = json.loads((DATA / "gguf.json").read_text())
COLUMNS, ROWS = list(range(0, 288, 41)), [0, 7, 19, 30, 39]


def agrees(decoder: Decoder, outside: dict[str, Any], tolerance: float) -> None:
    ours = oracle.logits(decoder, some_tokens())
    assert np.abs(ours[ROWS][:, COLUMNS] - np.array(outside["logits"])).max() < tolerance
    chosen = ours[np.arange(len(ours)), outside["argmax"]]
    assert (ours.max(-1) - chosen).max() < tolerance  # the outside's token is ours, but for ties


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_what_llama_cpp_gives(name: str, tmp_path: Path) -> None:
    # llama.cpp looks up Gemma's GELU in a table of half precision.
    decoder = describe(read_gguf(write_model(tmp_path / "tiny.gguf", name)))
    agrees(decoder, GGUF[name], 0.06 if name.startswith("gemma") else 5e-4)


@pytest.mark.parametrize("name", HUB)
def test_a_directory_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", unfolded(name), shards=3 if name == "qwen3moe" else 1)
    agrees(describe(read_safetensors(path)), HUB[name], 5e-4)


def test_every_family_was_compared_in_both_formats() -> None:
    gguf = {architecture for architecture, _, _ in MODELS.values()}
    hub = {HUB[name]["config"]["model_type"] for name in HUB}
    assert [f.name for f in FAMILIES if not gguf & set(f.gguf)] == []
    assert [f.name for f in FAMILIES if not hub & set(f.safetensors)] == []


def test_half_precision_weights_are_read_as_they_are(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", unfolded("llama"))
    whole = load_file(path / "model.safetensors")
    save_file({name: values.astype(np.float16) for name, values in whole.items()}, path / "model.safetensors")
    tensor = read_safetensors(path).tensors["model.norm.weight"]
    assert tensor.type == "F16"
    assert np.array_equal(tensor.dequantize(), whole["model.norm.weight"].astype(np.float16).astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    from safetensors import TensorSpec, serialize_file

    path = write_directory(tmp_path / "model", unfolded("llama"))
    values = np.array([1.0, -2.5, 3.140625], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    spec = TensorSpec(dtype="bfloat16", shape=[3], data_ptr=upper.ctypes.data, data_len=upper.nbytes)
    serialize_file({"x": spec}, path / "model.safetensors")
    assert np.array_equal(read_safetensors(path).tensors["x"].dequantize(), values)


def test_published_gpt_oss_experts_are_mxfp4(tmp_path: Path) -> None:
    about = unfolded("gpt-oss")
    path = write_directory(tmp_path / "model", about)
    tensors = load_file(path / "model.safetensors")
    rng = np.random.default_rng(0)
    for i in range(4):
        for name, rows in (("gate_up_proj", 64), ("down_proj", 64)):
            full = f"model.layers.{i}.mlp.experts.{name}"
            groups = tensors.pop(full).shape[1] // 32
            tensors[f"{full}_blocks"] = rng.integers(0, 256, (8, rows, groups, 16)).astype(np.uint8)
            tensors[f"{full}_scales"] = rng.integers(118, 126, (8, rows, groups)).astype(np.uint8)
    save_file(tensors, path / "model.safetensors")
    decoder = describe(read_safetensors(path))
    experts = decoder.layers[0].feed_forward
    assert isinstance(experts, Mixture)
    assert experts.gate is not None
    assert experts.gate.weight.type == "MXFP4"
    values = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # e2m1
    name = "model.layers.0.mlp.experts.gate_up_proj"
    byte, scale = int(tensors[f"{name}_blocks"][2, 5, 1, 3]), int(tensors[f"{name}_scales"][2, 5, 1])
    pair = [values[byte & 15] * 2.0 ** (scale - 127), values[byte >> 4] * 2.0 ** (scale - 127)]
    assert experts.up.weight.values()[2, 2, 38:40].tolist() == pair  # row 5 of gate and up in turns is up's row 2
    assert np.array_equal(experts.up.weight.encoded()[2], experts.up.weight.tensor.data.reshape(8, 64, -1)[2, 1::2])


def write_with(path: Path, name: str, **keys: Any) -> Path:
    """The tiny model `name` whose keys lie."""
    architecture, kind, maker = MODELS[name]
    tiny = Tiny(path, architecture, kind, name)
    maker(tiny)
    tiny.keys(**keys)
    if "block_count" in keys:
        tiny.layers = keys["block_count"]
    tiny.close()
    return path


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"rope.dimension_count": 2**30}),
        ("llama", {"rope.dimension_count": 7}),
        ("llama", {"attention.head_count": 2**30}),
        ("llama", {"attention.key_length": 2**30}),
        ("llama", {"attention.value_length": 2**30}),
        ("llama", {"attention.head_count_kv": 3}),
        ("llama", {"embedding_length": 2**30}),
        ("llama", {"feed_forward_length": 2**30}),
        ("llama", {"feed_forward_length": [96, 96]}),
        ("llama", {"block_count": 2**30}),
        ("llama", {"rope.freq_base": 0.0}),
        ("llama", {"attention.layer_norm_rms_epsilon": -1.0}),
        ("llama", {"rope.scaling.type": "spiral"}),
        ("llama-3.1", {"rope.dimension_count": 16}),
        ("qwen3moe", {"expert_count": 2**30}),
        ("qwen3moe", {"expert_used_count": 9}),
        ("qwen3moe", {"expert_feed_forward_length": 2**30}),
        ("qwen3moe", {"expert_group_count": 3}),
        ("qwen35", {"ssm.group_count": 3}),
        ("qwen35", {"ssm.state_size": 2**30}),
        ("qwen35", {"ssm.conv_kernel": 2**30}),
        ("qwen35", {"ssm.inner_size": 2**30}),
        ("granitehybrid", {"ssm.time_step_rank": 2**30}),
        ("lfm2", {"shortconv.l_cache": 2**30}),
        ("gemma3", {"attention.sliding_window_pattern": [True]}),
        ("gemma4-small", {"attention.shared_kv_layers": 9}),
        ("gemma4-small", {"embedding_length_per_layer_input": 2**30}),
        ("phi3-long", {"rope.dimension_count": 8}),
    ],
)
def test_keys_that_lie_are_refused_before_memory_is_taken(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    import tracemalloc

    path = write_with(tmp_path / "tiny.gguf", name, **keys)
    tracemalloc.start()
    with pytest.raises(ModelFormatError):
        describe(read_gguf(path))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = read_gguf(write_model(tmp_path / "tiny.gguf", "qwen3"))
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != "blk.2.attn_k_norm.weight"}
    from dataclasses import replace

    with pytest.raises(ModelFormatError, match=r"blk\.2\.attn_k_norm\.weight is missing"):
        describe(replace(model, tensors=tensors))


def test_a_tensor_that_no_page_knows_is_named(tmp_path: Path) -> None:
    architecture, kind, maker = MODELS["llama"]
    tiny = Tiny(tmp_path / "tiny.gguf", architecture, kind, "llama")
    maker(tiny)
    tiny.vector("blk.0.attn_v.scale", 1)
    tiny.close()
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_v\.scale"):
        describe(read_gguf(tmp_path / "tiny.gguf"))


def test_an_architecture_without_a_page_is_named(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "tiny.gguf", "bert", "F32", "bert")
    tiny.outside()
    tiny.layers = 1
    tiny.close()
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        describe(read_gguf(tmp_path / "tiny.gguf"))


def test_draft_heads_are_left_out(tmp_path: Path) -> None:
    plain = describe(read_gguf(write_model(tmp_path / "a.gguf", "qwen35")))
    drafts = describe(read_gguf(write_model(tmp_path / "b.gguf", "qwen35-mtp")))
    assert len(drafts.layers) == len(plain.layers) == 4


def test_value_heads_find_their_keys_in_each_format(tmp_path: Path) -> None:
    """GGUF has Qwen 3.5's value heads in turns, the hub has those of one key head beside each other."""
    gguf = describe(read_gguf(write_model(tmp_path / "a.gguf", "qwen35"))).layers[0].mixer
    hub = describe(read_safetensors(write_directory(tmp_path / "b", unfolded("qwen35")))).layers[0].mixer
    assert isinstance(gguf, DeltaNet)
    assert isinstance(hub, DeltaNet)
    assert (gguf.key_of, hub.key_of) == ((0, 1, 0, 1), (0, 0, 1, 1))


def test_windows_and_shared_kv_of_gemma(tmp_path: Path) -> None:
    three = describe(read_gguf(write_model(tmp_path / "a.gguf", "gemma3")))
    mixers = [layer.mixer for layer in three.layers]
    assert [m.window for m in mixers if isinstance(m, Attention)] == [8, 8, 8, 8, 8, None, 8]
    four = describe(read_gguf(write_model(tmp_path / "b.gguf", "gemma4-small")))
    shared = [layer.mixer.kv_layer for layer in four.layers if isinstance(layer.mixer, Attention)]
    assert shared == [None] * 6 + [4, 4, 5]


def test_linear_scaling_divides_positions(tmp_path: Path) -> None:
    scaled = describe(read_gguf(write_model(tmp_path / "a.gguf", "llama-linear"))).layers[0].mixer
    plain = describe(read_gguf(write_model(tmp_path / "b.gguf", "llama"))).layers[0].mixer
    assert isinstance(scaled, Attention)
    assert isinstance(plain, Attention)
    assert scaled.rotary is not None
    assert plain.rotary is not None
    assert scaled.rotary.frequencies == pytest.approx([f / 4 for f in plain.rotary.frequencies])


def test_weights_are_walked_once_and_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    decoder = describe(read_gguf(write_model(tmp_path / "a.gguf", "qwen2")))
    paths = [path for path, _ in decoder.weights()]
    assert decoder.tied
    assert len(paths) == len(set(paths))
    assert "layers.3.feed_forward.down.weight" in paths
    assert "head.weight" not in paths


class TestDirectories:
    """What can be wrong with a directory from the hub."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_directory(tmp_path / "model", unfolded("llama"), shards=2)

    def test_a_missing_shard_is_named(self, path: Path) -> None:
        (path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelFormatError, match="model-00002-of-00002"):
            read_safetensors(path)

    def test_an_index_may_not_leave_the_directory(self, path: Path) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
        with pytest.raises(ModelFormatError, match="lists no files"):
            read_safetensors(path)

    def test_a_truncated_file_is_refused(self, path: Path) -> None:
        file = path / "model-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-64])
        with pytest.raises(ModelFormatError, match="cannot be read"):
            read_safetensors(path)

    def test_weights_quantised_in_another_way_are_refused_by_its_name(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match="'awq'"):
            read_safetensors(path)

    @pytest.mark.parametrize("broken", ["{", "[1]"])
    def test_a_damaged_config_is_refused(self, path: Path, broken: str) -> None:
        (path / "config.json").write_text(broken)
        with pytest.raises(ModelFormatError, match=r"config\.json"):
            read_safetensors(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"num_hidden_layers": 2**30},
            {"num_attention_heads": 2**30},
            {"hidden_size": "many"},
            {"head_dim": 2**30},
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        ],
    )
    def test_a_config_that_lies_is_refused(self, path: Path, change: dict[str, Any]) -> None:
        config = json.loads((path / "config.json").read_text()) | change
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFormatError):
            describe(read_safetensors(path))


@pytest.mark.parametrize(("said", "kind"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu")])
def test_a_directory_that_names_another_activation_gets_it(said: str, kind: str, tmp_path: Path) -> None:
    about = unfolded("qwen3moe")
    about["config"]["hidden_act"] = said
    feed = describe(read_safetensors(write_directory(tmp_path / "m", about))).layers[0].feed_forward
    assert feed is not None
    assert feed.activation == kind


def test_an_activation_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    for name, said in (("llama", "abacus"), ("gpt-oss", "gelu")):
        about = unfolded(name)
        about["config"]["hidden_act"] = said
        with pytest.raises(UnsupportedModelError, match=f"activation '{said}'"):
            describe(read_safetensors(write_directory(tmp_path / name, about)))
