"""Qwen 3 Next and Qwen 3.5, dense and mixture: three of four layers are gated delta nets, the fourth gated attention.

Draft heads (MTP) at the end of the file are left out.
"""

from collections.abc import Mapping
from typing import Any

from shoal.models.decoder import Dense, Layer, Mixture
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family, Keys, Names
from shoal.models.families.feedforward import dense, mixture, shared
from shoal.models.families.recurrent import delta_net


def layer(b: Builder, i: int) -> Layer:
    """A gated delta net or gated attention, and a feed-forward or experts with a shared one."""
    recurrent = b.facts.flags("attention.recurrent_layers", b.layers)
    every = b.facts.count("full_attention_interval", 4)
    linear = recurrent[i] if recurrent is not None else (i + 1) % every != 0
    return Layer(
        mixer=delta_net(b, i, tiled=b.gguf and b.family.name != "qwen3next")
        if linear
        else attention(b, i, qk_norm="head", gate=True),
        feed_forward=feed_forward(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "post_attention_norm"),
    )


def feed_forward(b: Builder, i: int) -> Dense | Mixture:
    """Dense where the layer has no router."""
    if not b.has(f"blk.{i}.ffn_gate_inp.weight"):
        return dense(b, i)
    size = b.facts.count("expert_shared_feed_forward_length", 0, least=0)
    if not size and b.has(f"blk.{i}.ffn_up_shexp.weight"):  # older files leave it out where it is the common size
        size = b.facts.count("feed_forward_length")
    return mixture(b, i, shared=shared(b, i, size), normalise=b.facts.flag("expert_weights_norm", True))


def recurrent_layers(config: Mapping[str, Any]) -> list[bool] | None:
    """From config.json's kinds of layers."""
    kinds = config.get("layer_types")
    return None if kinds is None else [kind == "linear_attention" for kind in kinds]


KEYS: Keys = {
    "attention.recurrent_layers": recurrent_layers,
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda c: c["linear_num_value_heads"] * c["linear_value_head_dim"],
    "expert_weights_norm": "norm_topk_prob",
}
NAMES: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
FUSED: Names = {
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": ("mlp.experts.down_proj", "mlp.experts.{e}.down_proj.weight"),
}
SIZES = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}

QWEN3NEXT = Family(
    name="qwen3next",
    gguf=("qwen3next",),
    safetensors=("qwen3_next",),
    layer=layer,
    keys=KEYS,
    names=NAMES,
    defaults=SIZES,
    norms_plus_one=True,
)
QWEN35 = Family(
    name="qwen35",
    gguf=("qwen35",),
    safetensors=("qwen3_5", "qwen3_5_text"),
    layer=layer,
    keys=KEYS,
    names=NAMES,
    defaults=SIZES,
    norms_plus_one=True,
)
QWEN35MOE = Family(
    name="qwen35moe",
    gguf=("qwen35moe",),
    safetensors=("qwen3_5_moe", "qwen3_5_moe_text"),
    layer=layer,
    keys=KEYS,
    names={**NAMES, **FUSED},
    defaults=SIZES,
    norms_plus_one=True,
)
