"""GLM 4 (9B, 32B: norms before and after, half of each head turned) and GLM 4.5 to 4.7 (mixture)."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense, mixture, shared


def layer(b: Builder, i: int) -> Layer:
    """Attention and a gated feed-forward."""
    return Layer(
        mixer=attention(b, i),
        feed_forward=dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        mixer_post_norm=b.layer_norm(i, "post_attention_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
        ff_post_norm=b.layer_norm(i, "post_ffw_norm"),
    )


def mixture_layer(b: Builder, i: int) -> Layer:
    """Attention, and a feed-forward in the first layers or experts with a shared one behind them."""
    size = b.facts.count("expert_feed_forward_length") * b.facts.count("expert_shared_count", 0, least=0)
    experts = b.has(f"blk.{i}.ffn_gate_inp.weight")
    return Layer(
        mixer=attention(b, i, qk_norm="optional"),
        feed_forward=mixture(
            b,
            i,
            scoring="sigmoid",
            normalise=b.facts.flag("expert_weights_norm", False),
            shared=shared(b, i, size),
        )
        if experts
        else dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "post_attention_norm"),
    )


GLM4 = Family(
    name="glm4",
    gguf=("glm4",),
    safetensors=("glm4",),
    layer=layer,
    pairs=("interleaved", "interleaved"),
    names={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128},
)
GLM4MOE = Family(
    name="glm4moe",
    gguf=("glm4moe",),
    safetensors=("glm4_moe",),
    layer=mixture_layer,
    keys={
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    names={
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    defaults={"partial_rotary_factor": 0.5, "norm_topk_prob": True, "rms_norm_eps": 1e-5},
)
