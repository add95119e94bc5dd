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
from shoal.models.families.source import GgufSource
from shoal.models.gguf import GgufModel

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


def describe(model: GgufModel) -> Decoder:
    """The decoder in a parsed file. Looks at no weight but rotary factors.

    Raises `UnsupportedModelError` for an architecture or a variant that no page is for, `ModelFormatError` for keys and
    tensors that are missing or do not fit each other.
    """
    family = _family(model.architecture, str(model.path))
    return Builder(family, GgufSource(model), model.name).decoder()


def _family(architecture: str, where: str) -> Family:
    known = {name: family for family in FAMILIES for name in family.gguf}
    family = known.get(architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{where}: architecture {architecture!r}",
            value=architecture,
            limit=sorted(known),
            hint=f"known are {', '.join(sorted(known))}",
        )
    return family
