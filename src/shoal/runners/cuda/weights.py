"""A decoder's weights on the device, at the bytes of their file where a kernel unpacks them.

| form | stored as                                                                                   | bits a weight |
|------|---------------------------------------------------------------------------------------------|---------------|
| BF16 | bf16; every type without a form of its own is turned into it                                | 16            |
| Q8_0 | int8 codes, an f16 scale each 32                                                            | 8.5           |
| Q6_K | int8 codes, an int8 scale each 16, an f16 each 256                                          | 8.6           |
| Q4_0 | two codes a byte (of 32 inputs the first 16 are the low halves), an f16 scale each 32       | 4.5           |
| Q4_K | the same codes, a byte of scale and of minimum each 32, two f16 each 256                    | 4.6           |

Codes and scales keep the file's values. In the product a weight becomes bf16, since tensor cores take no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.models.decoder import Weight
from shoal.runners.affine import six_bit_scales

BF16, Q8_0, Q4_0, Q4_K, Q6_K = range(5)
_BITS = {BF16: 16.0, Q8_0: 8.5, Q4_0: 4.5, Q4_K: 4.625, Q6_K: 8.5625}
_FORMS = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_K": Q4_K, "Q6_K": Q6_K}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of n outputs and k inputs. `scales` and `supers` are `data` itself where the form has none."""

    form: int
    n: int
    k: int
    data: torch.Tensor
    scales: torch.Tensor
    supers: torch.Tensor

    @property
    def nbytes(self) -> int:
        """What it takes on the device."""
        parts = {id(t): t.nbytes for t in (self.data, self.scales, self.supers)}
        return sum(parts.values())


def vector(weight: Weight, device: torch.device) -> torch.Tensor:
    """A norm or a bias, float32."""
    return torch.from_numpy(weight.values()).to(device)


def stacked(weights: Sequence[Weight], device: torch.device, *, plain: bool = False) -> list[Matrix]:
    """Weights of equal inputs one above the other: one matrix for each run of them that has one form.

    `plain` makes all of them bf16, and so one matrix.
    """
    if plain:
        return [_upload(weights, BF16, device)]
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and form_of(runs[-1][0]) == form_of(weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_upload(run, form_of(run[0]), device) for run in runs]


def paired(first: Weight, second: Weight, device: torch.device) -> Matrix:
    """Two weights as one matrix, the second's outputs behind the first's: at their own form if it is one, else in
    bf16.
    """
    form = form_of(first) if form_of(first) == form_of(second) else BF16
    return _upload([first, second], form, device)


def paired_experts(weights: Sequence[Weight], device: torch.device) -> Matrix:
    """Matrices of experts as one: of each expert the outputs of all `weights`, then the next expert.

    At their own form if it is one, else in bf16.
    """
    forms = {form_of(weight) for weight in weights}
    form = forms.pop() if len(forms) == 1 else BF16
    experts, k = weights[0].shape[0], weights[0].shape[2]
    parts = zip(*(_parts(weight, form) for weight in weights), strict=True)
    joined = [np.concatenate([part.reshape(experts, -1, part.shape[-1]) for part in column], 1) for column in parts]
    return _matrix(form, sum(w.shape[0] * w.shape[1] for w in weights), k, joined, device)


def form_of(weight: Weight) -> int:
    """The form a weight is kept in: that of its type where the inputs are whole super-blocks of it, else bf16."""
    form = _FORMS.get(weight.type, BF16)
    whole = 256 if form in (Q4_K, Q6_K) else 32
    return form if weight.plain and weight.shape[-1] % whole == 0 else BF16


def device_bytes(weight: Weight) -> int:
    """What a weight takes on the device; pairs of two forms become bf16 and take more."""
    count = math.prod(weight.shape)
    return count * 4 if len(weight.shape) == 1 else int(count * _BITS[form_of(weight)] / 8)


def _upload(weights: Sequence[Weight], form: int, device: torch.device) -> Matrix:
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    columns = [_parts(weight, form) for weight in weights]
    return _matrix(form, n, k, [np.concatenate(part) for part in zip(*columns, strict=True)], device)


def _matrix(form: int, n: int, k: int, arrays: Sequence[NDArray[Any]], device: torch.device) -> Matrix:
    tensors = [_to(array.reshape(n, -1), device) for array in arrays]
    if form == BF16:
        tensors = [tensors[0].view(torch.bfloat16)]
    tensors += [tensors[0]] * (3 - len(tensors))
    return Matrix(form, n, k, *tensors)


def _to(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _parts(weight: Weight, form: int) -> tuple[NDArray[Any], ...]:
    """Codes, scales and super-scales of a weight as arrays that torch knows, [outputs, ...]; experts lie in line."""
    k = weight.shape[-1]
    n = math.prod(weight.shape[:-1])
    if form == BF16:
        if weight.type == "BF16" and weight.plain:
            return (weight.encoded().view(np.int16).reshape(n, k),)
        values = torch.from_numpy(weight.values()).to(torch.bfloat16)
        return (values.view(torch.int16).numpy().reshape(n, k),)
    raw = weight.encoded()
    if form == Q8_0:
        blocks = raw.reshape(n, k // 32, 34)
        return _codes(blocks[..., 2:], n), _halves(blocks, 0)
    if form == Q4_0:
        blocks = raw.reshape(n, k // 32, 18)
        return _codes(blocks[..., 2:], n), _halves(blocks, 0)
    if form == Q4_K:
        return _q4_k(raw.reshape(n, k // 256, 144))
    return _q6_k(raw.reshape(n, k // 256, 210))


def _codes(bytes_: NDArray[np.uint8], n: int) -> NDArray[np.int8]:
    return np.ascontiguousarray(bytes_).reshape(n, -1).view(np.int8)


def _halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _q4_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    n, supers = blocks.shape[:2]
    scales, minima = six_bit_scales(blocks[..., 4:16])
    both = scales.astype(np.int16) | minima.astype(np.int16) << 8
    # 64 weights share 32 bytes in the file, low halves first: here each 32 have 16 bytes of their own
    quants = blocks[..., 16:].reshape(n, supers, 4, 1, 32)
    codes = np.concatenate([quants & 15, quants >> 4], axis=-2).reshape(n, supers * 8, 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    units = np.ascontiguousarray(blocks[..., :4]).view(np.int32)[..., 0]
    return _codes(packed, n), both.reshape(n, -1), units


def _q6_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    n, supers = blocks.shape[:2]
    low = blocks[..., :128].reshape(n, supers, 2, 2, 32)
    high = blocks[..., 128:192].reshape(n, supers, 2, 1, 32)
    upper = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    codes = (np.concatenate([low & 15, low >> 4], axis=-2) | upper).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return codes.reshape(n, -1), scales.reshape(n, -1), _halves(blocks, 208)
