"""Granite 3 and 4, dense, mixture and hybrid: scaled embeddings, residuals, attention, logits; Mamba 2 in Granite 4."""

from collections.abc import Mapping
from typing import Any

from shoal.models.decoder import Dense, Layer, Mixture
from shoal.models.families.attention import attention, head_sizes
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family, Keys, Names
from shoal.models.families.feedforward import dense, mixture, shared
from shoal.models.families.recurrent import mamba2


def layer(b: Builder, i: int) -> Layer:
    """Mamba 2 where the layer has no KV heads, else attention; a feed-forward or experts with a shared one."""
    scale = b.facts.real("attention.scale", 0) or head_sizes(b)[0] ** -0.5
    return Layer(
        mixer=attention(b, i, scale=scale, turn=b.facts.flag("rope.scaling.finetuned", True))
        if b.kv_heads[i]
        else mamba2(b, i, norm_groups=None if b.gguf else 1),
        feed_forward=feed_forward(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
        residual_scale=b.facts.real("residual_scale", 0) or 1.0,
    )


def feed_forward(b: Builder, i: int) -> Dense | Mixture:
    """Experts where the layer has a router."""
    if not b.has(f"blk.{i}.ffn_gate_inp.weight"):
        return dense(b, i)
    size = b.facts.count("expert_shared_feed_forward_length", 0, least=0)
    return mixture(b, i, shared=shared(b, i, size))


def whole(b: Builder) -> Mapping[str, Any]:
    """Scales of embeddings and logits."""
    return {
        "embedding_scale": b.facts.real("embedding_scale", 0) or 1.0,
        "logit_scale": 1 / (b.facts.real("logit_scale", 0) or 1.0),
    }


def _kv_heads(config: Mapping[str, Any]) -> Any:
    kinds, heads = config.get("layer_types"), config.get("num_key_value_heads")
    return heads if kinds is None else [heads if kind in ("attention", "full_attention") else 0 for kind in kinds]


def _size(config: Mapping[str, Any]) -> Any:
    """The dense models of the hybrid's architecture have their feed-forward where others have the shared expert."""
    return (
        config.get("intermediate_size") if config.get("num_local_experts") else config.get("shared_intermediate_size")
    )


KEYS: Keys = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_local_experts",
    "expert_shared_feed_forward_length": lambda c: c.get("shared_intermediate_size") or 0,
}
EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
HYBRID: Names = {
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
GRANITE = Family(
    name="granite",
    gguf=("granite",),
    safetensors=("granite",),
    layer=layer,
    whole=whole,
    pairs=("interleaved", "halves"),
    keys=KEYS,
    defaults={"rms_norm_eps": 1e-6},
)
GRANITEMOE = Family(
    name="granitemoe",
    gguf=("granitemoe",),
    safetensors=("granitemoe", "granitemoeshared"),
    layer=layer,
    whole=whole,
    pairs=("interleaved", "halves"),
    keys=KEYS,
    names=EXPERTS,
    defaults={"rms_norm_eps": 1e-6},
)
GRANITEHYBRID = Family(
    name="granitehybrid",
    gguf=("granitehybrid",),
    safetensors=("granitemoehybrid",),
    layer=layer,
    whole=whole,
    pairs=("interleaved", "halves"),
    keys={
        **KEYS,
        "attention.head_count_kv": _kv_heads,
        "feed_forward_length": _size,
        "rope.scaling.finetuned": lambda c: c.get("position_embedding_type") == "rope",
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
        "ssm.inner_size": lambda c: c["mamba_expand"] * c["hidden_size"],
    },
    names={**EXPERTS, **HYBRID},
    defaults={
        "rms_norm_eps": 1e-6,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
    },
)
