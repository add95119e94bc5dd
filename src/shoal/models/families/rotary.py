"""Rotary positions as published files describe them, turned into one list of frequencies and a factor.

All of it is arithmetic on a base and a scaling: which of them a model has is its family's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.checks import is_number
from shoal.errors import ModelFormatError
from shoal.models.decoder import Rotary

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How positions are stretched. Only `kind`'s own fields are read.

    `factor` is new over old context, `original` the old context in tokens. "factors" and "longrope" divide the
    frequencies one by one; "llama3" moves long waves only; "yarn" mixes by wave length; "proportional" turns only the
    first `turned` of the pairs. `attention` multiplies cosine and sine; None leaves it to the kind's own rule.
    """

    kind: Literal["none", "linear", "yarn", "llama3", "longrope", "factors", "proportional"] = "none"
    factor: float = 1.0
    original: int = 0
    attention: float | None = None
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True
    low: float = 1.0
    high: float = 4.0
    factors: Sequence[float] | NDArray[np.float32] | None = None
    turned: int = 0


def rotary(base: float, dims: int, scaling: Scaling, where: str) -> Rotary:
    """Positions for `dims` elements of a head. Raises `ModelFormatError`, naming `where`, for values out of range."""
    if not math.isfinite(base) or base <= 0 or dims < 2 or dims % 2:
        raise ModelFormatError(
            f"{where}: rotary base {base} over {dims} elements",
            value=(base, dims),
            limit="a base above zero, an even number of elements",
            hint="fetch the model again",
        )
    _check(base, scaling, where)
    plain = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    turned = _turned(plain, base, dims, scaling, where)
    attention = _attention(scaling)
    if not np.isfinite(turned).all() or not math.isfinite(attention):
        raise ModelFormatError(
            f"{where}: rotary positions that are no numbers", value=(base, scaling.factor, attention)
        )
    return Rotary(tuple(float(f) for f in turned), attention)


def _check(base: float, scaling: Scaling, where: str) -> None:
    """`ModelFormatError` for what is no number, and for what would be divided by or whose logarithm is taken."""
    named = ("factor", "original", "fast", "slow", "low", "high", "turned")
    for name, value in ((name, getattr(scaling, name)) for name in named):
        if not is_number(value) or (name == "factor" and value <= 0):
            raise ModelFormatError(
                f"{where}: rotary {name} {value!r}", value=value, limit="a number, factors above zero"
            )
    if scaling.attention is not None and not is_number(scaling.attention):
        raise ModelFormatError(f"{where}: rotary attention factor {scaling.attention!r}", value=scaling.attention)
    if scaling.kind == "yarn" and (base == 1 or min(scaling.original, scaling.fast, scaling.slow) <= 0):
        raise ModelFormatError(
            f"{where}: YaRN over base {base}, turns {scaling.fast} and {scaling.slow}, {scaling.original} tokens",
            value=(base, scaling.fast, scaling.slow, scaling.original),
            limit="all above zero, the base not one",
        )
    if scaling.kind == "llama3" and scaling.high == scaling.low:
        raise ModelFormatError(f"{where}: rotary factors {scaling.low} and {scaling.high}", value=scaling.low)


def _turned(plain: Frequencies, base: float, dims: int, scaling: Scaling, where: str) -> Frequencies:
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, base, dims, scaling)
    if scaling.kind in ("factors", "longrope"):
        return plain / scaling.factor / _checked(scaling.factors, len(plain), where)
    if scaling.kind == "proportional":
        return np.where(np.arange(len(plain)) < scaling.turned, plain / scaling.factor, 0.0)
    return plain


def _checked(factors: Sequence[float] | NDArray[np.float32] | None, pairs: int, where: str) -> Frequencies:
    try:
        values = np.asarray(() if factors is None else factors, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        values = np.empty(0)
    if len(values) != pairs or not np.isfinite(values).all() or (values <= 0).any():
        raise ModelFormatError(
            f"{where}: {len(values)} rotary factors for {pairs} pairs, or factors out of range",
            value=len(values),
            limit=pairs,
            hint="fetch the model again",
        )
    return values


def _llama3(plain: Frequencies, scaling: Scaling) -> Frequencies:
    wave = 2 * math.pi / plain
    smooth = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
    smooth = np.clip(smooth, 0, 1)
    out: Frequencies = (1 - smooth) * plain / scaling.factor + smooth * plain
    return out


def _yarn(plain: Frequencies, base: float, dims: int, scaling: Scaling) -> Frequencies:
    """Pairs that turn more than `fast` times in the old context stay, those under `slow` are stretched."""

    def pair_of(turns: float) -> float:
        return dims * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(scaling.fast), pair_of(scaling.slow)
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    ramp: Frequencies = np.clip((np.arange(len(plain)) - first) / max(last - first, 0.001), 0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _attention(scaling: Scaling) -> float:
    if scaling.attention is not None:
        return scaling.attention
    if scaling.kind == "yarn" and scaling.factor > 1:
        return 0.1 * math.log(scaling.factor) + 1
    return 1.0
