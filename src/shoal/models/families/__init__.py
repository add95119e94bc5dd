"""Model families: each page here says how one family's files fill in a `Decoder`; nothing else knows a family."""

from __future__ import annotations

from shoal.errors import UnsupportedModelError
from shoal.models.decoder import Decoder
from shoal.models.families import (
    gemma,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral3,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen35,
    smollm3,
)
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.hub import HubSource
from shoal.models.families.source import GgufSource
from shoal.models.gguf import GgufModel
from shoal.models.safetensors import SafetensorsModel

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral3.FAMILY,
    qwen2.FAMILY,
    qwen3.QWEN3,
    qwen3.QWEN3MOE,
    qwen35.QWEN3NEXT,
    qwen35.QWEN35,
    qwen35.QWEN35MOE,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    granite.GRANITE,
    granite.GRANITEMOE,
    granite.GRANITEHYBRID,
    lfm2.LFM2,
    lfm2.LFM2MOE,
    glm4.GLM4,
    glm4.GLM4MOE,
    nemotron_h.FAMILY,
)


def describe(model: GgufModel | SafetensorsModel) -> Decoder:
    """The decoder in a parsed file or directory. Looks at no weight but rotary factors.

    Raises `UnsupportedModelError` for an architecture or a variant that no page is for, `ModelFormatError` for keys and
    tensors that are missing or do not fit each other.
    """
    family = family_of(model)
    source = GgufSource(model) if isinstance(model, GgufModel) else HubSource(model, family)
    return Builder(family, source, model.name).decoder()


def family_of(model: GgufModel | SafetensorsModel) -> Family:
    """The page for a model. Raises `UnsupportedModelError` when there is none."""
    gguf = isinstance(model, GgufModel)
    known = {name: family for family in FAMILIES for name in (family.gguf if gguf else family.safetensors)}
    names = (model.architecture,) if isinstance(model, GgufModel) else model.kinds
    for name in names:
        if name in known:
            return known[name]
    what = names[0] if names else None
    raise UnsupportedModelError(
        f"{model.path}: architecture {what!r}",
        value=what,
        limit=sorted(known),
        hint=f"known are {', '.join(sorted(known))}",
    )
