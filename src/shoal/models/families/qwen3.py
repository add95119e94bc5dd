"""Qwen 3, dense and mixture: Q and K are normalised head by head."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense, mixture


def layer(b: Builder, i: int) -> Layer:
    """Attention, and a gated feed-forward or experts."""
    experts = b.has(f"blk.{i}.ffn_gate_inp.weight")
    return Layer(
        mixer=attention(b, i, qk_norm="head"),
        feed_forward=mixture(b, i, normalise=b.facts.flag("expert_weights_norm", True)) if experts else dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


QWEN3 = Family(
    name="qwen3",
    gguf=("qwen3",),
    safetensors=("qwen3",),
    layer=layer,
    defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
)
QWEN3MOE = Family(
    name="qwen3moe",
    gguf=("qwen3moe",),
    safetensors=("qwen3_moe",),
    layer=layer,
    keys={"expert_weights_norm": "norm_topk_prob"},
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False},
)
