"""Mistral 3 (Ministral 3, Mistral Small 3.1): llama's layers, YaRN, and queries that grow with their position."""

from shoal.models.decoder import Layer, QueryScale
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward."""
    beta = b.facts.real("attention.temperature_scale", 0)
    length = b.facts.count("rope.scaling.original_context_length", b.facts.count("context_length"))
    return Layer(
        mixer=attention(b, i, query_scale=QueryScale(beta, length) if beta else None),
        feed_forward=dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


FAMILY = Family(
    name="mistral3",
    gguf=("mistral3",),
    safetensors=("ministral3", "mistral3"),
    layer=layer,
    pairs=("interleaved", "halves"),
    keys={
        "attention.temperature_scale": lambda c: (c.get("rope_parameters") or {}).get("llama_4_scaling_beta"),
        "rope.scaling.original_context_length": lambda c: (c.get("rope_parameters") or {}).get(
            "original_max_position_embeddings"
        ),
    },
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
)
