"""Weights as 8-bit codes in groups of 32 along the inputs, the form the CPU plugin multiplies without unpacking.

A value is `(code - zero) * scale`, one f16 scale and one zero point per group. Types whose values lie on a grid of at
most 16 steps per group keep their codes exactly, on a finer grid where their offset becomes a whole number; every other
type is rounded to symmetric codes as in Q8_0, exactly so for Q8_0 itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.models.decoder import StoredTensor
from shoal.runners.affine import GROUP, affine

_CENTRE = 128  # the zero point of symmetric codes
_STEPS = 17  # 15 * 17 == 255: the finest grid on which 4-bit codes still fit 8 bits


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [N, K]: `codes` uint8 [N, K], `zeros` uint8 [N, K / 32], `scales` float16 [N, K / 32]."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def symmetric(self) -> bool:
        """True when every zero point is 128, so that signed codes need none."""
        return bool((self.zeros == _CENTRE).all())

    def take(self, rows: NDArray[np.intp]) -> Codes:
        """The same weight with its rows in another order."""
        return Codes(self.codes[rows], self.zeros[rows], self.scales[rows])

    def values(self) -> NDArray[np.float32]:
        """The float32 [N, K] that these codes stand for."""
        codes = self.codes.reshape(*self.zeros.shape, GROUP).astype(np.float32)
        return ((codes - self.zeros[..., None]) * self.scales[..., None].astype(np.float32)).reshape(self.codes.shape)


def stack(parts: Sequence[Codes]) -> Codes:
    """One weight with the rows of all `parts`, which have the same inputs."""
    return Codes(
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.zeros for p in parts]),
        np.concatenate([p.scales for p in parts]),
    )


def encode(tensor: StoredTensor) -> Codes:
    """Codes of a 2-D tensor whose inputs are a multiple of 32. Raises what `dequantize` raises."""
    raw = tensor.data.reshape(tensor.shape[0], -1)
    if tensor.type == "Q8_0":
        return _q8_0(raw)
    grid = affine(tensor.type, raw)
    return _symmetric(tensor.dequantize()) if grid is None else _on_finer_grid(*grid)


def _symmetric(values: NDArray[np.float32]) -> Codes:
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    scales = (largest / 127).astype(np.float16)
    # A scale rounded down far enough to clip the largest value (subnormal f16) is taken one step up.
    low = scales.astype(np.float32) * 127.5 < largest
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))
    divisor = np.where(scales == 0, 1, scales).astype(np.float32)
    codes = np.rint(groups / divisor[..., None])
    codes += _CENTRE
    return Codes(
        np.clip(codes, 1, 255, out=codes).astype(np.uint8).reshape(values.shape),
        np.full(scales.shape, _CENTRE, np.uint8),
        scales,
    )


def _on_finer_grid(codes: NDArray[np.uint8], step: NDArray[np.float32], offset: NDArray[np.float32]) -> Codes:
    """Codes of `codes * step + offset`: codes uint8 [N, G, 32] of 0..15, step and offset float32 [N, G].

    A group's codes are multiplied by the whole number, up to 17, that brings its zero point `-offset / step` nearest to
    a whole number, counting also what f16 does to the divided step. Groups that do not reach zero are rounded as any
    other type.
    """
    best = np.full(step.shape, np.inf, np.float32)
    finer = np.ones(step.shape, np.float32)
    zero = -offset / np.where(step == 0, 1, step)
    for times in range(_STEPS, 0, -1):
        scale = (step / times).astype(np.float16).astype(np.float32)
        centre = np.rint(zero * times)
        error = np.abs(-centre * scale - offset) + np.abs(scale * times - step) * 8
        error[(centre < 0) | (centre > 255)] = np.inf
        better = error < best
        best[better], finer[better] = error[better], times
    usable = np.isfinite(best)
    zeros = np.where(usable, np.rint(zero * finer), 0).astype(np.uint8)
    fine = codes * finer.astype(np.uint8)[..., None]
    result = Codes(fine.reshape(len(fine), -1), zeros, (step / finer).astype(np.float16))
    if not usable.all():
        values = codes * step[..., None] + offset[..., None]
        other = _symmetric(values.reshape(len(fine), -1))
        fine[~usable] = other.codes.reshape(fine.shape)[~usable]
        result.zeros[~usable], result.scales[~usable] = other.zeros[~usable], other.scales[~usable]
    return result


def _q8_0(raw: NDArray[np.uint8]) -> Codes:
    blocks = raw.reshape(len(raw), -1, 34)
    codes = (blocks[..., 2:] ^ np.uint8(_CENTRE)).reshape(len(raw), -1)  # two's complement to an excess of 128
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return Codes(codes, np.full(scales.shape, _CENTRE, np.uint8), scales)
