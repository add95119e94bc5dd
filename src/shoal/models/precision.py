"""A model whose matrices are quantised when they are loaded: the same description over tensors of another type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError
from shoal.models.decoder import Decoder, StoredTensor, Weight, replace_weights

AT_LOAD = ("q8_0", "q4_1", "q4_0")
"""Precisions that matrices can be quantised to, the finest first; GGML's types of those names."""

_KEPT = ("router.weight", "shared_gate.weight", "alpha.weight", "beta.weight", "dt.weight")
"""Small matrices that choose experts or steer a recurrence: they stay as they are."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor as `type`, made from the stored one's rows whenever they are asked for; nothing is kept."""

    stored: StoredTensor = field(repr=False)
    type: str

    @property
    def name(self) -> str:
        """The stored tensor's."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored tensor's."""
        return self.stored.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        """All encoded bytes, freshly made."""
        return self.encoded_rows(slice(None)).reshape(-1)

    def encoded_rows(self, index: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        """Some rows, uint8 [rows, row bytes]. `ModelFormatError` when a value is no number."""
        from gguf import GGMLQuantizationType, dequantize, quantize

        raw = np.ascontiguousarray(self.stored.encoded_rows(index))
        values = dequantize(raw, GGMLQuantizationType[self.stored.type])
        if not np.isfinite(values).all():
            raise ModelFormatError(f"tensor {self.name!r} has values that are no numbers", value=self.name)
        made: NDArray[np.uint8] = quantize(values, GGMLQuantizationType[self.type])
        return made

    def dequantize(self) -> NDArray[np.float32]:
        """What the encoded bytes stand for, a fresh float32 array of `shape`."""
        from gguf import GGMLQuantizationType, dequantize

        values: NDArray[np.float32] = dequantize(self.encoded_rows(slice(None)), GGMLQuantizationType[self.type])
        return values.reshape(self.shape)


def quantised(model: Decoder, precision: str) -> Decoder:
    """The model with every matrix that has more bits a weight than `precision`, one of `AT_LOAD`, quantised to it.

    Routers and what steers a recurrence stay; so do matrices whose rows are no whole blocks, and vectors.
    """
    kind = precision.upper()
    most = _bits(kind)

    def change(path: str, weight: Weight) -> Weight:
        matrix = len(weight.shape) >= 2 and weight.plain and path.endswith(("weight", "embedding"))
        if not matrix or path.endswith(_KEPT) or weight.shape[-1] % 32 or _bits(weight.type) <= most:
            return weight
        return replace(weight, tensor=Quantised(weight.tensor, kind))

    return replace_weights(model, change)


def _bits(kind: str) -> float:
    """Bits of a weight of this type; of one that is not known as many as any has."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in GGMLQuantizationType.__members__:
        return math.inf
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return float(size * 8 / weights)
