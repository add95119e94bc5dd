"""Types whose weights are looked up in grids of eight or four (IQ1, IQ2, IQ3), as codes of 4 bits into a table of 16.

Each such weight is d * sc * unit * v: d of 256 weights, sc an odd number below 32 of 16 weights, v one of at most 16
whole numbers. The grids themselves are the `gguf` package's: it gives the values of a block whose d is one, and v is
what is left of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[np.uint8]
_ONE = 0x3C00  # 1.0 in f16


def _symmetric(*values: int) -> tuple[int, ...]:
    """These values and their negatives, rising, the largest again up to sixteen."""
    found = sorted({sign * value for value in values for sign in (1, -1)})
    return tuple(found + [found[-1]] * (16 - len(found)))


def _words(raw: Raw, at: int, end: int, kind: type) -> NDArray[np.int64]:
    return np.ascontiguousarray(raw[:, at:end]).view(kind).astype(np.int64)


def _nibbles(raw: Raw, at: int, end: int) -> NDArray[np.int64]:
    """[blocks, 16]: the low and the high half of each byte."""
    return np.stack([raw[:, at:end] & 15, raw[:, at:end] >> 4], -1).reshape(len(raw), -1).astype(np.int64)


def _top_bits(at: int, step: int) -> Callable[[Raw], NDArray[np.int64]]:
    """The upper four bits of eight words of 32 bits, every `step` bytes, each for two halves."""
    return lambda raw: np.repeat(_words(raw, at, at + 8 * step, np.uint32)[:, step // 4 - 1 :: step // 4] >> 28, 2, 1)


def _iq1_s(raw: Raw) -> NDArray[np.int64]:
    return np.repeat(_words(raw, 34, 50, np.uint16) >> 12 & 7, 2, 1)


def _iq1_m(raw: Raw) -> NDArray[np.int64]:
    words = _words(raw, 48, 56, np.uint16)[..., None]
    scales: NDArray[np.int64] = words >> np.array([0, 3, 6, 9]) & 7
    return scales.reshape(len(raw), -1)


@dataclass(frozen=True, slots=True)
class Grid:
    """A type: `scale` gives s of the 16 parts of each block [blocks, bytes], where sc = 2 s + 1."""

    block_bytes: int
    unit_log2: int
    table: tuple[int, ...]
    scale: Callable[[Raw], NDArray[np.int64]]


_TWO, _THREE, _ODD = _symmetric(8, 25, 43), _symmetric(4, 12, 20, 28, 36, 44, 52, 62), _symmetric(*range(1, 16, 2))
_DELTA = _symmetric(1, 7, 9)  # eight times -1, 0 or 1, and one more or less
GRIDS = {
    "IQ1_S": Grid(50, -3, _DELTA, _iq1_s),
    "IQ1_M": Grid(56, -3, _DELTA, _iq1_m),
    "IQ2_XXS": Grid(66, -3, _TWO, _top_bits(2, 8)),
    "IQ2_XS": Grid(74, -3, _TWO, lambda raw: _nibbles(raw, 66, 74)),
    "IQ2_S": Grid(82, -3, _TWO, lambda raw: _nibbles(raw, 74, 82)),
    "IQ3_XXS": Grid(98, -2, _THREE, _top_bits(66, 4)),
    "IQ3_S": Grid(110, 0, _ODD, lambda raw: np.repeat(_nibbles(raw, 106, 110), 2, 1)),
}


def _with_d_of_one(kind: str, raw: Raw) -> tuple[Raw, NDArray[np.uint16]]:
    """The blocks with d = 1, and the d they had."""
    raw = raw.copy()
    if kind != "IQ1_M":
        d = np.ascontiguousarray(raw[:, :2]).view(np.uint16)[:, 0]
        raw[:, :2] = np.array([_ONE], np.uint16).view(np.uint8)
        return raw, d
    words = np.ascontiguousarray(raw[:, 48:56]).view(np.uint16)  # four bits of d on top of each, the lowest first
    places = np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(words >> np.uint16(12) << places, -1)
    ones = (np.uint16(_ONE) >> places & np.uint16(15)) << np.uint16(12)
    raw[:, 48:56] = (words & np.uint16(0xFFF) | ones).view(np.uint8)
    return raw, d


def grid_blocks(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows [n, bytes] of blocks of `kind` as blocks of the extension's type GRID, flat: d, 16 scales, 256 codes."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    grid = GRIDS[kind]
    raw, d = _with_d_of_one(kind, np.ascontiguousarray(rows).reshape(-1, grid.block_bytes))
    scale = 2 * grid.scale(raw) + 1
    values = dequantize(raw, GGMLQuantizationType[kind]).reshape(len(raw), 16, 16)
    whole = np.rint(values / (scale * 2.0**grid.unit_log2)[..., None]).astype(np.int64)
    codes = np.searchsorted(np.array(grid.table), whole).astype(np.uint8).reshape(len(raw), 128, 2)
    out = np.empty((len(raw), 146), np.uint8)
    out[:, :2] = d[:, None].view(np.uint8)
    out[:, 2:18] = scale
    out[:, 18:] = codes[..., 0] | codes[..., 1] << np.uint8(4)
    return out.reshape(-1)
