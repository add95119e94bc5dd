"""Qwen 2 and 2.5: biases on Q, K and V."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward."""
    return Layer(
        mixer=attention(b, i),
        feed_forward=dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


FAMILY = Family(name="qwen2", gguf=("qwen2",), safetensors=("qwen2",), layer=layer, defaults={"rms_norm_eps": 1e-6})
