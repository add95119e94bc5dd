"""What a family's page is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.models.decoder import Layer

if TYPE_CHECKING:
    from shoal.models.families.builder import Builder

Pairs = Literal["halves", "interleaved"]
"""Which elements of a head are turned together: i with i + pairs, or 2i with 2i + 1."""

Keys: TypeAlias = Mapping[str, str | Callable[[Mapping[str, Any]], Any]]
"""GGUF's keys to those of config.json, or to functions of it."""

Names: TypeAlias = Mapping[str, str | tuple[str, ...]]
"""GGUF's names of tensors, whole or without their last part, to those of safetensors, tried in order.

Layers' names are without "blk.N." and "model.layers.N."; "{e}" stands for the number of an expert.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """One page. `gguf` and `safetensors` are the values of general.architecture and model_type it is for.

    `layer(builder, i)` makes layer i, and `whole(builder)` gives the fields of `Decoder` that not all have alike.
    `keys` maps GGUF's keys to those of config.json (a name, or a function of the config), `names` GGUF's tensor names
    to those of safetensors, both on top of what most families share; `defaults` are config.json's values where it
    leaves a key out. `pairs` are for (GGUF, safetensors). `norms_plus_one`: safetensors store norms around zero.
    `transposed`: tensors, by GGUF's names, that safetensors hold as [.., inputs, outputs].
    """

    name: str
    gguf: tuple[str, ...]
    safetensors: tuple[str, ...]
    layer: Callable[[Builder, int], Layer]
    whole: Callable[[Builder], Mapping[str, Any]] | None = None
    keys: Keys = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pairs: tuple[Pairs, Pairs] = ("halves", "halves")
    norms_plus_one: bool = False
