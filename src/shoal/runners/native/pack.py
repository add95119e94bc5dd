"""GGUF tensors to the layouts that the kernels read, once; kept in the cache directory as one file.

The file is JSON in a header of fixed size, then the tensors, each on a boundary of 64 bytes. `csrc/kernels.h` draws the
layouts. Every weight keeps its exact value: codes are moved, scales are multiplied out where a K-quant nests them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, StoreError, UnsupportedModelError
from shoal.models.decoder import Weight

LAYOUT_VERSION = 4
STRIP, ALIGN = 32, 64
_MAGIC = b"shoalpk1"
_FOUR = np.uint8(4)  # shifts by a Python int widen the type
_SLAB_WEIGHTS = 1 << 21  # packed at a time: what it needs beside the file is some ten bytes a weight

Codes: TypeAlias = NDArray[np.uint8]
Scales: TypeAlias = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ones:
    """The weight of a norm that has none."""

    shape: tuple[int, ...]
    name = "no weight"
    type = "F32"

    def values(self) -> NDArray[np.float32]:
        """A fresh array."""
        return np.ones(self.shape, np.float32)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the packed file: `weight` as a matrix of `shape` [n, k], or as a vector of `shape` [n].

    `turned`: a vector made of [channels, taps] is stored as [taps, channels].
    """

    name: str
    shape: tuple[int, ...]
    weight: Weight | Ones
    turned: bool = False

    @property
    def type(self) -> str:
        """The GGML type."""
        return self.weight.type

    def encoded(self) -> NDArray[np.uint8]:
        """The bytes of a matrix, uint8 [n, bytes of a row]: a view of the file, or a copy where its rows are picked."""
        assert isinstance(self.weight, Weight)
        return self.weight.encoded().reshape(self.shape[0], -1)

    def values(self) -> NDArray[np.float32]:
        """The numbers of a vector."""
        values = self.weight.values()
        return (values.T if self.turned else values).reshape(-1)


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows of a weight taken apart: `codes` [n, k], `d` and `m` [n, k / group]; a weight is d * (code - offset) + m."""

    codes: Codes
    d: Scales
    m: Scales | None


@dataclass(frozen=True, slots=True)
class Form:
    """How weights of one GGML type are packed. `codes` is bits a code: 4 or 8; 16 is f16, 17 bf16, 18 float32."""

    codes: int
    block_bytes: int
    block: int
    take: Callable[[NDArray[np.uint8]], Parts] | None
    has_min: bool = False
    wide_scales: bool = False
    group: int = 32
    offset_log2: int = -1

    def strip_bytes(self, k: int) -> int:
        """Bytes of 32 outputs by k inputs."""
        if self.take is None:
            return k * STRIP * self.block_bytes
        scales = k // self.group * STRIP * (4 if self.wide_scales else 2)
        return k * STRIP * self.codes // 8 + scales * (2 if self.has_min else 1)


def _f16(raw: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(raw: NDArray[np.uint8]) -> Codes:
    """[..., b] bytes to [..., 2b] codes: all low nibbles, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _rows(codes: Codes) -> Codes:
    return codes.reshape(len(codes), -1)


def _q4_0(raw: NDArray[np.uint8]) -> Parts:
    return Parts(_rows(_nibbles(raw[..., 2:])), _f16(raw, 0), None)


def _q4_1(raw: NDArray[np.uint8]) -> Parts:
    return Parts(_rows(_nibbles(raw[..., 4:])), _f16(raw, 0), _f16(raw, 2))


def _fifth_bits(raw: NDArray[np.uint8]) -> Codes:
    return np.left_shift(np.unpackbits(raw, axis=-1, bitorder="little"), _FOUR)


def _q5_0(raw: NDArray[np.uint8]) -> Parts:
    return Parts(_rows(_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])), _f16(raw, 0), None)


def _q5_1(raw: NDArray[np.uint8]) -> Parts:
    return Parts(_rows(_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])), _f16(raw, 0), _f16(raw, 2))


def _q8_0(raw: NDArray[np.uint8]) -> Parts:
    return Parts(_rows(raw[..., 2:] ^ np.uint8(0x80)), _f16(raw, 0), None)


