"""GGUF files of tiny decoders with random weights, one or more for each family: every mixer, feed-forward and key.

The files are whole: llama.cpp loads them too, their vocabulary included. Everything is drawn from a seed made of the
model's name, so the same name gives the same bytes of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.tiny_writer import (
    EXPERT_FF,
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV_HEADS,
    USED,
    VOCAB,
    WIDTH,
    Tiny,
)

Maker = Callable[[Tiny], None]


def _plain(*, tied: bool = False, qk_norm: int = 0) -> Maker:
    def make(t: Tiny) -> None:
        t.outside(tied=tied)
        for i in range(t.layers):
            t.norms(i, "attn_norm", "ffn_norm")
            t.attention(i, qk_norm=qk_norm)
            t.dense(i)

    return make


def _qwen2(t: Tiny) -> None:
    t.drop("attention.key_length", "attention.value_length")
    t.keys(**{"attention.head_count": 2, "attention.head_count_kv": 1})
    t.outside(tied=True)
    for i in range(t.layers):
        t.norms(i, "attn_norm", "ffn_norm")
        t.attention(i, bias="qkv", heads=2, kv_heads=1)
        t.dense(i)


def _llama31(t: Tiny) -> None:
    t.raw("rope_freqs.weight", np.concatenate([np.ones(6), np.linspace(1.5, 8, HEAD // 2 - 6)]))
    t.keys(**{"rope.dimension_count": HEAD})
    _plain()(t)


def _linear(t: Tiny) -> None:
    t.keys(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.dimension_count": HEAD})
    _plain(tied=True)(t)


def _mixtral(t: Tiny) -> None:
    t.keys(expert_count=EXPERTS, expert_used_count=USED, feed_forward_length=EXPERT_FF)
    t.outside()
    for i in range(t.layers):
        t.norms(i, "attn_norm", "ffn_norm")
        t.attention(i)
        t.experts(i)


def _mistral3(t: Tiny) -> None:
    t.keys(
        **{
            "rope.dimension_count": HEAD,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 0.1,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        }
    )
    _plain()(t)


def _qwen3moe(t: Tiny) -> None:
    t.keys(expert_count=EXPERTS, expert_used_count=USED, expert_feed_forward_length=EXPERT_FF)
    t.outside()
    for i in range(t.layers):
        t.norms(i, "attn_norm", "ffn_norm")
        t.attention(i, qk_norm=1)
        t.experts(i)


def _qwen35(*, experts: bool, fused_ba: bool = False, drafts: bool = False) -> Maker:
    def make(t: Tiny) -> None:
        t.keys(
            full_attention_interval=4,
            **{
                "ssm.conv_kernel": 4,
                "ssm.state_size": HEAD,
                "ssm.group_count": 2,
                "ssm.time_step_rank": 4,
                "ssm.inner_size": 4 * HEAD,
                "rope.dimension_count": HEAD // 2,
            },
        )
        if not fused_ba:
            t.keys(**{"rope.dimension_sections": [3, 3, 2, 0]})
        if experts:
            t.keys(
                expert_count=EXPERTS,
                expert_used_count=USED,
                expert_feed_forward_length=EXPERT_FF,
                expert_shared_feed_forward_length=FF,
            )
        t.outside(tied=not experts)
        for i in range(t.layers):
            t.norms(i, "attn_norm", "post_attention_norm")
            if i % 4 == 3:
                t.attention(i, qk_norm=1, gated=True)
            else:
                t.delta_net(i)
                for name, rows in (("ssm_ba", 8),) if fused_ba else (("ssm_alpha", 4), ("ssm_beta", 4)):
                    t.matrix(f"blk.{i}.{name}", rows, WIDTH)
            if experts:
                t.experts(i)
                t.dense(i, suffix="_shexp")
                t.vector(f"blk.{i}.ffn_gate_inp_shexp.weight", WIDTH)
            else:
                t.dense(i)
        if drafts:
            _draft(t)

    return make


def _draft(t: Tiny) -> None:
    """A draft head behind the last layer, which text generation leaves out."""
    i = t.layers
    t.norms(i, "attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    t.attention(i, qk_norm=1, gated=True)
    t.dense(i)
    t.matrix(f"blk.{i}.nextn.eh_proj", WIDTH, 2 * WIDTH)
    t.keys(nextn_predict_layers=1)
    t.layers += 1


def _gemma(which: int) -> Maker:
    def make(t: Tiny) -> None:
        t.layers = 4 if which == 2 else 7
        t.keys(**{"attention.sliding_window": 8, "rope.freq_base": 10000.0 if which == 2 else 1e6})
        if which == 2:
            t.keys(attn_logit_softcapping=5.0, final_logit_softcapping=6.0)
        t.outside(tied=True)
        for i in range(t.layers):
            t.norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            t.attention(i, qk_norm=which - 2)
            t.dense(i)

    return make


def _gemma4(*, inputs: bool, experts: bool) -> Maker:
    def make(t: Tiny) -> None:
        t.layers, shared = (9, 3) if inputs else (6, 0)
        local = [i % 3 != 2 for i in range(t.layers)]
        t.raw("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * (HEAD - 8), np.float32))
        t.keys(
            **{
                "attention.sliding_window": 8,
                "attention.sliding_window_pattern": local,
                "attention.shared_kv_layers": shared,
                "attention.key_length": 2 * HEAD,
                "attention.value_length": 2 * HEAD,
                "attention.key_length_swa": HEAD,
                "attention.value_length_swa": HEAD,
                "rope.dimension_count": 2 * HEAD,
                "rope.dimension_count_swa": HEAD,
                "rope.freq_base": 1e6,
                "rope.freq_base_swa": 10000.0,
                "embedding_length_per_layer_input": 32 if inputs else 0,
                "final_logit_softcapping": 6.0,
            }
        )
        own = t.layers - shared
        t.keys(**{"attention.head_count_kv": [KV_HEADS if each else 1 for each in local]})
        if inputs:
            t.keys(feed_forward_length=[FF if i < own else 2 * FF for i in range(t.layers)])
            t.matrix("per_layer_token_embd", VOCAB, 32 * t.layers)
            t.matrix("per_layer_model_proj", 32 * t.layers, WIDTH)
            t.norm("per_layer_proj_norm", 32)
        if experts:
            t.keys(expert_count=EXPERTS, expert_used_count=USED, expert_feed_forward_length=EXPERT_FF)
        t.outside(tied=True)
        for i in range(t.layers):
            _gemma4_layer(t, i, local[i], i < own, inputs, experts, FF if i < own else 2 * FF)

    return make


def _gemma4_layer(t: Tiny, i: int, local: bool, own_kv: bool, inputs: bool, experts: bool, size: int) -> None:
    at = f"blk.{i}."
    t.norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    kv = "" if not own_kv else "kv" if local or inputs else "k"
    t.attention(i, kv_heads=KV_HEADS if local else 1, head=HEAD if local else 2 * HEAD, qk_norm=1, kv=kv)
    t.dense(i, size)
    t.raw(f"{at}layer_output_scale.weight", np.array([0.9], np.float32))
    if experts:
        t.norms(i, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        t.experts(i, fused=True)
        t.vector(f"{at}ffn_gate_inp.scale", WIDTH, mean=8.0)
        t.vector(f"{at}ffn_down_exps.scale", EXPERTS, mean=1.0)
    if inputs:
        t.matrix(f"{at}inp_gate", 32, WIDTH)
        t.matrix(f"{at}proj", WIDTH, 32)
        t.norms(i, "post_norm")


def _gpt_oss(t: Tiny) -> None:
    t.keys(
        expert_count=EXPERTS,
        expert_used_count=USED,
        expert_feed_forward_length=EXPERT_FF,
        **{
            "attention.sliding_window": 8,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    )
    t.outside()
    for i in range(t.layers):
        t.norms(i, "attn_norm", "post_attention_norm")
        t.attention(i, bias="qkvo")
        t.vector(f"blk.{i}.attn_sinks.weight", HEADS, mean=1.0)
        t.experts(i, bias=True, kind="MXFP4" if t.kind == "MXFP4" else None)


def _phi3(*, long: bool) -> Maker:
    def make(t: Tiny) -> None:
        t.drop("attention.key_length", "attention.value_length")
        t.keys(**{"attention.head_count": 2, "attention.head_count_kv": 1})
        t.keys(**{"rope.dimension_count": 12, "attention.sliding_window": 0})
        if long:
            t.keys(**{"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19})
            t.raw("rope_factors_long.weight", np.linspace(1.1, 9, 6))
            t.raw("rope_factors_short.weight", np.linspace(1, 2, 6))
        t.outside()
        for i in range(t.layers):
            t.norms(i, "attn_norm", "ffn_norm")
            t.attention(i, heads=2, kv_heads=1, fused=True)
            t.dense(i, fused=True)

    return make


def _olmo2(*, windows: bool) -> Maker:
    def make(t: Tiny) -> None:
        t.drop("attention.key_length", "attention.value_length")
        t.keys(**{"attention.head_count": 2, "attention.head_count_kv": 1})
        if windows:
            t.keys(
                **{
                    "attention.sliding_window": 8,
                    "attention.sliding_window_pattern": [i % 4 != 3 for i in range(t.layers)],
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 8.0,
                    "rope.scaling.original_context_length": 64,
                }
            )
        t.outside()
        for i in range(t.layers):
            t.norms(i, "post_attention_norm", "post_ffw_norm")
            t.attention(i, heads=2, kv_heads=1, qk_norm=2)
            t.dense(i)

    return make


def _granite(t: Tiny) -> None:
    t.keys(residual_scale=0.3, embedding_scale=3.0, logit_scale=2.0, **{"attention.scale": 0.1})
    t.keys(**{"rope.dimension_count": HEAD})
    _plain(tied=True)(t)


def _granitemoe(t: Tiny) -> None:
    t.keys(residual_scale=0.3, embedding_scale=3.0, logit_scale=2.0, **{"attention.scale": 0.1})
    t.keys(expert_count=EXPERTS, expert_used_count=USED, expert_shared_feed_forward_length=FF)
    t.keys(feed_forward_length=EXPERT_FF, **{"rope.dimension_count": HEAD})
    t.outside(tied=True)
    for i in range(t.layers):
        t.norms(i, "attn_norm", "ffn_norm")
        t.attention(i)
        t.experts(i)
        t.dense(i, suffix="_shexp")


def _mamba_keys(t: Tiny, groups: int) -> None:
    t.keys(
        **{
            "ssm.conv_kernel": 4,
            "ssm.state_size": 32,
            "ssm.group_count": groups,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 2 * WIDTH,
        }
    )


def _granitehybrid(*, experts: bool) -> Maker:
    def make(t: Tiny) -> None:
        t.keys(residual_scale=0.3, embedding_scale=3.0, logit_scale=2.0, **{"attention.scale": 0.1})
        t.keys(**{"attention.head_count_kv": [0, 0, KV_HEADS, 0], "rope.scaling.finetuned": not experts})
        t.keys(**{"rope.dimension_count": HEAD})
        _mamba_keys(t, 1)
        if experts:
            t.keys(expert_count=EXPERTS, expert_used_count=USED, expert_shared_feed_forward_length=FF)
            t.keys(feed_forward_length=EXPERT_FF)
        t.outside(tied=True)
        for i in range(t.layers):
            t.norms(i, "attn_norm", "ffn_norm")
            if i == 2:
                t.attention(i)
            else:
                t.mamba2(i, 1)
            if experts:
                t.experts(i)
            t.dense(i, suffix="_shexp" if experts else "")

    return make


def _lfm2(*, experts: bool) -> Maker:
    def make(t: Tiny) -> None:
        t.drop("attention.key_length", "attention.value_length")
        t.keys(**{"attention.head_count": 2, "attention.head_count_kv": [0, 0, 1, 0], "shortconv.l_cache": 3})
        if experts:
            t.keys(
                expert_count=EXPERTS,
                expert_used_count=USED,
                expert_feed_forward_length=EXPERT_FF,
                leading_dense_block_count=2,
                expert_gating_func=2,
            )
        t.outside(tied=True, norm="token_embd_norm")
        for i in range(t.layers):
            t.norms(i, "attn_norm", "ffn_norm")
            if i == 2:
                t.attention(i, heads=2, kv_heads=1, qk_norm=1)
            else:
                t.matrix(f"blk.{i}.shortconv.in_proj", 3 * WIDTH, WIDTH)
                t.raw(f"blk.{i}.shortconv.conv.weight", 0.5 * t.rng.standard_normal((WIDTH, 3)))
                t.matrix(f"blk.{i}.shortconv.out_proj", WIDTH, WIDTH)
            if experts and i >= 2:
                t.experts(i)
                t.vector(f"blk.{i}.exp_probs_b.bias", EXPERTS)
            else:
                t.dense(i)

    return make


def _glm4(t: Tiny) -> None:
    t.keys(**{"rope.dimension_count": HEAD // 2})
    t.outside()
    for i in range(t.layers):
        t.norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        t.attention(i, bias="qkv")
        t.dense(i, fused=True)


def _glm4moe(t: Tiny) -> None:
    t.keys(
        expert_count=EXPERTS,
        expert_used_count=USED,
        expert_feed_forward_length=EXPERT_FF,
        expert_shared_count=1,
        leading_dense_block_count=1,
        expert_gating_func=2,
        expert_weights_norm=True,
        expert_weights_scale=1.5,
        **{"rope.dimension_count": HEAD // 2},
    )
    t.outside()
    for i in range(t.layers):
        t.norms(i, "attn_norm", "post_attention_norm")
        t.attention(i, bias="qkv", qk_norm=1)
        if i:
            t.experts(i)
            t.vector(f"blk.{i}.exp_probs_b.bias", EXPERTS)
            t.dense(i, EXPERT_FF, suffix="_shexp")
        else:
            t.dense(i)


def _nemotron_h(*, experts: bool) -> Maker:
    def make(t: Tiny) -> None:
        kinds = "M-M*-M" if not experts else "MEM*EM"
        t.layers = len(kinds)
        size = EXPERT_FF if experts else FF
        t.keys(feed_forward_length=[size if kind in "-E" else 0 for kind in kinds])
        t.keys(**{"attention.head_count_kv": [KV_HEADS if kind == "*" else 0 for kind in kinds]})
        t.keys(**{"attention.layer_norm_epsilon": 1e-5})
        _mamba_keys(t, 2)
        if experts:
            t.keys(
                expert_count=EXPERTS,
                expert_used_count=USED,
                expert_feed_forward_length=EXPERT_FF,
                expert_shared_feed_forward_length=FF,
                expert_shared_count=1,
                expert_weights_norm=True,
                expert_weights_scale=2.5,
                expert_group_count=1,
                expert_group_used_count=1,
            )
        t.outside()
        for i, kind in enumerate(kinds):
            t.norms(i, "attn_norm")
            if kind == "M":
                t.mamba2(i, 2)
            elif kind == "*":
                t.attention(i)
            elif kind == "-":
                t.dense(i, gate=False)
            else:
                t.experts(i, gate=False)
                t.vector(f"blk.{i}.exp_probs_b.bias", EXPERTS)
                t.dense(i, gate=False, suffix="_shexp")

    return make


MODELS: dict[str, tuple[str, str, Maker]] = {
    "llama": ("llama", "F32", _plain()),
    "llama-3.1": ("llama", "F32", _llama31),
    "llama-linear": ("llama", "F32", _linear),
    "llama-q8": ("llama", "Q8_0", _plain(tied=True)),
    "mixtral": ("llama", "F32", _mixtral),
    "mistral3": ("mistral3", "F32", _mistral3),
    "qwen2": ("qwen2", "F32", _qwen2),
    "qwen3": ("qwen3", "F32", _plain(qk_norm=1)),
    "qwen3moe": ("qwen3moe", "F32", _qwen3moe),
    "qwen3moe-q4": ("qwen3moe", "Q4_0", _qwen3moe),
    "qwen3next": ("qwen3next", "F32", _qwen35(experts=True, fused_ba=True)),
    "qwen35": ("qwen35", "F32", _qwen35(experts=False)),
    "qwen35-mtp": ("qwen35", "F32", _qwen35(experts=False, drafts=True)),
    "qwen35moe": ("qwen35moe", "F32", _qwen35(experts=True)),
    "gemma2": ("gemma2", "F32", _gemma(2)),
    "gemma3": ("gemma3", "F32", _gemma(3)),
    "gemma4": ("gemma4", "F32", _gemma4(inputs=False, experts=False)),
    "gemma4-small": ("gemma4", "F32", _gemma4(inputs=True, experts=False)),
    "gemma4-mixture": ("gemma4", "F32", _gemma4(inputs=False, experts=True)),
    "gpt-oss": ("gpt-oss", "F32", _gpt_oss),
    "phi3": ("phi3", "F32", _phi3(long=False)),
    "phi3-long": ("phi3", "F32", _phi3(long=True)),
    "smollm3": ("smollm3", "F32", _plain(tied=True)),
    "olmo2": ("olmo2", "F32", _olmo2(windows=False)),
    "olmo3": ("olmo2", "F32", _olmo2(windows=True)),
    "granite": ("granite", "F32", _granite),
    "granitemoe": ("granitemoe", "F32", _granitemoe),
    "granitehybrid": ("granitehybrid", "F32", _granitehybrid(experts=False)),
    "granitehybrid-mixture": ("granitehybrid", "F32", _granitehybrid(experts=True)),
    "lfm2": ("lfm2", "F32", _lfm2(experts=False)),
    "lfm2moe": ("lfm2moe", "F32", _lfm2(experts=True)),
    "glm4": ("glm4", "F32", _glm4),
    "glm4moe": ("glm4moe", "F32", _glm4moe),
    "nemotron_h": ("nemotron_h", "F32", _nemotron_h(experts=False)),
    "nemotron_h_moe": ("nemotron_h_moe", "F32", _nemotron_h(experts=True)),
}
"""Name to (architecture, type of matrices, what writes it)."""


def write_model(path: Path, name: str, kind: str | None = None) -> Path:
    """The tiny model `name` at `path`; its matrices in `kind` instead of its own type."""
    architecture, own, maker = MODELS[name]
    tiny = Tiny(path, architecture, kind or own, name)
    maker(tiny)
    tiny.close()
    return path


def some_tokens(count: int = 40, seed: int = 1) -> list[int]:
    """Token ids that every tiny model has."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, VOCAB - 2, count).tolist()
    return drawn
