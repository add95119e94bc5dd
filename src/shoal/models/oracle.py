"""The exact answer: any `Decoder` in plain numpy, float32 products and float64 sums, no cache, one sequence.

Slow and short on purpose. What the runners compute is measured against this, over the weights exactly as the file
stores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.models.decoder import (
    Activation,
    Attention,
    Decoder,
    DeltaNet,
    Dense,
    Float,
    Layer,
    LayerInputs,
    Linear,
    Mamba2,
    Mixture,
    Norm,
    Rotary,
    ShortConv,
    Weight,
)

Keys = tuple[Float, Float]
"""What attention reads of a layer: keys [T, kv_heads, key_dim], turned, and values [T, kv_heads, value_dim]."""


def logits(model: Decoder, tokens: Sequence[int]) -> Float:
    """Logits [T, vocab_size] after each of `tokens`, which stand at positions 0 to T - 1."""
    table = model.embedding.values()
    x = table[np.asarray(tokens, dtype=np.intp)] * np.float32(model.embedding_scale)
    if model.embedding_norm is not None:
        x = norm(x, model.embedding_norm)
    inputs = None if model.layer_inputs is None else _layer_inputs(model.layer_inputs, x, tokens, len(model.layers))
    kept: dict[int, Keys] = {}
    for i, layer in enumerate(model.layers):
        x = _layer(x, layer, i, kept, None if inputs is None else inputs[:, i])
    x = norm(x, model.norm)
    out = (x @ table.T if model.tied else linear(x, model.head)) * np.float32(model.logit_scale)
    return out if model.soft_cap is None else _cap(out, model.soft_cap)


def mean_kl(exact: Float, other: Float) -> float:
    """Mean over rows of KL(exact || other) of the softmaxes, in nats."""
    p, q = (a - np.logaddexp.reduce(a.astype(np.float64), axis=-1, keepdims=True) for a in (exact, other))
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def _layer(x: Float, layer: Layer, i: int, kept: dict[int, Keys], layer_input: Float | None) -> Float:
    scale = np.float32(layer.residual_scale)
    if layer.mixer is not None:
        h = _mix(_maybe(x, layer.mixer_norm), layer.mixer, i, kept)
        x = x + scale * _maybe(h, layer.mixer_post_norm)
    if layer.feed_forward is not None:
        h = _maybe(x, layer.ff_norm)
        h = mixture(h, layer.feed_forward) if isinstance(layer.feed_forward, Mixture) else dense(h, layer.feed_forward)
        x = x + scale * _maybe(h, layer.ff_post_norm)
    if layer.layer_input is not None and layer_input is not None:
        part = layer.layer_input
        h = _ACTIVATIONS["gelu_tanh"](linear(x, part.gate)) * layer_input
        x = x + norm(linear(h, part.project), part.norm)
    return x if layer.output_scale is None else x * layer.output_scale.values()


def _mix(x: Float, mixer: Attention | DeltaNet | Mamba2 | ShortConv, i: int, kept: dict[int, Keys]) -> Float:
    if isinstance(mixer, Attention):
        return attention(x, mixer, i, kept)
    if isinstance(mixer, DeltaNet):
        return delta_net(x, mixer)
    return mamba2(x, mixer) if isinstance(mixer, Mamba2) else short_conv(x, mixer)


def _layer_inputs(part: LayerInputs, x: Float, tokens: Sequence[int], layers: int) -> Float:
    projected = linear(x, part.project) * np.float32(part.project_scale)
    projected = norm(projected.reshape(len(x), layers, part.size), part.norm)
    looked_up = part.embedding.values()[np.asarray(tokens, dtype=np.intp)] * np.float32(part.embedding_scale)
    out: Float = (projected + looked_up.reshape(projected.shape)) * np.float32(part.scale)
    return out


# Parts.


def linear(x: Float, part: Linear) -> Float:
    """x [T, inputs] through `part`, [T, outputs]."""
    y: Float = x @ part.weight.values().T
    return y if part.bias is None else y + part.bias.values()


def norm(x: Float, part: Norm) -> Float:
    """Over the last axis of `x`."""
    wide: NDArray[np.float64] = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True) if part.kind == "layer" else wide
    out: Float = (centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + part.eps)).astype(np.float32)
    out = out if part.weight is None else out * part.weight.values()
    return out if part.bias is None else out + part.bias.values()


def _maybe(x: Float, part: Norm | None) -> Float:
    return x if part is None else norm(x, part)


def rotate(x: Float, part: Rotary) -> Float:
    """Turn x [T, H, D] by positions 0 to T - 1: element i with i + pairs."""
    n = part.pairs
    angle = np.arange(len(x))[:, None, None] * np.asarray(part.frequencies)
    cos, sin = ((f(angle) * part.factor).astype(np.float32) for f in (np.cos, np.sin))
    out = x.copy()
    out[..., :n] = x[..., :n] * cos - x[..., n : 2 * n] * sin
    out[..., n : 2 * n] = x[..., n : 2 * n] * cos + x[..., :n] * sin
    return out


def sigmoid(x: Float) -> Float:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        out: Float = (1 / (1 + np.exp(-x))).astype(np.float32)
    return out


def silu(x: Float) -> Float:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def softplus(x: Float) -> Float:
    """log(1 + exp(x))."""
    out: Float = np.logaddexp(np.float32(0), x)
    return out


def softmax(x: Float) -> Float:
    """Over the last axis."""
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    out: Float = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return out


def _cap(x: Float, cap: float) -> Float:
    out: Float = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out


def _gelu_tanh(x: Float) -> Float:
    out: Float = 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))
    return out


def _gelu(x: Float) -> Float:
    error = np.vectorize(math.erf, otypes=[np.float32])
    out: Float = 0.5 * x * (1 + error(x / math.sqrt(2)))
    return out


_ACTIVATIONS: dict[Activation, Callable[[Float], Float]] = {
    "silu": silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def _activate(gate: Float | None, up: Float, kind: Activation) -> Float:
    if kind == "swiglu_clipped":
        assert gate is not None
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)
    return _ACTIVATIONS[kind](up) if gate is None else _ACTIVATIONS[kind](gate) * up


# Mixers.


def attention(x: Float, part: Attention, i: int, kept: dict[int, Keys]) -> Float:
    """Causal attention of x [T, n]. Leaves the keys and values of layer `i` in `kept`, or reads another's."""
    t = len(x)
    q = _head_norm(linear(x, part.q).reshape(t, part.heads, part.key_dim), part, part.q_norm)
    if part.rotary is not None:
        q = rotate(q, part.rotary)
    if part.query_scale is not None:
        grown = np.log(1 + np.floor(np.arange(t) / part.query_scale.length))
        q = q * (1 + part.query_scale.beta * grown).astype(np.float32)[:, None, None]
    if part.kv_layer is None:
        kept[i] = _keys(x, part)
    k, v = kept[i if part.kv_layer is None else part.kv_layer]
    ago = np.arange(t)[:, None] - np.arange(t)
    hidden = (ago < 0) if part.window is None else (ago < 0) | (ago >= part.window)
    sinks = None if part.sinks is None else part.sinks.values()
    out = np.empty((t, part.heads, part.value_dim), np.float32)
    for head in range(part.heads):
        group = head // (part.heads // part.kv_heads)
        scores = (q[:, head] @ k[:, group].T) * np.float32(part.scale)
        if part.soft_cap is not None:
            scores = _cap(scores, part.soft_cap)
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((t, 1), sinks[head])], axis=1)
        out[:, head] = softmax(scores)[:, :t] @ v[:, group]
    mixed = out.reshape(t, -1)
    return linear(mixed if part.gate is None else mixed * sigmoid(linear(x, part.gate)), part.out)


