"""Llama 1 to 3.3, Mistral 7B and Nemo, SmolLM 2, Mixtral, and many models of the same shape under these names."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention, windows
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense, mixture


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward, or experts."""
    experts = b.facts.count("expert_count", 0, least=0)
    return Layer(
        mixer=attention(b, i, window=windows(b, 0)[i] if not b.gguf else None),
        feed_forward=mixture(b, i) if experts else dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


FAMILY = Family(
    name="llama",
    gguf=("llama",),
    safetensors=("llama", "mistral", "mixtral"),
    layer=layer,
    pairs=("interleaved", "halves"),
    keys={"expert_count": "num_local_experts"},
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    },
    defaults={"rms_norm_eps": 1e-6},
)