def _k_scales(raw: NDArray[np.uint8], at: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The eight 6-bit scales and eight 6-bit minima that Q4_K and Q5_K keep in 12 bytes: [..., 8] each."""
    low, high, rest = raw[..., at : at + 4], raw[..., at + 4 : at + 8], raw[..., at + 8 : at + 12]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << _FOUR], axis=-1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << _FOUR], axis=-1)
    return scales, minima


def _k_parts(raw: NDArray[np.uint8], codes: Codes) -> Parts:
    scales, minima = _k_scales(raw, 4)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        d = _f16(raw, 0).astype(np.float32)[..., None] * scales
        m = -(_f16(raw, 2).astype(np.float32)[..., None] * minima)
    return Parts(_rows(codes), d.reshape(len(raw), -1), m.reshape(len(raw), -1))


def _q4_k(raw: NDArray[np.uint8]) -> Parts:
    quants = raw[..., 16:].reshape(*raw.shape[:-1], 4, 32)  # of every 64 weights the first 32 are low nibbles
    return _k_parts(raw, _nibbles(quants))


def _q5_k(raw: NDArray[np.uint8]) -> Parts:
    quants = raw[..., 48:].reshape(*raw.shape[:-1], 4, 32)
    bits = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # bit j: of the j-th 32 weights
    bits = np.left_shift(bits, _FOUR)
    return _k_parts(raw, _nibbles(quants).reshape(*raw.shape[:-1], 8, 32) | bits)


def _q6_k(raw: NDArray[np.uint8]) -> Parts:
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 2, 32)  # halves of 128 weights; the first and second 32 bytes
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    upper = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << _FOUR
    codes = np.concatenate([low & 15, low >> 4], axis=-2) | upper
    with np.errstate(all="ignore"):
        d = _f16(raw, 208).astype(np.float32)[..., None] * raw[..., 192:208].view(np.int8)
    return Parts(_rows(codes), d.reshape(len(raw), -1), None)


FORMS = {
    "Q4_0": Form(4, 18, 32, _q4_0, offset_log2=3),
    "Q4_1": Form(4, 20, 32, _q4_1, has_min=True),
    "Q5_0": Form(8, 22, 32, _q5_0, offset_log2=4),
    "Q5_1": Form(8, 24, 32, _q5_1, has_min=True),
    "Q8_0": Form(8, 34, 32, _q8_0, offset_log2=7),
    "Q4_K": Form(4, 144, 256, _q4_k, has_min=True, wide_scales=True),
    "Q5_K": Form(8, 176, 256, _q5_k, has_min=True, wide_scales=True),
    "Q6_K": Form(8, 210, 256, _q6_k, wide_scales=True, group=16, offset_log2=5),
    "F16": Form(16, 2, 1, None),
    "BF16": Form(17, 2, 1, None),
    "F32": Form(18, 4, 1, None),
}


def _pad(array: NDArray[Any]) -> NDArray[Any]:
    """Rows of zeros up to a whole number of strips."""
    short = -len(array) % STRIP
    return np.pad(array, [(0, short)] + [(0, 0)] * (array.ndim - 1)) if short else array


def _interleave(codes: Codes, bits: int) -> Codes:
    """[n, k] codes to [n / 32, k / 32, bytes], the bytes being those of both halves of a group."""
    n, k = codes.shape
    quads = codes.reshape(n // STRIP, 2, 16, k // 32, 8, 4)  # [strip, half, output, group, quad of inputs, input]
    quads = quads.transpose(0, 3, 1, 4, 2, 5)
    if bits == 4:
        quads = quads[:, :, :, 0::2] | quads[:, :, :, 1::2] << _FOUR
    return np.ascontiguousarray(quads).reshape(n // STRIP, k // 32, -1)


def _by_strip(values: NDArray[Any], groups: int) -> NDArray[np.uint8]:
    """[n, columns] values to [n / 32, groups, bytes], the 32 outputs of a strip side by side."""
    strips = len(values) // STRIP
    turned = values.reshape(strips, STRIP, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(strips, groups, -1)


def packed_slabs(part: Part) -> Iterator[NDArray[np.uint8]]:
    """The packed bytes of a weight [n, k], a slab of strips at a time."""
    form, (n, k) = FORMS[part.type], part.shape
    raw = part.encoded().reshape(n, k // form.block, form.block_bytes)
    step = max(_SLAB_WEIGHTS // k // STRIP, 1) * STRIP
    for first in range(0, n, step):
        rows = raw[first : first + step]
        if form.take is None:
            words = np.uint32 if form.block_bytes == 4 else np.uint16
            yield _by_strip(_pad(np.ascontiguousarray(rows).view(words).reshape(len(rows), k)), 1)
            continue
        parts = form.take(rows)
        columns = [_interleave(_pad(parts.codes), form.codes), _by_strip(_pad(parts.d), k // 32)]
        if parts.m is not None:
            columns.append(_by_strip(_pad(parts.m), k // 32))
        yield np.concatenate(columns, axis=-1)


FACTS: dict[str, type] = {
    **dict.fromkeys(("name", "architecture"), str),
    **dict.fromkeys(("embd", "vocab", "context"), int),
    **dict.fromkeys(("embedding_scale", "logit_scale", "cap"), float),
    "norm": dict,
    **dict.fromkeys(("rotaries", "layers"), list),
}
"""What a packed file says of its model beside the tensors (`describe.facts_of`); the extension checks the rest."""
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the packed file, as the extension takes it. `codes` 0 is a vector of n float32."""

    name: str
    offset: int
    n: int
    k: int
    codes: int
    group: int
    offset_log2: int
    has_min: bool
    wide_scales: bool


def entry_of(tensor: Part, offset: int) -> tuple[Entry, int]:
    """Where a tensor goes and how many bytes it takes. `UnsupportedModelError` for a type without a kernel."""
    if len(tensor.shape) == 1:
        n = tensor.shape[0] if not tensor.name.endswith(".bias") else -(-tensor.shape[0] // STRIP) * STRIP
        return Entry(tensor.name, offset, n, 0, 0, 32, -1, False, False), n * 4
    form = FORMS.get(tensor.type)
    if form is None or len(tensor.shape) != 2 or tensor.shape[1] % 32:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} of type {tensor.type} and shape {tensor.shape}",
            value=tensor.type,
            limit=tuple(FORMS),
        )
    n, k = tensor.shape
    size = -(-n // STRIP) * form.strip_bytes(k)
    return Entry(
        tensor.name, offset, n, k, form.codes, form.group, form.offset_log2, form.has_min, form.wide_scales
    ), size


def write_packed(path: Path, facts: dict[str, Any], tensors: list[Part]) -> None:
    """Pack tensors into the file at `path`, whole or not at all. `StoreError` when the disk will not have it."""
    entries, offset = [], 0
    for tensor in tensors:
        entry, size = entry_of(tensor, offset)
        entries.append(entry)
        offset += -(-size // ALIGN) * ALIGN
    header = {"layout": LAYOUT_VERSION, "facts": facts, "bytes": offset, "tensors": [asdict(e) for e in entries]}
    text = json.dumps(header).encode()
    start = -(-(len(text) + 16) // ALIGN) * ALIGN
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + struct.pack("<Q", start) + text.ljust(start - 16))
                for tensor, entry in zip(tensors, entries, strict=True):
                    file.seek(start + entry.offset)
                    _write_tensor(file, tensor, entry)
                file.truncate(start + offset)
            Path(name).replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror})", value=str(path), hint="free some disk space"
        ) from error


