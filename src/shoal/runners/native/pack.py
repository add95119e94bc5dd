"""GGUF tensors to the layouts that the kernels read, once; kept in the cache directory as one file.

The file is JSON in a header, then the tensors, each on a boundary of 64 bytes. `csrc/kernels.h` draws the layouts.
Every weight keeps its exact value: codes are moved, and scales that nest stay nested. Header and data have a hash each
(of the data, one a piece), and loading checks all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, StoreError, UnsupportedModelError
from shoal.models.decoder import Weight
from shoal.models.files import Progress
from shoal.runners.native.core import load_core
from shoal.runners.native.grid import GRIDS, grid_blocks

LAYOUT_VERSION = 7
STRIP, ALIGN = 32, 64
_MAGIC = b"shoalpk2"
_FRONT = struct.Struct("<8sQQ")  # magic, where the data begins, hash of the JSON between
_PIECE = 4 << 20  # bytes of the packed file that one thread makes at a time
_STALE_S = 3600.0  # a file half written that nobody has touched for so long is nobody's

# Members of `Codes` and `Scales` in kernels.h.
_TABLE, _F16, _BF16, _F32 = 12, 16, 17, 18
_DENSE, _HALF, _HALF_MIN, _SIX, _BYTE, _BYTE16, _NIBBLES, _POWER = range(8)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values


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
class PackedTensor:
    """A tensor of the packed file: `weight` as a matrix of `shape` [n, k], or as a vector of `shape` [n].

    `turned`: a vector made of [channels, taps] is stored as [taps, channels]. `by`: a vector is multiplied by these.
    """

    name: str
    shape: tuple[int, ...]
    weight: Weight | Ones
    turned: bool = False
    by: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def type(self) -> str:
        """The GGML type."""
        return self.weight.type

    def encoded_rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of some rows of a matrix, uint8 [rows, bytes of a row]; no more of the file is read."""
        assert isinstance(self.weight, Weight)
        return self.weight.encoded_rows(first, count)

    def values(self) -> NDArray[np.float32]:
        """The numbers of a vector."""
        values = self.weight.values()
        flat = (values.T if self.turned else values).reshape(-1)
        return flat if self.by is None else flat * self.by


@dataclass(frozen=True, slots=True)
class Form:
    """How weights of one GGML type are packed: see `Matrix` in kernels.h. `table` is without the offset."""

    codes: int
    scales: int
    offset_log2: int = -1
    unit_log2: int = 0
    table: tuple[int, ...] = ()

    @property
    def block(self) -> int:
        """Rows are a multiple of so many weights."""
        return 256 if self.scales in (_SIX, _BYTE, _BYTE16, _NIBBLES) else 32


FORMS = {
    "Q4_0": Form(4, _HALF, 3),
    "Q4_1": Form(4, _HALF_MIN),
    "Q5_0": Form(5, _HALF, 4),
    "Q5_1": Form(5, _HALF_MIN),
    "Q8_0": Form(8, _HALF, 7),
    "Q2_K": Form(2, _NIBBLES),
    "Q3_K": Form(3, _BYTE16, 2),
    "Q4_K": Form(4, _SIX),
    "Q5_K": Form(5, _SIX),
    "Q6_K": Form(6, _BYTE16, 5),
    "IQ4_NL": Form(_TABLE, _HALF, 7, table=_IQ4),
    "IQ4_XS": Form(_TABLE, _BYTE, 7, table=_IQ4),
    "MXFP4": Form(_TABLE, _POWER, 7, table=_FP4),
    **{kind: Form(_TABLE, _BYTE16, 7, grid.unit_log2, grid.table) for kind, grid in GRIDS.items()},
    "F16": Form(_F16, _DENSE),
    "BF16": Form(_BF16, _DENSE),
    "F32": Form(_F32, _DENSE),
}


