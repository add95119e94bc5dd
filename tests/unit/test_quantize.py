"""A GGUF file at another precision: what is kept, what changes, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from shoal.errors import ConfigError, ModelFormatError, StoreError
from shoal.models import Store
from shoal.models.gguf import read_gguf
from shoal.models.quantize import TYPES, quantize_gguf
from tests.support.tiny_gguf import write_tiny


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", "qwen3", kind="F16", tied=False)


@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.01), ("q4_1", 0.1), ("q4_0", 0.12)])
def test_matrices_change_their_type_and_little_else(source: Path, tmp_path: Path, kind: str, most: float) -> None:
    heard: list[tuple[int, int]] = []
    told = quantize_gguf(source, tmp_path / "out.gguf", kind, lambda done, total: heard.append((done, total)))
    before, after = read_gguf(source), read_gguf(tmp_path / "out.gguf")
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        now = after.tensors[name]
        assert now.shape == tensor.shape
        if len(tensor.shape) == 2:
            assert now.type == kind.upper()
            wrong = now.dequantize() - tensor.dequantize()
            assert np.sqrt(np.mean(wrong**2) / np.mean(tensor.dequantize() ** 2)) < most
        else:
            assert now.type == tensor.type
            np.testing.assert_array_equal(now.dequantize(), tensor.dequantize())
    assert 0 < told.rms_error < most
    assert told.tensors == sum(len(tensor.shape) == 2 for tensor in before.tensors.values())
    assert told.bytes == (tmp_path / "out.gguf").stat().st_size < told.source_bytes
    assert heard[-1][0] == heard[-1][1]
    changed = {"general.file_type", "general.quantization_version"}
    for key in before.metadata.keys() | after.metadata.keys() - changed:
        if key not in changed:
            np.testing.assert_array_equal(after.metadata[key], before.metadata[key])


def test_what_cannot_be_is_refused_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type is 'q5_k'") as caught:
        quantize_gguf(source, tmp_path / "out.gguf", "q5_k")
    assert caught.value.limit == list(TYPES)
    with pytest.raises(ConfigError, match="exists"):
        quantize_gguf(source, source, "q8_0")
    (tmp_path / "broken.gguf").write_bytes(source.read_bytes()[:2000])
    with pytest.raises(ModelFormatError):
        quantize_gguf(tmp_path / "broken.gguf", tmp_path / "out.gguf", "q8_0")
    with pytest.raises(StoreError):
        quantize_gguf(source, tmp_path / "no" / "such" / "place.gguf", "q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf", "tiny.gguf"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("part", ["header", "weights"])
def test_a_full_disk_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    work = tmp_path / f".out.gguf.{os.getpid()}"
    work.symlink_to("/dev/full")
    if part == "weights":
        for method in ("write_header_to_file", "write_kv_data_to_file", "write_ti_data_to_file", "write_padding"):
            monkeypatch.setattr(GGUFWriter, method, lambda *_: None)
        monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", only_weights)
    with pytest.raises(StoreError, match=r"the disk of .*out\.gguf is full") as caught:
        quantize_gguf(source, tmp_path / "out.gguf", "q8_0")
    assert "permissions" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def only_weights(writer: GGUFWriter) -> None:
    """The weights alone, as the writer writes them, but enough of them to be more than a buffer holds."""
    with Path(str(writer.path)).open("wb") as out:
        for info in writer.tensors[0].values():
            assert info.tensor is not None
            np.tile(info.tensor.reshape(-1), 64).tofile(out)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "llama", kind="F32")
    spoilt = bytearray(path.read_bytes())
    at = read_gguf(path).tensors["blk.0.ffn_up.weight"].data
    place = bytes(spoilt).index(at.tobytes())
    spoilt[place : place + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(bytes(spoilt))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up"):
        quantize_gguf(path, tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()


def test_a_model_is_added_to_the_store_whole_or_not_at_all(source: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    with store.adding("mine") as path:
        quantize_gguf(source, path, "q8_0")
    files = store.resolve("mine", pull=False)
    assert files.kind == "gguf"
    assert read_gguf(files.path).n_layers == 2
    assert [model.name for model in store.list()] == ["mine"]
    with pytest.raises(ConfigError), store.adding("other") as path:
        quantize_gguf(source, path, "q9")
    for name in ("mine", "smollm2-135m", "../x", "", "a/b"):
        with pytest.raises(StoreError, match="cannot be called"), store.adding(name):
            pass
    assert [path.name for path in (tmp_path / "home" / "models").iterdir()] == ["mine"]
    assert store.remove("mine") > 0