def _write_tensor(file: BinaryIO, tensor: Part, entry: Entry) -> None:
    if entry.codes == 0:
        values = tensor.values()
        file.write(np.pad(values, (0, entry.n - len(values))).astype("<f4").tobytes())
        return
    for slab in packed_slabs(tensor):
        file.write(slab.data)


def _check_types(rows: list[dict[str, Any]], types: dict[str, type]) -> None:
    """ValueError unless each row has exactly these fields, numbers in the range that the extension takes."""
    for row in rows:
        for name in types.keys() | row.keys():
            value = row[name]
            if not isinstance(value, types[name]) or (
                isinstance(value, int) and not -1 <= value < (2**62 if name == "offset" else 2**31)
            ):
                raise ValueError(f"{name} is {value!r}")


def read_header(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts and tensors (offsets counted from the start of the file) of a packed file.

    `ModelFormatError` when it is none, of another version, or not whole: it should then be written again.
    """
    try:
        with path.open("rb") as file:
            magic, start = struct.unpack("<8sQ", file.read(16))
            size = file.seek(0, os.SEEK_END)
            if magic != _MAGIC or start > min(size, 1 << 26):
                raise ValueError("not a packed model")
            file.seek(16)
            header = json.loads(file.read(start - 16))
        if header["layout"] != LAYOUT_VERSION or start + header["bytes"] != size:
            raise ValueError("another version, or cut short")
        facts, entries = header["facts"], [asdict(Entry(**e)) for e in header["tensors"]]
        _check_types([facts], FACTS)
        _check_types(entries, {f.name: _TYPES[str(f.type)] for f in fields(Entry)})
        return facts, [{**e, "offset": e["offset"] + start} for e in entries]
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"{path}: {error}", value=str(path), hint="delete it; it is made anew from the GGUF"
        ) from error
