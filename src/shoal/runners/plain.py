"""The shape of decoder that a graph or a library's model is made for, and by name what a model has beside it.

A plain decoder is an embedding, layers all alike of full attention and a gated SiLU feed-forward with a norm before
each, a final norm and a head. Runners that know no more refuse the rest with the words found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.models.decoder import Attention, Decoder, Dense, Layer, Norm


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer whose parts are known to be these."""

    mixer: Attention = field(repr=False)
    feed_forward: Dense = field(repr=False)
    mixer_norm: Norm = field(repr=False)
    ff_norm: Norm = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plain:
    """What all layers of a plain decoder have alike. `eps` is of every norm, `frequencies` [head_dim / 2] of each pair.

    `qkv_bias`: Q, K and V have biases; `qk_norm`: queries and keys are normalised head by head.
    """

    layers: tuple[PlainLayer, ...] = field(repr=False)
    heads: int
    kv_heads: int
    head_dim: int
    size: int
    eps: float
    frequencies: tuple[float, ...] = field(repr=False)
    qkv_bias: bool
    qk_norm: bool


def plain(model: Decoder) -> Plain | str:
    """The decoder as a plain one, or by name the first thing that it has beside that."""
    for reason in _reasons(model):
        return reason
    layers = tuple(_checked(layer) for layer in model.layers)
    first = layers[0].mixer
    assert first.rotary is not None
    return Plain(
        layers=layers,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.key_dim,
        size=layers[0].feed_forward.size,
        eps=model.norm.eps,
        frequencies=first.rotary.frequencies,
        qkv_bias=first.q.bias is not None,
        qk_norm=first.q_norm is not None,
    )


def _checked(layer: Layer) -> PlainLayer:
    assert isinstance(layer.mixer, Attention)
    assert isinstance(layer.feed_forward, Dense)
    assert layer.mixer_norm is not None
    assert layer.ff_norm is not None
    return PlainLayer(layer.mixer, layer.feed_forward, layer.mixer_norm, layer.ff_norm)


def _reasons(model: Decoder) -> Iterator[str]:
    if model.layer_inputs is not None:
        yield "per-layer embeddings"
    if (model.embedding_scale, model.logit_scale) != (1.0, 1.0) or model.embedding_norm is not None:
        yield "scaled embeddings or logits"
    if model.soft_cap is not None:
        yield "a soft cap on logits"
    if model.head.bias is not None:
        yield "a bias on logits"
    kinds = set()
    for layer in model.layers:
        yield from _layer(layer, model.context_length)
        kinds.add(_kind(layer, model.norm))
    if len(kinds) > 1:
        yield "layers that differ from each other"


def _layer(layer: Layer, context: int) -> Iterator[str]:
    if not isinstance(layer.mixer, Attention):
        yield "layers without a mixer" if layer.mixer is None else f"a {type(layer.mixer).__name__} mixer"
        return
    if not isinstance(layer.feed_forward, Dense):
        yield "layers without a feed-forward" if layer.feed_forward is None else "a mixture of experts"
        return
    if layer.mixer_norm is None or layer.ff_norm is None:
        yield "layers without a norm before each part"
    if layer.mixer_post_norm is not None or layer.ff_post_norm is not None:
        yield "norms behind attention and feed-forward"
    if layer.residual_scale != 1.0 or layer.output_scale is not None:
        yield "scaled residuals"
    yield from _attention(layer.mixer, context)
    yield from _dense(layer.feed_forward)


def _attention(part: Attention, context: int) -> Iterator[str]:
    if part.window is not None and part.window < context:
        yield f"sliding-window attention over {part.window} tokens"
    features = {
        "attention sinks": part.sinks,
        "a soft cap on scores": part.soft_cap,
        "gated attention": part.gate,
        "queries scaled by position": part.query_scale,
        "KV shared between layers": part.kv_layer,
        "normalised values": part.v_norm,
        "a bias on attention's output": part.out.bias,
    }
    yield from (name for name, value in features.items() if value is not None)
    if part.k is None or part.v is None or part.key_dim != part.value_dim:
        yield "keys and values of different sizes"
    elif len({each.bias is None for each in (part.q, part.k, part.v)}) > 1:
        yield "a bias on some of Q, K and V"
    if (part.q_norm is None) != (part.k_norm is None):
        yield "a norm on one of queries and keys"
    if part.norm_over_heads:
        yield "queries and keys normalised over all heads"
    if abs(part.scale - part.key_dim**-0.5) > 1e-9:
        yield f"scores scaled by {part.scale:.4g}"
    if part.rotary is None or 2 * part.rotary.pairs != part.key_dim:
        turned = 0 if part.rotary is None else 2 * part.rotary.pairs
        yield f"heads of {part.key_dim} elements with {turned} of them rotated"
    elif part.rotary.factor != 1.0:
        yield "rotary positions with a factor (YaRN, LongRoPE)"


def _dense(part: Dense) -> Iterator[str]:
    if part.activation != "silu" or part.gate is None:
        yield f"a feed-forward with {part.activation}{'' if part.gate else ' and no gate'}"
    elif part.gate.bias or part.up.bias or part.down.bias:
        yield "a feed-forward with biases"


def _kind(layer: Layer, last: Norm) -> tuple[object, ...]:
    """What must be the same in every layer."""
    part, ff = layer.mixer, layer.feed_forward
    if not isinstance(part, Attention) or not isinstance(ff, Dense):
        return ()
    norms = (layer.mixer_norm, layer.ff_norm, part.q_norm, part.k_norm, last)
    about = {(norm.eps, norm.kind, norm.bias is None) for norm in norms if norm is not None}
    sizes = (part.heads, part.kv_heads, part.key_dim, ff.size, part.rotary)
    biases = tuple(each is None or each.bias is None for each in (part.q, part.k, part.v))
    plain_norms = len(about) == 1 and next(iter(about))[1:] == ("rms", True)
    return (*sizes, biases, part.q_norm is None, part.k_norm is None, plain_norms or frozenset(about))