def _keys(x: Float, part: Attention) -> Keys:
    assert part.k is not None
    raw = linear(x, part.k).reshape(len(x), part.kv_heads, part.key_dim)
    v = raw if part.v is None else linear(x, part.v).reshape(len(x), part.kv_heads, part.value_dim)
    k = _head_norm(raw, part, part.k_norm)
    return k if part.rotary is None else rotate(k, part.rotary), _maybe(v, part.v_norm)


def _head_norm(x: Float, part: Attention, over: Norm | None) -> Float:
    if over is None:
        return x
    return norm(x.reshape(len(x), -1), over).reshape(x.shape) if part.norm_over_heads else norm(x, over)


def convolve(x: Float, weight: Weight, bias: Weight | None) -> Float:
    """A causal convolution of each channel: x [T, channels], weight [channels, kernel], zero before the start."""
    taps = weight.values()
    kernel = taps.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1]), np.float32), x])
    out = np.zeros_like(x)
    for j in range(kernel):
        out += padded[j : j + len(x)] * taps[:, j]
    return out if bias is None else out + bias.values()


def short_conv(x: Float, part: ShortConv) -> Float:
    """See `ShortConv`."""
    mixed = convolve(linear(x, part.b) * linear(x, part.x), part.conv, part.conv_bias)
    return linear(linear(x, part.c) * mixed, part.out)


def delta_net(x: Float, part: DeltaNet) -> Float:
    """See `DeltaNet`; one position after the other."""
    t = len(x)
    mixed = silu(convolve(np.concatenate([linear(x, p) for p in (part.q, part.k, part.v)], axis=1), part.conv, None))
    keys = part.key_heads * part.key_dim
    q, k = (a.reshape(t, part.key_heads, part.key_dim) for a in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + np.float32(part.l2_eps)) for a in (q, k))
    q, k = q[:, list(part.key_of)] * np.float32(part.key_dim**-0.5), k[:, list(part.key_of)]
    v = mixed[:, 2 * keys :].reshape(t, part.value_heads, part.value_dim)
    decay = np.exp(part.decay.values() * softplus(linear(x, part.alpha) + part.dt_bias.values()))
    beta = sigmoid(linear(x, part.beta))
    state = np.zeros((part.value_heads, part.key_dim, part.value_dim), np.float32)
    out = np.empty_like(v)
    for at in range(t):
        state *= decay[at][:, None, None]
        missing = beta[at][:, None] * (v[at] - np.einsum("hkv,hk->hv", state, k[at]))
        state += k[at][:, :, None] * missing[:, None, :]
        out[at] = np.einsum("hkv,hk->hv", state, q[at])
    gated = norm(out, part.norm) * silu(linear(x, part.z).reshape(out.shape))
    return linear(gated.reshape(t, -1), part.out)


