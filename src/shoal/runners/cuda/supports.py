"""Which decoders the kernels take, and what their KV needs; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shoal.models.decoder import Attention, Decoder, DeltaNet, Dense, FeedForward, Layer, Mixer, Mixture, Norm

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clipped": 2}
SCORINGS = {"softmax": 0, "sigmoid": 1, "chosen": 2}
SPLIT_ROWS = 1024  # up to so many rows a product may be cut along its inputs: then four sums of an output are left


def refusal(decoder: Decoder) -> str | None:
    """Why these kernels cannot run a decoder, by name; None when they can."""
    if decoder.layer_inputs is not None or decoder.embedding_norm is not None or decoder.head.bias is not None:
        return "per-layer embeddings, a norm of the embedding or a bias of the head"
    scales = {layer.residual_scale for layer in decoder.layers}
    if len(scales) > 1:
        return "residual scales that differ between layers"
    shapes = {(m.kv_heads, m.key_dim) for layer in decoder.layers if isinstance(m := layer.mixer, Attention)}
    if len(shapes) != 1:
        return "KV heads or head sizes that differ between layers, or no layer with attention"
    if len({_state_of(m) for layer in decoder.layers if isinstance(m := layer.mixer, DeltaNet)}) > 1:
        return "gated delta nets whose sizes differ between layers"
    for number, layer in enumerate(decoder.layers):
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"{reason} (layer {number})"
    norms = {norm.eps for layer in decoder.layers for norm in (layer.mixer_norm, layer.ff_norm) if norm is not None}
    return "norms whose epsilons differ" if len(norms | {decoder.norm.eps}) > 1 else None


def _layer_refusal(layer: Layer) -> str | None:
    mixer = layer.mixer
    mixed = _delta_refusal(mixer) if isinstance(mixer, DeltaNet) else _attention_refusal(mixer)
    reason = mixed or _feed_refusal(layer.feed_forward)
    if reason is not None:
        return reason
    if layer.mixer_norm is None or layer.ff_norm is None:
        return "a layer without a norm before it"
    if layer.layer_input is not None or layer.output_scale is not None:
        return "per-layer embeddings or a scale of its output"
    norms = (layer.mixer_norm, layer.mixer_post_norm, layer.ff_norm, layer.ff_post_norm)
    return _norms_refusal(norms)


def _norms_refusal(norms: Iterable[Norm | None]) -> str | None:
    if any(norm is not None and (norm.kind != "rms" or norm.bias or norm.weight is None) for norm in norms):
        return "a norm that is no RMS norm with a weight"
    return None


def _delta_refusal(net: DeltaNet) -> str | None:
    if net.value_dim % 16 or (net.value_heads * net.value_dim) % 32 or not 1 <= net.key_dim <= 256 or net.kernel < 2:
        sizes = f"heads of {net.key_dim} and {net.value_dim} elements"
        return f"a gated delta net with {sizes} (it takes up to 256, and whole 16s of the second)"
    if any(part.bias is not None for part in (net.q, net.k, net.v, net.z, net.alpha, net.beta, net.out)):
        return "a gated delta net with biases"
    return _norms_refusal([net.norm])


def _attention_refusal(mixer: Mixer | None) -> str | None:
    if not isinstance(mixer, Attention) or mixer.k is None or mixer.v is None:
        return f"a mixer of kind {type(mixer).__name__}, or one that reads another layer's KV"
    sizes = {mixer.key_dim, mixer.value_dim}
    if len(sizes) > 1 or mixer.key_dim & (mixer.key_dim - 1) or not 64 <= mixer.key_dim <= 256:
        return f"heads of {mixer.key_dim} and {mixer.value_dim} elements (it takes 64, 128 and 256)"
    group = mixer.heads // mixer.kv_heads
    if group > 16 or mixer.heads % mixer.kv_heads:
        return f"{mixer.heads} query heads for {mixer.kv_heads} KV heads (it takes up to 16 for one)"
    if mixer.v_norm or mixer.norm_over_heads or mixer.query_scale or mixer.rotary is None:
        return "a norm of values or over all heads, a scale by position, or no rotary positions"
    if (mixer.q_norm is None) != (mixer.k_norm is None):
        return "a norm of queries or keys alone"
    if mixer.gate is not None and mixer.gate.bias is not None:
        return "a bias of the output gate"
    return _norms_refusal((mixer.q_norm, mixer.k_norm))


def _feed_refusal(ff: FeedForward | None) -> str | None:
    if isinstance(ff, Mixture):
        return _mixture_refusal(ff)
    if not isinstance(ff, Dense):
        return "no feed-forward"
    if ff.gate is None or ff.activation not in ACTIVATIONS or ff.gate.bias or ff.up.bias or ff.down.bias:
        return f"a feed-forward with biases, without a gate, or of activation {ff.activation}"
    return None


def _mixture_refusal(ff: Mixture) -> str | None:
    if ff.gate is None or ff.activation not in ACTIVATIONS:
        return f"experts without a gate, or of activation {ff.activation}"
    if ff.groups > 1:
        return f"experts chosen by groups ({ff.groups_used} of {ff.groups})"
    norms = (ff.router_norm, ff.experts_norm, ff.experts_post_norm, ff.shared_norm, ff.shared_post_norm)
    if any(norm is not None for norm in norms) or ff.latent_in is not None or ff.latent_out is not None:
        return "experts with norms of their own or in a latent space"
    if ff.shared_gate is not None and ff.shared_gate.bias is not None:
        return "a bias of the shared expert's gate"
    return None if ff.shared is None else _feed_refusal(ff.shared)


def step_bytes(decoder: Decoder, rows: int, wanted: int) -> int:
    """The most memory that a step of so many rows takes, of which `wanted` want logits; mixtures take most of it."""
    mixed = {kind: max(_mixer_bytes(layer.mixer, kind) for layer in decoder.layers) for kind in (Attention, DeltaNet)}
    fed = max(_feed_bytes(layer.feed_forward, decoder.width) for layer in decoder.layers)
    row = decoder.width * 6 + sum(mixed.values()) + fed
    cut = 4 * min(rows, SPLIT_ROWS) * decoder.width * 4
    return rows * row + wanted * decoder.vocab_size * 4 + cut


def _mixer_bytes(mixer: Mixer | None, kind: type[Attention | DeltaNet]) -> int:
    """Of one row: what is between the products of a mixer of this kind."""
    if isinstance(mixer, Attention) and kind is Attention:
        gates = 2 * mixer.heads * mixer.key_dim if mixer.gate is not None else 0
        return 4 * (2 * mixer.heads + mixer.kv_heads) * mixer.key_dim + gates
    if isinstance(mixer, DeltaNet) and kind is DeltaNet:
        return 4 * (mixer.channels + 6 * mixer.value_heads) + 8 * mixer.value_heads * mixer.value_dim
    return 0


def _state_of(net: DeltaNet) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (net.kernel - 1, net.channels), (net.value_heads, net.key_dim, net.value_dim)


def state_shapes(decoder: Decoder) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of a sequence's recurrent state, all layers: last inputs of the convolutions (bf16), and matrices (float32).

    None where no layer has any.
    """
    nets = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, DeltaNet)]
    if not nets:
        return None
    inputs, matrices = _state_of(nets[0])
    return (len(nets), *inputs), (len(nets), *matrices)


def state_bytes(decoder: Decoder) -> int:
    """Bytes of a sequence's recurrent state; 0 where no layer has any."""
    shapes = state_shapes(decoder)
    return 0 if shapes is None else 2 * math.prod(shapes[0]) + 4 * math.prod(shapes[1])


def _feed_bytes(ff: FeedForward | None, width: int) -> int:
    """Of one row: what is between a feed-forward's products, and the sums that it leaves."""
    if isinstance(ff, Mixture):
        shared = ff.shared.size if ff.shared is not None else 0
        routing = 8 * (ff.experts + ff.used)  # scores, lists of pairs, choices and weights
        return 2 * max(ff.used * ff.size, shared) + 4 * width * (ff.used + 1) + routing
    return 4 * width + (2 * ff.size if ff is not None else 0)


def kv_bytes_per_token(decoder: Decoder, *, eight: bool = False) -> int:
    """Bytes of keys and values, all layers, of one token: in bf16, or in `eight` bits with a float32 for each head."""
    mixers = [layer.mixer for layer in decoder.layers]
    heads = (m.kv_heads * (m.key_dim + 4 if eight else 2 * m.key_dim) for m in mixers if isinstance(m, Attention))
    return 2 * sum(heads)
