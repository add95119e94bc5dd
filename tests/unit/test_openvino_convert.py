"""Conversion of tiny GGUF files: what is cached, what is refused, and how."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, StoreError, UnsupportedModelError
from shoal.models import families
from shoal.models.gguf import read_gguf
from shoal.runners.openvino import convert
from shoal.runners.openvino.convert import converted, describe
from shoal.runners.openvino.store import open_converted, write_converted
from tests.support.tiny_gguf import EMBD, FF, VOCAB, write_tiny
from tests.support.tiny_models import write_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", "llama", kind="Q8_0")


def test_a_second_load_reads_what_the_first_wrote(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted(tiny, tmp_path / "cache")
    monkeypatch.setattr(convert, "read_gguf", lambda path: pytest.fail("converted again"))
    second = converted(tiny, tmp_path / "cache")
    assert second.path == first.path
    assert second.description == first.description
    assert first.arrays.keys() == second.arrays.keys()
    for name, array in first.arrays.items():
        assert np.array_equal(array, second.arrays[name])
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.path.name]


def test_another_file_or_converter_means_another_conversion(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {converted(tiny, tmp_path / "cache").path}
    os.utime(tiny, ns=(1, 1))
    paths.add(converted(tiny, tmp_path / "cache").path)
    monkeypatch.setattr(convert, "VERSION", convert.VERSION + 1)
    paths.add(converted(tiny, tmp_path / "cache").path)
    assert len(paths) == 3


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, struct.pack("<Q", 10) + b"{}        "])
def test_a_damaged_conversion_is_made_again(tiny: Path, tmp_path: Path, damage: bytes) -> None:
    path = converted(tiny, tmp_path / "cache").path
    size = path.stat().st_size
    path.write_bytes(damage)
    with pytest.raises(ModelFormatError, match="not a converted model"):
        open_converted(path)
    converted(tiny, tmp_path / "cache")
    assert path.stat().st_size == size


def test_the_file_is_safetensors(tiny: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    result = converted(tiny, tmp_path / "cache")
    loaded = {name: array for name, array in load_file(result.path).items() if not name.endswith(".padding")}
    assert loaded.keys() == result.arrays.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in result.arrays.items())
    assert result.weight_bytes == sum(array.nbytes for array in loaded.values())
    assert all(array.ctypes.data % 64 == 0 for array in result.arrays.values())


def test_arrays_of_odd_sizes_stay_aligned_and_loadable(tiny: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays: dict[str, NDArray[Any]] = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.ones((5, 7), np.float16),
        "c": np.ones(16, np.float32),
    }
    path = tmp_path / "odd.safetensors"
    write_converted(path, describe(families.describe(read_gguf(tiny))), iter(arrays.items()), 3)
    opened = open_converted(path).arrays
    assert opened.keys() == arrays.keys()
    assert load_file(path).keys() == {"a", "a.padding", "b", "b.padding", "c"}
    for name, array in arrays.items():
        assert np.array_equal(opened[name], array)
        assert opened[name].ctypes.data % 64 == 0


def test_products_of_one_input_are_fused(tiny: Path, tmp_path: Path) -> None:
    arrays = converted(tiny, tmp_path / "cache").arrays
    assert arrays["0.qkv.codes"].shape == ((4 + 2 + 2) * 32, EMBD)
    assert arrays["1.gate_up.codes"].shape == (2 * FF, EMBD)
    assert arrays["embed.codes"].shape == (VOCAB, EMBD)
    assert arrays["0.qkv.codes"].dtype == np.int8  # Q8_0 has no zero points
    assert "0.qkv.zeros" not in arrays


def test_a_failed_write_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        converted(tiny, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "bert", kind="Q8_0")
    with pytest.raises(UnsupportedModelError, match="bert") as caught:
        converted(path, tmp_path / "cache")
    assert all(name in str(caught.value) for name in ("llama", "qwen2", "qwen3"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3", "scaled embeddings"),
        ("qwen3moe", "a mixture of experts"),
        ("lfm2", "a ShortConv mixer"),
        ("olmo2", "layers without a norm before each part"),
        ("phi3", "heads of 32 elements with 12 of them rotated"),
        ("mistral3", "queries scaled by position"),
        ("smollm3", "heads of 32 elements with 0 of them rotated"),
    ],
)
def test_what_the_graph_lacks_is_refused_by_its_name(name: str, message: str, tmp_path: Path) -> None:
    model = families.describe(read_gguf(write_model(tmp_path / "tiny.gguf", name)))
    with pytest.raises(UnsupportedModelError, match=message):
        describe(model)


def test_a_size_that_groups_do_not_divide_is_refused(tiny: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="embedding size 72"):
        describe(replace(families.describe(read_gguf(tiny)), width=72))


def test_a_missing_tensor_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = GGUFWriter.add_tensor

    def without_down(self: GGUFWriter, name: str, *args: Any, **more: Any) -> None:
        if name != "blk.1.ffn_down.weight":
            add(self, name, *args, **more)

    monkeypatch.setattr(GGUFWriter, "add_tensor", without_down)
    path = write_tiny(tmp_path / "missing.gguf", "llama", kind="Q8_0")
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_down\.weight is missing"):
        converted(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_header_says_what_the_model_is(tiny: Path, tmp_path: Path) -> None:
    raw = converted(tiny, tmp_path / "cache").path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    about = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["shoal"])
    assert (about["architecture"], about["n_layers"], about["tied"]) == ("llama", 2, True)
