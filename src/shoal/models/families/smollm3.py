"""SmolLM 3: every fourth layer has no positions."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward."""
    turned = b.facts.flags("attention.rope_pattern", b.layers)
    return Layer(
        mixer=attention(b, i, turn=(i + 1) % 4 != 0 if turned is None else turned[i]),
        feed_forward=dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


FAMILY = Family(
    name="smollm3",
    gguf=("smollm3",),
    safetensors=("smollm3",),
    layer=layer,
    pairs=("interleaved", "halves"),
    keys={"attention.rope_pattern": "no_rope_layers"},
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
)