FACTS: dict[str, type] = {
    **dict.fromkeys(("name", "architecture"), str),
    **dict.fromkeys(("embd", "vocab", "context"), int),
    **dict.fromkeys(("embedding_scale", "logit_scale", "cap"), float),
    **dict.fromkeys(("norm", "inputs"), dict),
    **dict.fromkeys(("rotaries", "layers"), list),
}
"""What a packed file says of its model beside the tensors (`describe.facts_of`); the extension checks the rest."""
_TYPES: dict[str, type] = {"str": str, "int": int, "list[int]": list}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the packed file, as the extension takes it. `codes` 0 is a vector of n float32."""

    name: str
    offset: int
    n: int
    k: int
    codes: int
    scales: int
    offset_log2: int
    unit_log2: int
    table: list[int]


def entry_of(part: PackedTensor, offset: int) -> tuple[Entry, int]:
    """Where a tensor goes and how many bytes it takes. `UnsupportedModelError` for a type without a kernel."""
    if len(part.shape) == 1:
        n = part.shape[0] if not part.name.endswith(".bias") else -(-part.shape[0] // STRIP) * STRIP
        return Entry(part.name, offset, n, 0, 0, 0, -1, 0, []), n * 4
    form = FORMS.get(part.type)
    if form is None or len(part.shape) != 2 or part.shape[1] % form.block:
        raise UnsupportedModelError(
            f"tensor {part.name!r} of type {part.type} and shape {part.shape}", value=part.type, limit=tuple(FORMS)
        )
    table = [value + (1 << form.offset_log2) for value in form.table]
    entry = Entry(part.name, offset, *part.shape, form.codes, form.scales, form.offset_log2, form.unit_log2, table)
    size, strips = load_core().strips_of(asdict(entry))
    return entry, size * strips


class _Piece(NamedTuple):
    """A range of the packed file: a vector, or strips first .. first + strips - 1 of a tensor; zeros up to `end`."""

    part: PackedTensor
    entry: Entry
    first: int
    strips: int
    start: int
    end: int


def _pieces(part: PackedTensor, entry: Entry, size: int) -> Iterator[_Piece]:
    end = entry.offset + -(-size // ALIGN) * ALIGN
    if entry.codes == 0:
        yield _Piece(part, entry, 0, 0, entry.offset, end)
        return
    strip, strips = load_core().strips_of(asdict(entry))
    step = max(_PIECE // strip, 1)
    for first in range(0, strips, step):
        count, at = min(step, strips - first), entry.offset + first * strip
        yield _Piece(part, entry, first, count, at, end if first + count == strips else at + count * strip)


def _fill(piece: _Piece, out: NDArray[np.uint8]) -> None:
    """Make the bytes of a piece in `out`, which is as long as it is."""
    part, entry, first = piece.part, piece.entry, piece.first
    if entry.codes == 0:
        values = part.values().astype("<f4").view(np.uint8)
        out[: len(values)] = values
        out[len(values) :] = 0
        return
    core = load_core()
    packed, kind = out[: piece.strips * core.strips_of(asdict(entry))[0]], part.type
    rows = part.encoded_rows(first * STRIP, piece.strips * STRIP)
    form = asdict(replace(entry, n=len(rows)))
    out[len(packed) :] = 0
    if kind in GRIDS:  # its rows become blocks of another type first
        kind, rows = "GRID", grid_blocks(kind, rows)
    core.pack(form, kind, np.ascontiguousarray(rows).reshape(-1), packed)


def packed_bytes(part: PackedTensor) -> NDArray[np.uint8]:
    """The packed bytes of one matrix."""
    entry, size = entry_of(part, 0)
    out = np.empty(size, np.uint8)
    for piece in _pieces(part, entry, size):
        _fill(piece, out[piece.start : piece.end])
    return out


def write_packed(
    path: Path, facts: dict[str, Any], tensors: list[PackedTensor], progress: Progress | None = None
) -> None:
    """Pack tensors into the file at `path`, whole or not at all; `progress` hears of it after every piece.

    `StoreError` when the disk will not have it.
    """
    entries, pieces, offset = [], list[_Piece](), 0
    for tensor in tensors:
        entry, size = entry_of(tensor, offset)
        entries.append(entry)
        pieces += _pieces(tensor, entry, size)
        offset = pieces[-1].end
    header = {"layout": LAYOUT_VERSION, "facts": facts, "tensors": [asdict(e) for e in entries]}
    start = len(_front(header, [(p.end - p.start, 2**64 - 1) for p in pieces], 0))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                hashes = _write_pieces(file.fileno(), pieces, start, progress)
                file.write(_front(header, [(p.end - p.start, h) for p, h in zip(pieces, hashes, strict=True)], start))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror})", value=str(path), hint="free some disk space"
        ) from error


def _sweep(path: Path) -> None:
    """Remove what writers of this file left that were killed."""
    for left in path.parent.glob(f"{path.name}*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()


def _front(header: dict[str, Any], pieces: Iterable[tuple[int, int]], start: int) -> bytes:
    """The file up to its data, padded to `start` bytes or, when that is 0, to a boundary."""
    text = json.dumps({**header, "pieces": list(pieces)}).encode()
    start = start or -(-(len(text) + _FRONT.size) // ALIGN) * ALIGN
    text = text.ljust(start - _FRONT.size)
    return _FRONT.pack(_MAGIC, start, load_core().hash(np.frombuffer(text, np.uint8))) + text


def _write_pieces(descriptor: int, pieces: list[_Piece], start: int, progress: Progress | None) -> list[int]:
    """Make and write all pieces on the threads there are; returns their hashes. What it holds are some buffers."""
    local, core = threading.local(), load_core()
    most = max((p.end - p.start for p in pieces), default=0)

    def one(piece: _Piece) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = np.empty(most, np.uint8)
        out = local.buffer[: piece.end - piece.start]
        _fill(piece, out)
        return int(core.write(descriptor, out, start + piece.start))

    hashes = []
    with ThreadPoolExecutor(core.cpus()) as pool:
        for piece, digest in zip(pieces, pool.map(one, pieces), strict=True):
            hashes.append(digest)
            if progress is not None:
                progress("pack", piece.end, pieces[-1].end)
    return hashes


class Packed(NamedTuple):
    """A packed file's header. Offsets count from the start of the file; the pieces, (bytes, hash), begin at `start`."""

    facts: dict[str, Any]
    tensors: list[dict[str, Any]]
    start: int
    pieces: list[tuple[int, int]]


