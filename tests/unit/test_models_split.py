"""GGUF models in several files: by path, and what is refused of files that lie about each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from shoal.errors import ModelFormatError
from shoal.models import load_model_files
from shoal.models.gguf import read_gguf, read_metadata
from shoal.models.split import part_names, part_paths
from tests.unit.test_models_gguf import HYPERPARAMETERS


def name(number: int, count: int = 3) -> str:
    return f"m-{number:05}-of-{count:05}.gguf"


def write_part(path: Path, number: int, tensors: dict[str, Any], **split: int) -> None:
    """One part; only the first has hyper-parameters. `split`: count, no, total, in place of what is right."""
    writer = reference.GGUFWriter(str(path), "llama")
    if number == 0:
        for key, value in HYPERPARAMETERS.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"llama.{key}", value)
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(40)])
    for key, value in ({"count": 3, "no": number, "tensors.count": 4} | split).items():
        writer.add_uint16(f"split.{key}", value)
    for tensor, data in tensors.items():
        writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TENSORS: list[dict[str, Any]] = [
    {"token_embd.weight": np.ones((40, 64), np.float32)},
    {"a": np.full(32, 2, np.float32), "b": np.full(32, 3, np.float32)},
    {"c": np.full(32, 4, np.float32)},
]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name(number) for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        write_part(path, number, TENSORS[number])
    return paths


def test_any_part_is_the_whole_model(parts: list[Path]) -> None:
    for part in parts:
        model = read_gguf(part)
        assert model.path == parts[0]
        assert set(model.tensors) == {"token_embd.weight", "a", "b", "c"}
        assert model.tensors["c"].dequantize()[0] == 4
        assert read_metadata(part)["split.no"] == 0
        files = load_model_files(str(part), pull=False)
        assert files.path == parts[0]
        assert files.weights == parts
    key = load_model_files(str(parts[0]), pull=False).key
    os.utime(parts[2], (1, 1))
    assert load_model_files(str(parts[0]), pull=False).key != key


def test_names_of_parts() -> None:
    assert part_names("x.gguf") == ["x.gguf"]
    assert part_names("x-00002-of-00002.gguf") == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    assert part_names("x-2-of-2.gguf") == ["x-2-of-2.gguf"]
    for wrong in ("x-00003-of-00002.gguf", "x-00000-of-00002.gguf", "x-00001-of-00000.gguf"):
        with pytest.raises(ModelFormatError, match="no part of"):
            part_paths(Path(wrong))


def test_a_lone_part_says_what_it_is(parts: list[Path], tmp_path: Path) -> None:
    parts[2].unlink()
    for read in (read_gguf, read_metadata, lambda path: load_model_files(str(path), pull=False)):
        with pytest.raises(ModelFormatError, match=r"is part 2 of 3, and m-00003-of-00003\.gguf is not beside it"):
            read(parts[1])
    alone = parts[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelFormatError, match="is part 2 of 3") as caught:
        read_gguf(alone)
    assert "alone-00002-of-00003.gguf" in str(caught.value.limit)


def test_a_whole_model_may_say_that_it_is_one_part_of_one(tmp_path: Path) -> None:
    for file in ("whole.gguf", "whole-00001-of-00001.gguf"):
        write_part(tmp_path / file, 0, TENSORS[0] | TENSORS[1], count=1)
        assert set(read_gguf(tmp_path / file).tensors) == {"token_embd.weight", "a", "b"}


@pytest.mark.parametrize(
    ("number", "split", "says"),
    [
        (0, {"count": 2}, "split.no 0 of 2 by its header"),
        (1, {"no": 0}, "is part 2 of 3 by its name, and split.no 0 of 3"),
        (1, {"no": 2}, "split.no 2 of 3"),
        (2, {"count": 65535, "no": 65534}, "split.no 65534 of 65535"),
        (0, {"tensors.count": 9}, "the parts have 4 tensors, and split.tensors.count is 9"),
    ],
)
def test_headers_that_lie_are_refused(parts: list[Path], number: int, split: dict[str, int], says: str) -> None:
    write_part(parts[number], number, TENSORS[number], **split)
    with pytest.raises(ModelFormatError, match=says):
        read_gguf(parts[1])


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    write_part(parts[2], 2, {"a": np.zeros(32, np.float32)})
    with pytest.raises(ModelFormatError, match="another part"):
        read_gguf(parts[0])


def test_parts_that_are_links_to_each_other_are_refused(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[1].symlink_to(parts[0])  # the same part twice
    with pytest.raises(ModelFormatError, match=r"split\.no 0 of 3"):
        read_gguf(parts[0])
    parts[1].unlink()
    parts[1].symlink_to(parts[1])  # a link to itself
    with pytest.raises(ModelFormatError):
        read_gguf(parts[0])


def test_links_into_a_cache_keep_their_names(parts: list[Path], tmp_path: Path) -> None:
    """The hub's own cache has links with the names, to files called by their checksums."""
    links = [tmp_path / "cache" / part.name for part in parts]
    links[0].parent.mkdir()
    for number, (part, link) in enumerate(zip(parts, links, strict=True)):
        link.symlink_to(part.rename(tmp_path / f"blob{number}"))
    files = load_model_files(str(links[0]), pull=False)
    assert set(read_gguf(files.path).tensors) == {"token_embd.weight", "a", "b", "c"}


def test_every_truncation_of_a_part_is_refused(parts: list[Path]) -> None:
    whole = parts[1].read_bytes()
    for size in range(0, len(whole), 7):
        parts[1].write_bytes(whole[:size])
        with pytest.raises(ModelFormatError):
            read_gguf(parts[0])
