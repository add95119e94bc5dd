"""What 8-bit codes in groups of 32 keep of each GGUF type."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray

from shoal.models.gguf import GgufTensor
from shoal.runners.openvino.weights import Codes, encode, stack

ROWS, COLUMNS = 48, 512


def tensor(kind: str, values: NDArray[np.float32]) -> GgufTensor:
    data = quantize(values, GGMLQuantizationType[kind])
    return GgufTensor("w", kind, values.shape, np.frombuffer(data.tobytes(), np.uint8))


def normal(scale: float = 0.05) -> NDArray[np.float32]:
    return (np.random.default_rng(0).standard_normal((ROWS, COLUMNS)) * scale).astype(np.float32)


def error(codes: Codes, exact: NDArray[np.float32]) -> float:
    """Root mean square of the difference, relative to that of the values."""
    return float(np.sqrt(np.mean((codes.values() - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("Q8_0", 0.0), ("Q4_0", 0.0), ("Q4_1", 0.003), ("Q5_0", 0.008), ("F16", 0.008), ("BF16", 0.008), ("F32", 0.008)],
)
def test_a_type_keeps_its_values(kind: str, limit: float) -> None:
    source = tensor(kind, normal())
    codes = encode(source)
    assert codes.codes.shape == (ROWS, COLUMNS)
    assert codes.scales.shape == codes.zeros.shape == (ROWS, COLUMNS // 32)
    assert error(codes, source.dequantize()) <= limit


def test_four_bit_codes_with_offsets_lose_less_than_when_rounded() -> None:
    source = tensor("Q4_1", normal())
    exact = source.dequantize()
    rounded = encode(tensor("F32", exact))
    assert error(encode(source), exact) < error(rounded, exact) / 2


def q4_k(rng: np.random.Generator, *, reach: int) -> GgufTensor:
    """Random blocks; `reach` is the most that a group's offset may be, in steps of 63rds."""
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // 256, 144), np.uint8)
    blocks[..., :4] = np.full((ROWS, COLUMNS // 256, 2), 0.01, np.float16).view(np.uint8)
    steps, offsets = rng.integers(20, 64, (2, *blocks.shape[:2], 8), np.uint8)
    offsets %= reach
    blocks[..., 4:8] = steps[..., :4] | (steps[..., 4:] >> 4) << 6
    blocks[..., 8:12] = offsets[..., :4] | (offsets[..., 4:] >> 4) << 6
    blocks[..., 12:16] = (steps[..., 4:] & 15) | (offsets[..., 4:] & 15) << 4
    return GgufTensor("w", "Q4_K", (ROWS, COLUMNS), blocks.reshape(-1))


def test_q4_k_is_unpacked_as_the_reference_does() -> None:
    source = q4_k(np.random.default_rng(0), reach=64)
    assert error(encode(source), source.dequantize()) < 0.003


def test_groups_whose_zero_lies_far_outside_are_rounded() -> None:
    values = normal(0.001) + np.float32(1)  # every group far from zero: no zero point fits
    source = tensor("Q4_1", values)
    codes = encode(source)
    assert (codes.zeros == 128).all()
    assert error(codes, source.dequantize()) < 0.005


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e-3, 1e3])
def test_small_and_large_values_are_not_clipped(scale: float) -> None:
    values = normal(scale)
    codes = encode(tensor("F32", values))
    largest = np.abs(values).max()
    # Below 1e-6 the scale itself is a subnormal f16; nothing may become larger than one of its steps off.
    assert np.abs(codes.values() - values).max() <= max(largest / 100, 127 * 6e-8)


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros((4, 64), np.float32)
    for kind in ("F32", "Q8_0", "Q4_0", "Q4_1"):
        assert not encode(tensor(kind, zeros)).values().any()


def test_parts_are_stacked_and_rows_reordered() -> None:
    a, b = encode(tensor("Q8_0", normal())), encode(tensor("Q4_1", normal()))
    both = stack([a, b])
    assert np.array_equal(both.values(), np.concatenate([a.values(), b.values()]))
    assert a.symmetric
    assert not both.symmetric
    order = np.arange(ROWS)[::-1]
    assert np.array_equal(a.take(order).values(), a.values()[::-1])
