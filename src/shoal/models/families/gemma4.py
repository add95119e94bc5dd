"""Gemma 4: head sizes, KV heads and positions differ between windowed and full layers; some layers share KV.

Values are normalised; full layers may have no V of their own. The small models add per-layer embeddings, the mixture
runs a dense feed-forward beside its experts, each with norms of its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.models.decoder import Layer, LayerInput, LayerInputs, Mixture, Norm
from shoal.models.families.attention import attention, windows
from shoal.models.families.builder import Builder, root
from shoal.models.families.family import Family
from shoal.models.families.feedforward import dense, mixture
from shoal.models.families.gemma import NAMES, cap, local_layers


def layer(b: Builder, i: int) -> Layer:
    """Attention and a feed-forward, each with norms before and after, and the layer's own embedding."""
    at = f"blk.{i}."
    window = windows(b, 6)
    experts = b.has(f"{at}ffn_gate_inp.weight")
    out_scale = f"{at}layer_output_scale.weight"
    return Layer(
        mixer=attention(
            b,
            i,
            window=window[i],
            local=window[i] is not None,
            local_base=10_000.0,
            qk_norm="head",
            scale=1.0,
            v_norm=Norm(b.eps),
            kv_layer=kv_layer(b, i, window),
        ),
        feed_forward=beside(b, i) if experts else dense(b, i, activation="gelu_tanh"),
        mixer_norm=b.layer_norm(i, "attn_norm"),
        mixer_post_norm=b.layer_norm(i, "post_attention_norm"),
        ff_norm=None if experts else b.layer_norm(i, "ffn_norm"),
        ff_post_norm=b.layer_norm(i, "post_ffw_norm"),
        layer_input=layer_input(b, i),
        output_scale=b.vector(out_scale, 1) if b.has(out_scale) else None,
    )


def kv_layer(b: Builder, i: int, window: list[int | None]) -> int | None:
    """The last layers read the K and V of the last layer of their kind that has some."""
    first = b.layers - b.facts.count("attention.shared_kv_layers", 0, least=0)
    if i < first:
        return None
    like = [j for j in range(first) if (window[j] is None) == (window[i] is None)]
    if not like:
        b.facts.fail("attention.shared_kv_layers", b.layers - first, "layers of each kind before the shared")
    return like[-1]


def beside(b: Builder, i: int) -> Mixture:
    """A dense feed-forward and experts side by side; the router sees the stream normalised without a weight."""
    scale = b.vector(f"blk.{i}.ffn_gate_inp.scale", b.width, factor=float(np.float32(1 / root(b.width))))
    return mixture(
        b,
        i,
        activation="gelu_tanh",
        router_norm=Norm(b.eps, scale),
        experts_norm=b.layer_norm(i, "pre_ffw_norm_2"),
        experts_post_norm=b.layer_norm(i, "post_ffw_norm_2"),
        expert_scales=b.vector(f"blk.{i}.ffn_down_exps.scale", b.facts.count("expert_count")),
        shared=dense(b, i, activation="gelu_tanh"),
        shared_norm=b.layer_norm(i, "ffn_norm"),
        shared_post_norm=b.layer_norm(i, "post_ffw_norm_1"),
    )


def layer_input(b: Builder, i: int) -> LayerInput | None:
    """The small models' per-layer embeddings."""
    size, at = b.facts.count("embedding_length_per_layer_input", 0, least=0), f"blk.{i}."
    if not size:
        return None
    return LayerInput(
        b.linear(f"{at}inp_gate", size, b.width),
        b.linear(f"{at}proj", b.width, size),
        b.layer_norm(i, "post_norm"),
    )


def whole(b: Builder) -> Mapping[str, Any]:
    """Scaled embeddings, a soft cap, and the tables that per-layer embeddings come from."""
    size = b.facts.count("embedding_length_per_layer_input", 0, least=0)
    inputs = None
    if size:
        table = b.stored("per_layer_token_embd.weight")
        inputs = LayerInputs(
            size=size,
            embedding=b.weight("per_layer_token_embd.weight", (table.shape[0], b.layers * size)),
            embedding_scale=root(size),
            project=b.linear("per_layer_model_proj", b.layers * size, b.width),
            project_scale=float(np.float32(1 / root(b.width))),
            norm=b.norm("per_layer_proj_norm", size),
            scale=float(np.float32(2**-0.5)),
        )
    return {
        "embedding_scale": root(b.width),
        "soft_cap": cap(b, "final_logit_softcapping", 0),
        "layer_inputs": inputs,
    }


def _full(config: Mapping[str, Any], key: str, older: str) -> Any:
    """A value of the full layers: in the newest files each layer's own, before that under a name of its own."""
    own, kinds = config.get("per_layer_config") or {}, config.get("layer_types") or []
    each = [own[str(i)].get(key) for i, kind in enumerate(kinds) if kind == "full_attention" and str(i) in own]
    return next((value for value in each if value), None) or config.get(older) or config.get(key)


def _head(config: Mapping[str, Any]) -> Any:
    return _full(config, "head_dim", "global_head_dim")


def _kv_heads(config: Mapping[str, Any]) -> Any:
    kinds, full = local_layers(config), _full(config, "num_key_value_heads", "num_global_key_value_heads")
    return None if kinds is None else [config.get("num_key_value_heads") if local else full for local in kinds]


def _feed_forward(config: Mapping[str, Any]) -> Any:
    size, shared = config.get("intermediate_size"), config.get("num_kv_shared_layers") or 0
    layers = config["num_hidden_layers"]
    if not config.get("use_double_wide_mlp") or size is None:
        return size
    return [size * (2 if i >= layers - shared else 1) for i in range(layers)]


FAMILY = Family(
    name="gemma4",
    gguf=("gemma4",),
    safetensors=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    layer=layer,
    whole=whole,
    keys={
        "activation": "hidden_activation",
        "attention.sliding_window_pattern": local_layers,
        "attention.shared_kv_layers": lambda c: c.get("num_kv_shared_layers") or 0,
        "attention.head_count_kv": _kv_heads,
        "attention.key_length": _head,
        "attention.value_length": _head,
        "attention.key_length_swa": "head_dim",
        "attention.value_length_swa": "head_dim",
        "rope.dimension_count": _head,
        "rope.dimension_count_swa": "head_dim",
        "feed_forward_length": _feed_forward,
        "embedding_length_per_layer_input": lambda c: c.get("hidden_size_per_layer_input") or 0,
        "final_logit_softcapping": lambda c: c.get("final_logit_softcapping") or 0,
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": lambda c: c.get("moe_intermediate_size") or c.get("expert_intermediate_size"),
    },
    names={
        **NAMES,
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
    },
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
)
