"""A decoder as the native kernels take it: facts of its layers, and tensors to pack. csrc/model.h is the other side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from shoal.errors import UnsupportedModelError
from shoal.models.decoder import (
    Activation,
    Attention,
    Decoder,
    DeltaNet,
    Dense,
    FeedForward,
    Float,
    Layer,
    LayerInputs,
    Linear,
    Mamba2,
    Mixer,
    Mixture,
    Norm,
    Rotary,
    ShortConv,
    Weight,
)
from shoal.runners.balance import balances, kv_source
from shoal.runners.native.pack import FORMS, Ones, PackedTensor

Facts: TypeAlias = dict[str, Any]

MAX_HEAD, MAX_TAPS, GROUP = 512, 8, 32
_MIXERS: dict[type, int] = {Attention: 1, DeltaNet: 2, Mamba2: 3, ShortConv: 4}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "swiglu_clipped": 3, "gelu": 4}
_ROUTINGS = {"softmax": 0, "sigmoid": 1, "chosen": 2}
_NO_LIMIT = 3e38


def refuses(model: Decoder) -> str | None:
    """Why the native kernels leave this model to another runner, or None when they take it. Looks at no weight."""
    if model.embedding_norm is not None:
        return "a norm of the embedding"
    if not any(isinstance(layer.mixer, Attention) for layer in model.layers):
        return "no layer has attention"
    if model.width % GROUP:
        return f"embedding {model.width} is no multiple of {GROUP}"
    for layer in model.layers:
        reason = _refuses_mixer(layer.mixer) or _refuses_feed(layer.feed_forward)
        if reason is not None:
            return reason
    for part in tensors_of(model):
        if len(part.shape) == 2 and (part.type not in FORMS or part.shape[1] % FORMS[part.type].block):
            return f"tensor {part.weight.name} has type {part.type} and shape {list(part.weight.shape)}"
    return None


def _refuses_mixer(mixer: Mixer | None) -> str | None:
    if isinstance(mixer, ShortConv):
        return f"a convolution of {mixer.kernel} taps" if mixer.kernel > MAX_TAPS else None
    if isinstance(mixer, Attention):
        sizes, queries = (mixer.key_dim, mixer.value_dim), mixer.heads % mixer.kv_heads
        if queries:
            return f"{mixer.heads} heads over {mixer.kv_heads}"
    elif isinstance(mixer, Mamba2):
        sizes = (mixer.state, mixer.head_dim)
    elif isinstance(mixer, DeltaNet):
        sizes = (mixer.key_dim, mixer.value_dim)
    else:
        return None
    if any(size % GROUP or size > MAX_HEAD for size in sizes):
        return f"head size {' and '.join(map(str, dict.fromkeys(sizes)))} is no multiple of {GROUP} up to {MAX_HEAD}"
    if not isinstance(mixer, Attention) and mixer.kernel > MAX_TAPS:
        return f"a convolution of {mixer.kernel} taps"
    return None


def _refuses_feed(feed: FeedForward | None) -> str | None:
    if feed is None:
        return None
    parts: list[FeedForward] = [feed]
    if isinstance(feed, Mixture) and feed.shared is not None:
        parts.append(feed.shared)
    for part in parts:
        if part.size % GROUP:
            return f"feed-forward size {part.size} is no multiple of {GROUP}"
    if isinstance(feed, Mixture) and (feed.latent_in is not None or feed.latent_out is not None):
        return "a mixture in a smaller width"
    return None


# -- facts -----------------------------------------------------------------------------------------------------------


def facts_of(model: Decoder) -> Facts:
    """What the packed file says of the model beside its tensors; JSON-ready."""
    rotaries: list[Rotary] = []
    layers = [_layer(layer, rotaries, model.width) for layer in model.layers]
    return {
        "name": model.name,
        "architecture": model.family,
        "embd": model.width,
        "vocab": model.vocab_size,
        "context": model.context_length,
        "embedding_scale": float(model.embedding_scale),
        "logit_scale": float(model.logit_scale),
        "cap": float(model.soft_cap or 0.0),
        "norm": _norm(model.norm),
        "inputs": {} if model.layer_inputs is None else _inputs(model.layer_inputs),
        "rotaries": [{"frequencies": list(r.frequencies), "factor": float(r.factor)} for r in rotaries],
        "layers": layers,
    }


def _inputs(inputs: LayerInputs) -> Facts:
    scales = {name: float(getattr(inputs, name)) for name in ("embedding_scale", "project_scale", "scale")}
    return {"size": inputs.size, "norm": _norm(inputs.norm), **scales}


def _norm(norm: Norm) -> Facts:
    return {"eps": float(norm.eps), "layer": norm.kind == "layer"}


def _layer(layer: Layer, rotaries: list[Rotary], width: int) -> Facts:
    norms = {name: getattr(layer, name) for name in _NORMS}
    facts: Facts = {"residual_scale": float(layer.residual_scale)}
    if layer.output_scale is not None:
        facts["output_scale"] = float(layer.output_scale.values().reshape(-1)[0])
    mixer = layer.mixer
    if mixer is not None:
        facts["mixer"] = _MIXERS[type(mixer)]
    if isinstance(mixer, Attention):
        facts |= _attention(mixer, rotaries)
        norms |= {"q_norm": mixer.q_norm, "k_norm": mixer.k_norm, "v_norm": mixer.v_norm}
    elif isinstance(mixer, DeltaNet):
        facts |= {"heads": mixer.value_heads, "kv_heads": mixer.key_heads, "key_of": list(mixer.key_of)}
        facts |= {"dim": mixer.key_dim, "v_dim": mixer.value_dim, "taps": mixer.kernel, "l2_eps": float(mixer.l2_eps)}
        norms["norm"] = mixer.norm
    elif isinstance(mixer, Mamba2):
        facts |= {"heads": mixer.heads, "kv_heads": mixer.groups, "dim": mixer.state, "v_dim": mixer.head_dim}
        facts |= {"key_of": [h // (mixer.heads // mixer.groups) for h in range(mixer.heads)], "taps": mixer.kernel}
        low, high = mixer.dt_limits
        facts |= {"norm_groups": mixer.norm_groups, "least_step": float(low), "most_step": min(float(high), _NO_LIMIT)}
        norms["norm"] = mixer.norm
    elif isinstance(mixer, ShortConv):
        facts |= {"heads": 1, "kv_heads": 1, "dim": 0, "v_dim": width, "taps": mixer.kernel}
    facts |= _feed(layer.feed_forward)
    if isinstance(layer.feed_forward, Mixture):
        norms |= {name: getattr(layer.feed_forward, name) for name in _MIXTURE_NORMS}
    if layer.layer_input is not None:
        facts["takes_input"] = True
    return facts | {"norms": {name: _norm(norm) for name, norm in norms.items() if norm is not None}}


def _attention(mixer: Attention, rotaries: list[Rotary]) -> Facts:
    facts: Facts = {
        "heads": mixer.heads,
        "kv_heads": mixer.kv_heads,
        "dim": mixer.key_dim,
        "v_dim": mixer.value_dim,
        "scale": float(mixer.scale),
        "norm_over_heads": mixer.norm_over_heads,
        "keys_are_values": mixer.kv_layer is None and mixer.v is None,
        "window": mixer.window or 0,
        "cap": float(mixer.soft_cap or 0.0),
    }
    if mixer.rotary is not None:
        if mixer.rotary not in rotaries:
            rotaries.append(mixer.rotary)
        facts["rotary"] = rotaries.index(mixer.rotary)
    if mixer.kv_layer is not None:
        facts["kv_layer"] = mixer.kv_layer
    if mixer.query_scale is not None:
        facts |= {"query_beta": float(mixer.query_scale.beta), "query_length": mixer.query_scale.length}
    return facts


def _feed(feed: FeedForward | None) -> Facts:
    if feed is None:
        return {}
    facts: Facts = {"ff": feed.size, "activation": _ACTIVATIONS[feed.activation], "feed": 1}
    if isinstance(feed, Dense):
        return facts
    facts |= {"feed": 2, "experts": feed.experts, "used": feed.used, "groups": feed.groups}
    facts |= {"groups_used": feed.groups_used, "routing": _ROUTINGS[feed.scoring], "normalise": feed.normalise}
    facts["route_scale"] = float(feed.scale)
    if feed.shared is not None:
        facts |= {"shared": feed.shared.size, "shared_activation": _ACTIVATIONS[feed.shared.activation]}
    return facts


# -- tensors ---------------------------------------------------------------------------------------------------------

_NORMS = ("mixer_norm", "mixer_post_norm", "ff_norm", "ff_post_norm")
_MIXTURE_NORMS = ("router_norm", "experts_norm", "experts_post_norm", "shared_norm", "shared_post_norm")


def tensors_of(model: Decoder) -> list[PackedTensor]:
    """The tensors of the packed file, named by their paths in the description; experts lie one under the other."""
    parts = [PackedTensor("embedding", _matrix_shape(model.embedding), model.embedding)]
    parts += _norm_parts("norm", model.norm, model.width)
    parts += [part for part in _linear("head", model.head) if not (model.tied and part.name == "head.weight")]
    inputs = model.layer_inputs
    if inputs is not None:
        parts.append(PackedTensor("layer_inputs.embedding", _matrix_shape(inputs.embedding), inputs.embedding))
        parts += _linear("layer_inputs.project", inputs.project)
        parts += _norm_parts("layer_inputs.norm", inputs.norm, inputs.size)
    factors = balances(model)
    for i, layer in enumerate(model.layers):
        parts += _layer_parts(f"layers.{i}.", layer, model.width, factors.get(kv_source(i, layer)))
    return parts


def _layer_parts(at: str, layer: Layer, width: int, balance: Float | None) -> Iterator[PackedTensor]:
    for name in _NORMS:
        yield from _norm_parts(at + name, getattr(layer, name), width)
    mixer, feed = layer.mixer, layer.feed_forward
    if mixer is not None:
        yield from _fields(at + "mixer.", mixer)
    if isinstance(mixer, Attention):
        sizes = (mixer.heads, mixer.kv_heads) if mixer.norm_over_heads else (1, 1)
        yield from _norm_parts(at + "mixer.q_norm", mixer.q_norm, sizes[0] * mixer.key_dim, balance)
        inverse = None if balance is None else np.float32(1) / balance
        yield from _norm_parts(at + "mixer.k_norm", mixer.k_norm, sizes[1] * mixer.key_dim, inverse)
        yield from _norm_parts(at + "mixer.v_norm", mixer.v_norm, mixer.value_dim)
    elif isinstance(mixer, DeltaNet):
        yield from _norm_parts(at + "mixer.norm", mixer.norm, mixer.value_dim)
    elif isinstance(mixer, Mamba2):
        yield from _norm_parts(at + "mixer.norm", mixer.norm, mixer.heads * mixer.head_dim)
    if feed is not None:
        yield from _fields(at + "feed_forward.", feed)
    if isinstance(feed, Mixture):
        for name in _MIXTURE_NORMS:
            yield from _norm_parts(f"{at}feed_forward.{name}", getattr(feed, name), width)
        if feed.shared is not None:
            yield from _fields(at + "feed_forward.shared.", feed.shared)
    if layer.layer_input is not None:
        yield from _linear(at + "layer_input.gate", layer.layer_input.gate)
        yield from _linear(at + "layer_input.project", layer.layer_input.project)
        yield from _norm_parts(at + "layer_input.norm", layer.layer_input.norm, width)


def _fields(at: str, node: Mixer | FeedForward) -> Iterator[PackedTensor]:
    """Every linear map and vector that a node holds itself. A convolution is turned to [taps, channels]."""
    for name in node.__dataclass_fields__:
        value = getattr(node, name)
        if isinstance(value, Linear):
            yield from _linear(at + name, value)
        elif isinstance(value, Weight):
            yield PackedTensor(at + name, (math.prod(value.shape),), value, turned=name == "conv")


def _linear(name: str, linear: Linear) -> Iterator[PackedTensor]:
    yield PackedTensor(f"{name}.weight", _matrix_shape(linear.weight), linear.weight)
    if linear.bias is not None:
        yield PackedTensor(f"{name}.bias", (math.prod(linear.bias.shape),), linear.bias)


def _matrix_shape(weight: Weight) -> tuple[int, int]:
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _norm_parts(name: str, norm: Norm | None, size: int, by: Float | None = None) -> Iterator[PackedTensor]:
    if norm is None:
        return
    yield PackedTensor(f"{name}.weight", (size,), norm.weight if norm.weight is not None else Ones((size,)), by=by)
    if norm.bias is not None:
        yield PackedTensor(f"{name}.bias", (size,), norm.bias)


def check(model: Decoder, core: Any) -> None:
    """`UnsupportedModelError` when the extension finds a size of the model that its kernels cannot do."""
    try:
        core.sizes(facts_of(model) | {"kv_bits": 16})
    except core.FormatError as error:
        raise UnsupportedModelError(f"{model.name}: {error}", value=model.family, hint="use another runner") from error
