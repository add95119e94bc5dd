"""Reads a GGUF file: metadata, hyper-parameters, and tensors as memory-mapped bytes.

The parser is our own because the third-party reader takes 2 s on a vocabulary of 49,000 tokens, most of a cold start;
block sizes and dequantisation come from the third-party package. The file is taken for hostile: every length is checked
against the bytes that are left before anything is allocated. The format is described at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.checks import is_number
from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.split import check_part, check_total, part_paths

Value: TypeAlias = str | bool | int | float | tuple[str, ...] | NDArray[Any]
"""A metadata value; arrays of numbers are 1-D numpy arrays (bool arrays are uint8), arrays of strings are tuples."""

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_HINT = "the file is damaged or not a GGUF model; fetch it again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `data` is its encoded bytes, uint8 [nbytes], mapped from the file and valid while referenced.

    `shape` is in numpy order: the last axis is contiguous, so a weight is [outputs, inputs]. `type` is the GGML name,
    as "Q4_1" or "F32". The file must not shrink while tensors are in use (the system would raise SIGBUS).
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = field(repr=False)

    def encoded_rows(self, index: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        """The encoded bytes of some rows, uint8 [rows, row bytes]: a view for a slice."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)[index]

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of `shape`. Raises `UnsupportedModelError` for a type that has no float values."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
        try:
            # A damaged block may hold an infinite scale: that is a value like any other here, not a reason to warn.
            with np.errstate(all="ignore"):
                values = dequantize(rows, GGMLQuantizationType[self.type])
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {self.name!r} has type {self.type}", value=self.type, hint="it cannot be dequantised"
            ) from error
        return np.array(values, dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A parsed file: what every decoder has, all metadata, and the tensors by name.

    Lengths count tokens, sizes count elements. `vocab_size` is the number of rows of the token embedding, which may be
    more than there are tokens. What the layers are, `families.describe` says.
    """

    path: Path
    architecture: str
    name: str
    n_layers: int
    n_embd: int
    vocab_size: int
    context_length: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, or None."""
        value = self.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None


class _Parser:
    """A cursor over the mapped file that refuses to pass its end. `where` names what is being read, for errors."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.size = path, buffer, len(buffer)
        self.pos = 0
        self.where = "header"

    def fail(self, what: str, value: object = None, limit: object = None) -> NoReturn:
        raise ModelFormatError(
            f"{self.path}: {what} in {self.where} at byte {self.pos:,}", value=value, limit=limit, hint=_HINT
        )

    def number(self, code: str) -> Any:
        end = self.pos + struct.calcsize(code)
        if end > self.size:
            self.fail("truncated", self.size, end)
        (value,) = struct.unpack_from(code, self.buffer, self.pos)
        self.pos = end
        return value

    def count(self, code: str, least_bytes: int) -> int:
        """A number of items of at least `least_bytes` each; more than the rest of the file could hold is refused."""
        value: int = self.number(code)
        limit = (self.size - self.pos) // least_bytes
        if value > limit:
            self.fail(f"absurd count {value:,}", value, limit)
        return value

    def strings(self, count: int) -> tuple[str, ...]:
        # The hot loop of a cold start (100,000 strings): plain locals, no method calls.
        buffer, pos, size, out = self.buffer, self.pos, self.size, []
        length_at = partial(struct.Struct("<Q").unpack_from, buffer)
        try:
            for _ in range(count):
                start = pos + 8
                end = start + length_at(pos)[0]
                if end > size:
                    self.pos = pos
                    self.fail("string past the end", end, size)
                out.append(str(buffer[start:end], "utf-8"))
                pos = end
        except (struct.error, UnicodeDecodeError) as error:
            self.pos = pos
            self.fail(f"malformed string ({error})")
        self.pos = pos
        return tuple(out)

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self.fail(f"unknown value type {kind}", kind)
        number = self.number(_SCALARS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self) -> Value:
        kind = self.number("<I")
        if kind == _STRING:
            return self.strings(self.count("<Q", 8))
        if kind not in _SCALARS:
            self.fail(f"array of unknown or nested type {kind}", kind)
        dtype = np.dtype(_SCALARS[kind])
        count = self.count("<Q", dtype.itemsize)
        array = np.frombuffer(self.buffer, dtype, count, self.pos)
        self.pos += array.nbytes
        return array


def read_gguf(path: Path | str) -> GgufModel:
    """Parse the file at `path`, or the files of which it is one part; tensors stay on disk until touched.

    Raises `ModelFormatError` when one is missing, damaged, truncated, of an unknown version or incomplete, and
    `UnsupportedModelError` when it is sound but does not describe a decoder.
    """
    paths = part_paths(Path(path))
    metadata: dict[str, Value] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(paths):
        parser = _Parser(part, _map(part))
        n_tensors = _read_header(parser)
        own = _read_metadata(parser)
        check_part(part, number, len(paths), own)
        metadata = metadata or own
        for name, tensor in _read_tensors(parser, n_tensors, own).items():
            if name in tensors:
                parser.fail("tensor of another part again", name)
            tensors[name] = tensor
    if len(paths) > 1:
        check_total(paths[0], len(tensors), metadata)
    return _describe(paths[0], metadata, tensors)


def read_metadata(path: Path | str) -> Mapping[str, Value]:
    """Only the metadata of the file at `path` (of its first part), whatever its model is.

    Raises `ModelFormatError` as `read_gguf`.
    """
    first = part_paths(Path(path))[0]
    parser = _Parser(first, _map(first))
    _read_header(parser)
    return MappingProxyType(_read_metadata(parser))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise ModelFormatError(f"{path} is too short for a GGUF file", value=file.tell(), limit=24, hint=_HINT)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFormatError(
            f"{path} cannot be read ({error.strerror})", value=str(path), hint="check the path"
        ) from error


def _read_header(parser: _Parser) -> int:
    """Magic and version; leaves the cursor at the number of metadata entries and returns that of tensors."""
    magic = parser.buffer[:4]
    if magic != b"GGUF":
        parser.fail(f"wrong magic {magic!r}", magic, b"GGUF")
    parser.pos = 4
    version = parser.number("<I")
    if version not in _VERSIONS:
        swapped = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        parser.fail(f"unsupported version {version}{swapped}", version, _VERSIONS)
    return parser.count("<Q", 32)  # a tensor takes at least name length 8, rank 4, one axis 8, type 4, offset 8


def _read_metadata(parser: _Parser) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(parser.count("<Q", 13)):  # key length 8, type 4, a value of at least 1
        parser.where = f"metadata entry {index}"
        key = parser.string()
        parser.where = f"metadata {key!r}"
        if key in metadata:
            parser.fail("duplicate key", key)
        metadata[key] = parser.value(parser.number("<I"))
    return metadata


def _read_tensors(parser: _Parser, count: int, metadata: Mapping[str, Value]) -> dict[str, GgufTensor]:
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for index in range(count):
        parser.where = f"tensor {index}"
        name = parser.string()
        parser.where = f"tensor {name!r}"
        n_dims = parser.number("<I")
        if name in entries or not 1 <= n_dims <= _MAX_DIMS:
            parser.fail("duplicate name" if name in entries else f"{n_dims} dimensions", n_dims, _MAX_DIMS)
        dims = [parser.number("<Q") for _ in range(n_dims)]
        kind = parser.number("<I")
        if kind not in sizes:
            parser.fail(f"unknown tensor type {kind}", kind)
        type_name, block, block_bytes = sizes[kind]
        if not all(dims) or dims[0] % block:
            parser.fail(f"shape {dims} of type {type_name}", dims, f"rows of a multiple of {block}")
        nbytes = math.prod(dims) // block * block_bytes
        entries[name] = (type_name, tuple(reversed(dims)), parser.number("<Q"), nbytes)
    alignment = metadata.get("general.alignment", 32)
    parser.where = "general.alignment"
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        parser.fail(f"alignment {alignment!r}", alignment, f"a power of two up to {_MAX_ALIGNMENT}")
    base = -(-parser.pos // alignment) * alignment
    tensors = {}
    for name, (type_name, shape, offset, nbytes) in entries.items():
        parser.where = f"tensor {name!r}"
        if offset % alignment or base + offset + nbytes > parser.size:
            parser.fail("misplaced or truncated data", base + offset + nbytes, parser.size)
        data = np.frombuffer(parser.buffer, np.uint8, nbytes, base + offset)
        tensors[name] = GgufTensor(name, type_name, shape, data)
    return tensors


class _Keys:
    """Typed access to the metadata of one architecture: `key` is without its "llama." or other prefix."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Value]) -> None:
        self.path, self.architecture, self.metadata = path, architecture, metadata

    def get(self, key: str) -> float | int | None:
        """The number under `key`, or None. Of an array (one number a layer) the largest: families read the array."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if isinstance(value, np.ndarray) and value.size:
            value = value.max().item()
        if value is None:
            return None
        if not is_number(value, 0):
            raise ModelFormatError(f"{self.path}: {full} is {value!r}", value=value, limit="a number", hint=_HINT)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModelError(
                f"{self.path}: architecture {self.architecture!r} has no {self.architecture}.{key}",
                value=self.architecture,
                hint="it is not a decoder",
            )
        if not isinstance(value, int) or not 0 < value < 2**31:
            full = f"{self.architecture}.{key}"
            raise ModelFormatError(
                f"{self.path}: {full} is {value!r}", value=value, limit="a whole number, 1 to 2^31", hint=_HINT
            )
        return value


def _describe(path: Path, metadata: dict[str, Value], tensors: dict[str, GgufTensor]) -> GgufModel:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFormatError(f"{path} does not name its architecture", value=architecture, hint=_HINT)
    keys = _Keys(path, architecture, metadata)
    n_embd = keys.positive("embedding_length")
    n_layers = keys.positive("block_count")
    if tensors and n_layers > len(tensors):
        raise ModelFormatError(f"{path}: {n_layers:,} layers", value=n_layers, limit=len(tensors), hint=_HINT)
    name = metadata.get("general.name")
    return GgufModel(
        path=path,
        architecture=architecture,
        name=name if isinstance(name, str) else path.stem,
        n_layers=n_layers,
        n_embd=n_embd,
        vocab_size=_vocab_size(keys, tensors, n_embd),
        context_length=keys.positive("context_length"),
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(tensors),
    )


def _vocab_size(keys: _Keys, tensors: Mapping[str, GgufTensor], n_embd: int) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        if len(embedding.shape) != 2 or embedding.shape[1] != n_embd:
            raise ModelFormatError(
                f"{keys.path}: token_embd.weight has shape {embedding.shape}",
                value=embedding.shape,
                limit=f"[vocabulary, {n_embd}]",
                hint=_HINT,
            )
        return embedding.shape[0]
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return keys.positive("vocab_size", len(tokens) if isinstance(tokens, tuple) else None)