def _check_types(rows: list[dict[str, Any]], types: dict[str, type]) -> None:
    """ValueError unless each row has exactly these fields, numbers in the range that the extension takes."""
    for row in rows:
        for name in types.keys() | row.keys():
            value = row[name]
            if not isinstance(value, types[name]) or (
                isinstance(value, int) and not -16 <= value < (2**62 if name == "offset" else 2**31)
            ):
                raise ValueError(f"{name} is {value!r}")


def read_header(path: Path) -> Packed:
    """The header of a packed file, checked against its hash.

    `ModelFormatError` when it is none, of another version, or not whole: it should then be written again.
    """
    try:
        with path.open("rb") as file:
            magic, start, digest = _FRONT.unpack(file.read(_FRONT.size))
            size = file.seek(0, os.SEEK_END)
            if magic != _MAGIC or not _FRONT.size < start <= min(size, 1 << 28):
                raise ValueError("not a packed model")
            file.seek(_FRONT.size)
            text = file.read(start - _FRONT.size)
        if load_core().hash(np.frombuffer(text, np.uint8)) != digest:
            raise ValueError("a damaged header")
        header = json.loads(text)
        pieces = [(int(length), int(value)) for length, value in header["pieces"]]
        if header["layout"] != LAYOUT_VERSION or start + sum(length for length, _ in pieces) != size:
            raise ValueError("another version, or cut short")
        facts, entries = header["facts"], [asdict(Entry(**e)) for e in header["tensors"]]
        _check_types([facts], FACTS)
        _check_types(entries, {f.name: _TYPES[str(f.type)] for f in fields(Entry)})
        return Packed(facts, [{**e, "offset": e["offset"] + start} for e in entries], start, pieces)
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"{path}: {error}", value=str(path), hint="delete it; it is made anew from the GGUF"
        ) from error