def mamba2(x: Float, part: Mamba2) -> Float:
    """See `Mamba2`; one position after the other."""
    t, inner = len(x), part.heads * part.head_dim
    mixed = np.concatenate([linear(x, p) for p in (part.x, part.b, part.c)], axis=1)
    mixed = silu(convolve(mixed, part.conv, part.conv_bias))
    h = mixed[:, :inner].reshape(t, part.heads, part.head_dim)
    group = np.arange(part.heads) // (part.heads // part.groups)
    b, c = (a.reshape(t, part.groups, part.state)[:, group] for a in np.split(mixed[:, inner:], 2, axis=1))
    dt = np.clip(softplus(linear(x, part.dt) + part.dt_bias.values()), *part.dt_limits).astype(np.float32)
    kept = np.exp(dt * part.decay.values())
    skip = part.skip.values()[:, None]
    state = np.zeros((part.heads, part.head_dim, part.state), np.float32)
    out = np.empty_like(h)
    for at in range(t):
        state = state * kept[at][:, None, None] + (dt[at][:, None] * h[at])[:, :, None] * b[at][:, None, :]
        out[at] = np.einsum("hds,hs->hd", state, c[at]) + skip * h[at]
    gated = out.reshape(t, -1) * silu(linear(x, part.z))
    if part.norm is not None and part.norm.weight is not None:
        grouped = norm(gated.reshape(t, part.norm_groups, -1), Norm(part.norm.eps))
        gated = grouped.reshape(t, -1) * part.norm.weight.values()
    return linear(gated, part.out)


# Feed-forwards.


def dense(x: Float, part: Dense) -> Float:
    """See `Dense`."""
    gate = None if part.gate is None else linear(x, part.gate)
    return linear(_activate(gate, linear(x, part.up), part.activation), part.down)


def mixture(x: Float, part: Mixture) -> Float:
    """See `Mixture`; each expert's weights are taken once, for all rows that go through it."""
    chosen, weights = route(_maybe(x, part.router_norm), part)
    inside = _maybe(x, part.experts_norm)
    inside = inside if part.latent_in is None else linear(inside, part.latent_in)
    scales = None if part.expert_scales is None else part.expert_scales.values()
    gates, ups, downs = (None if p is None else _Experts(p) for p in (part.gate, part.up, part.down))
    assert ups is not None
    assert downs is not None
    out = np.zeros_like(inside)
    for expert in np.unique(chosen):
        rows, place = np.nonzero(chosen == expert)
        h = inside[rows]
        gate = None if gates is None else gates(h, expert)
        h = downs(_activate(gate, ups(h, expert), part.activation), expert)
        h = h if scales is None else h * scales[expert]
        out[rows] += weights[rows, place][:, None] * h
    out = out if part.latent_out is None else linear(out, part.latent_out)
    out = _maybe(out, part.experts_post_norm)
    if part.shared is None:
        return out
    shared = _maybe(dense(_maybe(x, part.shared_norm), part.shared), part.shared_post_norm)
    return out + (shared if part.shared_gate is None else shared * sigmoid(linear(x, part.shared_gate)))


def route(x: Float, part: Mixture) -> tuple[NDArray[np.intp], Float]:
    """For each row of x the experts it goes through, [T, used], and their weights, [T, used]."""
    raw = linear(x, part.router)
    scores = softmax(raw) if part.scoring == "softmax" else sigmoid(raw) if part.scoring == "sigmoid" else raw
    rank = scores if part.selection_bias is None else scores + part.selection_bias.values()
    if part.groups > 1:
        grouped = rank.reshape(len(x), part.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        kept = np.argsort(-best, axis=-1, kind="stable")[:, : part.groups_used]
        mask = np.ones(best.shape, bool)
        np.put_along_axis(mask, kept, False, axis=-1)
        rank = np.where(mask[..., None], -np.inf, grouped).reshape(rank.shape)
    chosen = np.argsort(-rank, axis=-1, kind="stable")[:, : part.used]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if part.scoring == "chosen":
        weights = softmax(weights)
    if part.normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * np.float32(part.scale)


class _Experts:
    """A linear of many experts, its weights read once."""

    def __init__(self, part: Linear) -> None:
        self.weight, self.bias = part.weight.values(), None if part.bias is None else part.bias.values()

    def __call__(self, x: Float, expert: int) -> Float:
        """Rows x [T, inputs] through one expert, [T, outputs]."""
        y: Float = x @ self.weight[expert].T
        return y if self.bias is None else y + self.bias[expert]
