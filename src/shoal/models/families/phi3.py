"""Phi 3, 3.5 and 4: fused Q, K, V and gate, up; partial rotary in Phi 4 mini; LongRoPE for long contexts."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense


def layer(b: Builder, i: int) -> Layer:
    """Attention, with a window where the model has one, and a gated feed-forward."""
    window = b.facts.count("attention.sliding_window", 0, least=0)
    return Layer(
        mixer=attention(b, i, window=window or None),
        feed_forward=dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


FAMILY = Family(
    name="phi3",
    gguf=("phi3",),
    safetensors=("phi3",),
    layer=layer,
    keys={"attention.sliding_window": lambda c: c.get("sliding_window") or 0},
    names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    defaults={"rms_norm_eps": 1e-5},
)
