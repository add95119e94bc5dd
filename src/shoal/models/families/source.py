"""Keys and tensors of a model on disk under one set of names, those of GGUF, whatever its format."""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol

import numpy as np

from shoal.checks import is_number, is_whole
from shoal.errors import ModelFormatError
from shoal.models.decoder import StoredTensor
from shoal.models.families.rotary import Scaling
from shoal.models.gguf import GgufModel

HINT = "the file is damaged or incomplete; fetch it again"
_MOST = 2**31


class Source(Protocol):
    """A model on disk. `value` and `tensor` take GGUF's names, keys without the architecture before them."""

    where: str
    format: str
    tensors: int
    """How many the file has: no count of layers can be larger."""

    def value(self, key: str) -> Any:
        """The value under `key`, a number, string, bool, or sequence of them; None when there is none."""
        ...

    def tensor(self, name: str) -> StoredTensor | None:
        """The tensor called `name`, or None."""
        ...

    def unread(self) -> list[str]:
        """Names of the tensors that nobody has asked for."""
        ...

    def scaling(self, local: bool) -> Scaling:
        """How rotary positions are stretched; `local` for layers with a window, where a model tells them apart."""
        ...


class Facts:
    """Typed, bounded access to the keys of a source. All raise `ModelFormatError` for values of a wrong kind."""

    def __init__(self, source: Source) -> None:
        self.source, self.where = source, source.where

    def fail(self, key: str, value: object, limit: object) -> NoReturn:
        """Refuse `value` under `key`."""
        what = "is missing" if value is None else f"is {value!r}"
        raise ModelFormatError(f"{self.where}: {key} {what}", value=value, limit=limit, hint=HINT)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; one entry per layer counts as that number when all are the same."""
        value = self.source.value(key)
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) and all(v == value[0] for v in value):
            value = value[0]
        return self._whole(key, default if value is None else value, least)

    def counts(self, key: str, layers: int, default: int | None = None, *, least: int = 0) -> list[int]:
        """A whole number for each layer, from one number or from one a layer."""
        value = self.source.value(key)
        if isinstance(value, (list, tuple, np.ndarray)):
            if len(value) < layers:
                self.fail(key, f"{len(value)} entries", f"{layers} layers")
            return [self._whole(key, v, least) for v in value[:layers]]
        return [self._whole(key, default if value is None else value, least)] * layers

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Yes or no for each layer, or None when the key is not an array."""
        value = self.source.value(key)
        if not isinstance(value, (list, tuple, np.ndarray)):
            return None
        if len(value) < layers:
            self.fail(key, f"{len(value)} entries", f"{layers} layers")
        return [bool(v) for v in value[:layers]]

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.source.value(key)
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) and all(v == value[0] for v in value):
            value = value[0]
        value = default if value is None else value
        if isinstance(value, np.integer | np.floating):
            value = value.item()
        if not is_number(value):
            self.fail(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        value = self.source.value(key)
        if not isinstance(value, bool | int | np.integer | None):
            self.fail(key, value, "yes or no")
        return default if value is None else bool(value)

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, np.integer | np.floating | np.bool_):
            value = value.item()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_whole(value, least, _MOST - 1):
            self.fail(key, value, f"a whole number, {least} to 2^31")
        return value


class GgufSource:
    """A parsed GGUF file."""

    format = "gguf"

    def __init__(self, model: GgufModel) -> None:
        self.model, self.where, self.tensors = model, str(model.path), len(model.tensors)
        self._read: set[str] = set()

    def value(self, key: str) -> Any:
        """See `Source`."""
        return self.model.metadata.get(f"{self.model.architecture}.{key}")

    def tensor(self, name: str) -> StoredTensor | None:
        """See `Source`."""
        self._read.add(name)
        return self.model.tensors.get(name)

    def unread(self) -> list[str]:
        """See `Source`."""
        return [name for name in self.model.tensors if name not in self._read]

    def scaling(self, local: bool) -> Scaling:
        """llama.cpp's rules: factors of a tensor come first; a window's layers have no scaling of their own."""
        facts = Facts(self)
        factors = self.tensor("rope_freqs.weight")
        long, short = self.tensor("rope_factors_long.weight"), self.tensor("rope_factors_short.weight")
        if local:
            return Scaling()
        kind = self.value("rope.scaling.type")
        factor = facts.real("rope.scaling.factor", 0) or facts.real("rope.scale_linear", 0) or 1.0
        if not isinstance(kind, str | None) or kind not in (None, "none", "linear", "yarn", "longrope"):
            facts.fail("rope.scaling.type", kind, "none, linear, yarn or longrope")
        if kind == "none":
            factor = 1.0
        attention = facts.real("rope.scaling.attn_factor", 1.0)
        context = facts.count("context_length")
        original = facts.count("rope.scaling.original_context_length", context)
        if factors is not None:
            return Scaling("factors", factor, factors=factors.dequantize(), attention=attention)
        if long is not None and short is not None:
            chosen = long if context > original else short
            return Scaling("longrope", factor, original, attention, factors=chosen.dequantize())
        if kind == "yarn":
            return Scaling(
                "yarn",
                factor,
                original,
                attention * _yarn_attention(factor, facts.real("rope.scaling.yarn_log_multiplier", 0)),
                fast=facts.real("rope.scaling.yarn_beta_fast", 32.0),
                slow=facts.real("rope.scaling.yarn_beta_slow", 1.0),
            )
        return Scaling("linear", factor, attention=attention)


def _yarn_attention(factor: float, log_multiplier: float) -> float:
    """The factor of cosine and sine: 0.1 * ln(factor) + 1, over the same with `log_multiplier` where a file has one."""

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1

    return scale(1.0) / scale(log_multiplier) if log_multiplier else scale(1.0)
