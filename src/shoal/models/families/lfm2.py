"""LFM2, dense and mixture: gated short convolutions, with attention in some layers."""

from collections.abc import Mapping
from typing import Any

from shoal.models.decoder import Layer
from shoal.models.families.attention import attention
from shoal.models.families.builder import Builder
from shoal.models.families.family import Family, Keys, Names
from shoal.models.families.feedforward import dense, mixture
from shoal.models.families.recurrent import short_conv


def layer(b: Builder, i: int) -> Layer:
    """A short convolution where the layer has no KV heads, else attention; experts behind the first layers."""
    experts = b.has(f"blk.{i}.ffn_gate_inp.weight")
    return Layer(
        mixer=attention(b, i, qk_norm="head") if b.kv_heads[i] else short_conv(b, i),
        feed_forward=mixture(b, i, scoring="sigmoid", normalise=b.facts.flag("expert_weights_norm", True))
        if experts
        else dense(b, i),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        ff_norm=b.layer_norm(i, "ffn_norm"),
    )


def _kv_heads(config: Mapping[str, Any]) -> list[Any]:
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("full_attn_idxs") or range(config["num_hidden_layers"])
        kinds = ["full_attention" if i in full else "conv" for i in range(config["num_hidden_layers"])]
    return [config.get("num_key_value_heads") if kind == "full_attention" else 0 for kind in kinds]


def _size(config: Mapping[str, Any]) -> Any:
    """The dense models say how their size is rounded instead of saying it."""
    size = config.get("block_ff_dim") or config.get("intermediate_size")
    if size is None or not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is not None:
        size = int(config["block_ffn_dim_multiplier"] * size)
    of = config.get("block_multiple_of", 256)
    return of * -(-size // of)


KEYS: Keys = {
    "attention.head_count_kv": _kv_heads,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
NAMES: Names = {
    "token_embd_norm": "embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{e}.w1",
    "ffn_up_exps": "feed_forward.experts.{e}.w3",
    "ffn_down_exps": "feed_forward.experts.{e}.w2",
}
SIZES = {"norm_eps": 1e-5, "conv_L_cache": 3, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}

LFM2 = Family(
    name="lfm2",
    gguf=("lfm2",),
    safetensors=("lfm2",),
    layer=layer,
    keys={**KEYS, "feed_forward_length": _size},
    names=NAMES,
    defaults=SIZES,
)
LFM2MOE = Family(
    name="lfm2moe",
    gguf=("lfm2moe",),
    safetensors=("lfm2_moe",),
    layer=layer,
    keys=KEYS,
    names=NAMES,
    defaults=SIZES,
)
