"""gpt-oss: attention with sinks, a window in every second layer, YaRN, and experts with biases and clipped SwiGLU."""

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention, windows
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import mixture
from shoal.models.families.gemma import local_layers


def layer(b: Builder, i: int) -> Layer:
    """Attention and experts; the router's raw scores choose, and their softmax weighs."""
    return Layer(
        mixer=attention(b, i, window=windows(b, 2)[i], sinks=True),
        feed_forward=mixture(
            b, i, scoring="chosen", normalise=False, activation="swiglu_clipped", turns=True, scale=1.0
        ),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "post_attention_norm"),
    )


FAMILY = Family(
    name="gpt-oss",
    gguf=("gpt-oss",),
    safetensors=("gpt_oss",),
    layer=layer,
    keys={
        "attention.sliding_window_pattern": local_layers,
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
    },
    names={
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_up_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    transposed=("ffn_gate_up_exps.weight", "ffn_down_exps.weight"),  # the BF16 form; the MXFP4 one is not
    defaults={"rms_norm_eps": 1e-5, "head_dim": 64},
)
