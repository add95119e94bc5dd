"""GGML's types of four bits with a step and an offset for each 32 weights, as codes: code * step + offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

GROUP = 32
Affine: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]
"""Codes uint8 [N, G, 32], step and offset float32 [N, G]."""


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: NDArray[np.uint8]) -> Affine:
    blocks = raw.reshape(len(raw), -1, 18)
    step = _halves(blocks[..., :2])[..., 0]
    # A negative step would need a zero point above all codes; reversing the codes gives the same values.
    codes = _nibbles(blocks[..., 2:])
    return np.where(step[..., None] < 0, 15 - codes, codes), np.abs(step), np.where(step < 0, 7 * step, -8 * step)


def _q4_1(raw: NDArray[np.uint8]) -> Affine:
    blocks = raw.reshape(len(raw), -1, 20)
    pair = _halves(blocks[..., :4])
    return _nibbles(blocks[..., 4:]), pair[..., 0], pair[..., 1]


def six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Eight steps and eight offsets of a super-block, each uint8 [.., 8], from Q4_K's and Q5_K's 12 bytes [.., 12]."""
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]  # low parts, then the high parts of the last
    steps = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    return steps, np.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], axis=-1)


def _q4_k(raw: NDArray[np.uint8]) -> Affine:
    blocks = raw.reshape(len(raw), -1, 144)
    pair = _halves(blocks[..., :4])
    steps, offsets = six_bit_scales(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).reshape(len(raw), -1, GROUP)
    return codes, (pair[..., :1] * steps).reshape(len(raw), -1), (-pair[..., 1:] * offsets).reshape(len(raw), -1)


_READERS: dict[str, Callable[[NDArray[np.uint8]], Affine]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def affine(kind: str, raw: NDArray[np.uint8]) -> Affine | None:
    """The codes of rows of encoded bytes [N, row bytes], or None for a type that is not one of these."""
    reader = _READERS.get(kind)
    return None if reader is None else reader(raw)
