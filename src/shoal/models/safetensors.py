"""Reads a directory as the hub has it: `config.json` and weights in one or more .safetensors files.

The `safetensors` library checks each file; its numbers of types that numpy lacks (bfloat16) are taken from the mapped
file. Nothing is read before it is used.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from shoal.errors import ModelFormatError, UnsupportedModelError

Rows: TypeAlias = slice | NDArray[np.intp]

_HINT = "the directory is damaged or incomplete; fetch it again"
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "I32": 4, "I64": 8, "F64": 8}
_QUANTISED = ("mxfp4",)
"""Values of config.json's quantization_config that are read; every other is refused by its name."""


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor: `data` is its bytes, mapped from the file. `type` is "BF16", "F16", "F32", or not a weight's."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = field(repr=False)

    def encoded_rows(self, index: Rows) -> NDArray[np.uint8]:
        """The bytes of some rows, uint8 [rows, row bytes]: a view for a slice."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)[index]

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of `shape`. Raises `UnsupportedModelError` for other types than those three."""
        if self.type == "BF16":
            wide = self.data.view("<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        if self.type not in ("F16", "F32"):
            raise UnsupportedModelError(
                f"tensor {self.name!r} has type {self.type}", value=self.type, limit="BF16, F16, F32", hint="not read"
            )
        return self.data.view("<f2" if self.type == "F16" else "<f4").astype(np.float32).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices of experts that the file holds one by one, as one tensor [experts, outputs, inputs]."""

    name: str
    parts: tuple[SafetensorsTensor, ...] = field(repr=False)

    @property
    def type(self) -> str:
        """The type of each part."""
        return self.parts[0].type

    @property
    def shape(self) -> tuple[int, ...]:
        """[parts, ...]."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def data(self) -> NDArray[np.uint8]:
        """A copy: the parts lie apart in the file."""
        return np.concatenate([part.data for part in self.parts])

    def encoded_rows(self, index: Rows) -> NDArray[np.uint8]:
        """A copy of some rows, uint8 [rows, row bytes]; parts without any are not read."""
        each = math.prod(self.parts[0].shape[:-1])
        part, row = np.divmod(np.arange(each * len(self.parts))[index], each)
        out = np.empty((len(row), self.parts[0].data.nbytes // each), np.uint8)
        for number in np.unique(part):
            here = part == number
            out[here] = self.parts[number].encoded_rows(row[here])
        return out

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of `shape`."""
        return np.stack([part.dequantize() for part in self.parts])


@dataclass(frozen=True, slots=True)
class Transposed:
    """A tensor that the file holds as [.., inputs, outputs], as [.., outputs, inputs]."""

    name: str
    stored: SafetensorsTensor = field(repr=False)

    @property
    def type(self) -> str:
        """The stored tensor's."""
        return self.stored.type

    @property
    def shape(self) -> tuple[int, ...]:
        """With the last two axes changed over."""
        *outer, inputs, outputs = self.stored.shape
        return (*outer, outputs, inputs)

    @property
    def data(self) -> NDArray[np.uint8]:
        """A copy."""
        width = _BYTES[self.type]
        cells = self.stored.data.reshape(*self.stored.shape, width)
        return np.ascontiguousarray(cells.swapaxes(-2, -3)).reshape(-1)

    def encoded_rows(self, index: Rows) -> NDArray[np.uint8]:
        """A copy of some rows, uint8 [rows, row bytes]; matrices without any are not read."""
        *outer, inputs, outputs = self.stored.shape
        width = _BYTES[self.type]
        matrix, row = np.divmod(np.arange(math.prod(outer) * outputs)[index], outputs)
        cells = self.stored.data.reshape(-1, inputs, outputs, width)
        out = np.empty((len(row), inputs, width), np.uint8)
        for number in np.unique(matrix):
            here = matrix == number
            out[here] = cells[number][:, row[here]].swapaxes(0, 1)
        return out.reshape(len(row), -1)

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of `shape`."""
        return np.ascontiguousarray(self.stored.dequantize().swapaxes(-1, -2))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss's experts: `blocks` [.., outputs, groups, 16] of two codes a byte, `scales` [.., outputs, groups].

    As GGML's MXFP4: groups of 32 with their scale's byte before them, codes 0-15 in the low halves.
    """

    name: str
    blocks: SafetensorsTensor = field(repr=False)
    scales: SafetensorsTensor = field(repr=False)
    type: str = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., outputs, inputs]."""
        *outer, groups, _ = self.blocks.shape
        return (*outer, groups * 32)

    @property
    def data(self) -> NDArray[np.uint8]:
        """A copy, in GGML's order."""
        return self.encoded_rows(slice(None)).reshape(-1)

    def encoded_rows(self, index: Rows) -> NDArray[np.uint8]:
        """A copy of some rows, uint8 [rows, row bytes], in GGML's order."""
        groups = self.blocks.shape[-2]
        pairs = self.blocks.data.reshape(-1, groups * 16)[index].reshape(-1, 16)
        scales = self.scales.data.reshape(-1, groups)[index].reshape(-1, 1)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 32)  # in the order of the elements
        return np.concatenate([scales, codes[:, :16] | codes[:, 16:] << 4], axis=1).reshape(-1, groups * 17)

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of `shape`."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
        values = dequantize(rows, GGMLQuantizationType.MXFP4)
        return np.array(values, dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsModel:
    """A parsed directory. `config` is config.json with the part for text (`text_config`) laid over it.

    `kinds` are the values of model_type to look a family up by, the text part's first.
    """

    path: Path
    name: str
    kinds: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, SafetensorsTensor] = field(repr=False)


def read_safetensors(path: Path | str) -> SafetensorsModel:
    """The model in the directory `path`; its tensors stay on disk until touched.

    Raises `ModelFormatError` when a file is missing or damaged, `UnsupportedModelError` for weights quantised in a way
    that is not read here.
    """
    path = Path(path)
    whole = _json(path / "config.json")
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, dict) else whole
    kinds = tuple(kind for kind in (config.get("model_type"), whole.get("model_type")) if isinstance(kind, str))
    _check_quantisation(path, config)
    tensors: dict[str, SafetensorsTensor] = {}
    for shard in _shards(path):
        tensors.update(_open(shard))
    return SafetensorsModel(path, path.name, kinds, MappingProxyType(config), MappingProxyType(tensors))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read ({error})", value=str(path), hint=_HINT) from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is no JSON object", value=str(path), hint=_HINT)
    return value


