"""Nemotron-H and Nemotron 3 Nano and Super: each layer is one part: Mamba 2, attention without positions, or a
feed-forward with squared ReLU, dense or experts."""

from collections.abc import Mapping
from typing import Any

from shoal.models.decoder import Dense, Layer, Mixture
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense, mixture, shared
from shoal.models.families.recurrent import mamba2


def layer(b: Builder, i: int) -> Layer:
    """KV heads say attention, a feed-forward's size says feed-forward, neither says Mamba 2."""
    size = b.facts.counts("feed_forward_length", b.layers)[i]
    norm = b.layer_norm(i, "attn_norm")
    if size:
        return Layer(mixer=None, feed_forward=feed_forward(b, i, size), ff_norm=norm)
    mixer = attention(b, i, turn=False) if b.kv_heads[i] else mamba2(b, i)
    return Layer(mixer=mixer, feed_forward=None, mixer_norm=norm)


def feed_forward(b: Builder, i: int, size: int) -> Dense | Mixture:
    """Experts where the layer has a router; Super's experts work in a smaller space."""
    at = f"blk.{i}."
    if not b.has(f"{at}ffn_gate_inp.weight"):
        return dense(b, i, size, "relu2", gated=False)
    inner = b.facts.count("moe_latent_size", 0, least=0) or b.width
    latent = inner != b.width or b.has(f"{at}ffn_latent_down.weight")
    return mixture(
        b,
        i,
        scoring="sigmoid",
        normalise=b.facts.flag("expert_weights_norm", False),
        activation="relu2",
        gated=False,
        inner=inner,
        shared=shared(b, i, b.facts.count("expert_shared_feed_forward_length", 0, least=0), "relu2", gated=False),
        latent_in=b.linear(f"{at}ffn_latent_down", inner, b.width) if latent else None,
        latent_out=b.linear(f"{at}ffn_latent_up", b.width, inner) if latent else None,
    )


_LETTERS = {"*": "attention", "full_attention": "attention", "-": "mlp", "E": "moe"}


def _kinds(config: Mapping[str, Any]) -> list[str]:
    pattern = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ""
    return [_LETTERS.get(each, each) for each in pattern]


def _kv_heads(config: Mapping[str, Any]) -> list[Any]:
    return [config.get("num_key_value_heads") if kind == "attention" else 0 for kind in _kinds(config)]


def _sizes(config: Mapping[str, Any]) -> list[Any]:
    size = {"mlp": config.get("intermediate_size"), "moe": config.get("moe_intermediate_size")}
    return [size.get(kind) or 0 for kind in _kinds(config)]


FAMILY = Family(
    name="nemotron_h",
    gguf=("nemotron_h", "nemotron_h_moe"),
    safetensors=("nemotron_h",),
    layer=layer,
    keys={
        "block_count": lambda c: len(_kinds(c)),
        "attention.head_count_kv": _kv_heads,
        "attention.layer_norm_rms_epsilon": lambda c: c.get("layer_norm_epsilon") or c.get("rms_norm_eps"),
        "attention.key_length": lambda c: c.get("head_dim") or c.get("attention_head_dim"),
        "attention.value_length": lambda c: c.get("head_dim") or c.get("attention_head_dim"),
        "feed_forward_length": _sizes,
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
        "ssm.inner_size": lambda c: c["mamba_num_heads"] * c["mamba_head_dim"],
        "expert_count": "n_routed_experts",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "moe_latent_size": lambda c: c.get("moe_latent_size") or 0,
    },
    names={
        "token_embd": "embeddings",
        "output_norm": "norm_f",
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_norm": "mixer.norm",
        "ssm_out": "mixer.out_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.{e}.up_proj",
        "ffn_down_exps": "mixer.experts.{e}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    defaults={"layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8},
)