def _check_quantisation(path: Path, config: Mapping[str, Any]) -> None:
    how = config.get("quantization_config") or config.get("quantization")
    kind = how.get("quant_method", "mlx") if isinstance(how, dict) else how
    if kind and kind not in _QUANTISED:
        raise UnsupportedModelError(
            f"{path}: weights quantised by {kind!r}",
            value=kind,
            limit=_QUANTISED,
            hint="take the model's BF16 weights, or a GGUF file of it",
        )


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _json(index).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ModelFormatError(f"{index} lists no files", value=str(index), hint=_HINT)
        shards = [path / name for name in names]
    else:
        single = path / "model.safetensors"
        shards = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ModelFormatError(f"{path} lacks {', '.join(missing) or 'weights'}", value=missing, hint=_HINT)
    return shards


def _open(path: Path) -> dict[str, SafetensorsTensor]:
    """The library checks the header, and that the tensors fill the file without holes: so sizes give positions."""
    try:
        with safe_open(path, "np") as file:
            entries = [(name, file.get_slice(name)) for name in file.offset_keys()]
            about = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in entries]
        with path.open("rb") as raw:
            buffer = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read ({error})", value=str(path), hint=_HINT) from error
    unknown = sorted({kind for _, kind, _ in about} - set(_BYTES))
    if unknown:
        raise UnsupportedModelError(f"{path}: tensors of type {unknown[0]}", value=unknown, hint="not read")
    sizes = [math.prod(shape) * _BYTES[kind] for _, kind, shape in about]
    begin, tensors = len(buffer) - sum(sizes), {}
    for (name, kind, shape), size in zip(about, sizes, strict=True):
        tensors[name] = SafetensorsTensor(name, kind, shape, np.frombuffer(buffer, np.uint8, size, begin))
        begin += size
    return tensors
