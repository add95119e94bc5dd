"""A dense decoder on the device: weights, rotary tables and KV, from its description."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.models.decoder import Attention, Decoder, Dense, Layer, Norm
from shoal.runners.cuda.weights import Matrix, paired, stacked, vector

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def refusal(decoder: Decoder) -> str | None:
    """Why these kernels cannot run a decoder, by name; None when they can."""
    if decoder.layer_inputs is not None or decoder.embedding_norm is not None or decoder.head.bias is not None:
        return "per-layer embeddings, a norm of the embedding or a bias of the head"
    scales = {layer.residual_scale for layer in decoder.layers}
    if len(scales) > 1:
        return "residual scales that differ between layers"
    for number, layer in enumerate(decoder.layers):
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"{reason} (layer {number})"
    norms = {norm.eps for layer in decoder.layers for norm in (layer.mixer_norm, layer.ff_norm) if norm is not None}
    return "norms whose epsilons differ" if len(norms | {decoder.norm.eps}) > 1 else None


def _layer_refusal(layer: Layer) -> str | None:
    mixer, ff = layer.mixer, layer.feed_forward
    if not isinstance(mixer, Attention) or mixer.k is None or mixer.v is None:
        return f"a mixer of kind {type(mixer).__name__}, or one that reads another layer's KV"
    if not isinstance(ff, Dense):
        return f"a feed-forward of kind {type(ff).__name__}"
    if ff.gate is None or ff.activation not in _ACTIVATIONS or ff.gate.bias or ff.up.bias or ff.down.bias:
        return f"a feed-forward with biases, without a gate, or of activation {ff.activation}"
    sizes = {mixer.key_dim, mixer.value_dim}
    if len(sizes) > 1 or mixer.key_dim & (mixer.key_dim - 1) or not 64 <= mixer.key_dim <= 256:
        return f"heads of {mixer.key_dim} and {mixer.value_dim} elements (it takes 64, 128 and 256)"
    group = mixer.heads // mixer.kv_heads
    if group & (group - 1) or group > 16:
        return f"{group} query heads for one KV head (it takes powers of two up to 16)"
    if mixer.gate or mixer.v_norm or mixer.norm_over_heads or mixer.query_scale or mixer.rotary is None:
        return "an output gate, a norm of values or over all heads, a scale by position, or no rotary positions"
    if (mixer.q_norm is None) != (mixer.k_norm is None) or layer.mixer_norm is None or layer.ff_norm is None:
        return "a norm of queries or keys alone, or a layer without a norm before it"
    if layer.layer_input is not None or layer.output_scale is not None:
        return "per-layer embeddings or a scale of its output"
    norms = (layer.mixer_norm, layer.mixer_post_norm, layer.ff_norm, layer.ff_post_norm, mixer.q_norm, mixer.k_norm)
    if any(norm is not None and (norm.kind != "rms" or norm.bias or norm.weight is None) for norm in norms):
        return "a norm that is no RMS norm with a weight"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAttention:
    """Attention of one layer. `keys` and `values` bf16 [blocks + 1, KV heads, 32, dim]; the last block is a spare one.

    `qkv` are products whose outputs lie side by side, with their biases. `cosines`, `sines` float32 [positions, pairs].
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    qkv: list[tuple[Matrix, torch.Tensor | None]]
    out: Matrix
    out_bias: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    normed: bool
    cosines: torch.Tensor
    sines: torch.Tensor
    sinks: torch.Tensor
    has_sinks: bool
    window: int | None
    soft_cap: float | None
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def width(self) -> int:
        """Outputs of query, key and value products together."""
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """One layer; norms are float32 [width], None where there is none."""

    attention: DeviceAttention
    mixer_norm: torch.Tensor
    mixer_post_norm: torch.Tensor | None
    ff_norm: torch.Tensor
    ff_post_norm: torch.Tensor | None
    gate_up: Matrix
    down: Matrix
    activation: int

    @property
    def ff_size(self) -> int:
        """Inner values of its feed-forward."""
        return self.down.k


@dataclass(slots=True, eq=False)
class DeviceModel:
    """A decoder that `refusal` has nothing against, on one device."""

    device: torch.device
    width: int
    vocab_size: int
    eps: float
    embedding: torch.Tensor
    embedding_scale: float
    layers: list[DenseLayer]
    norm: torch.Tensor
    head: Matrix
    soft_cap: float | None
    logit_scale: float
    residual_scale: float
    kv: torch.Tensor = field(repr=False)
    zeros: torch.Tensor = field(repr=False)

    @property
    def weight_bytes(self) -> int:
        """What the weights take on the device."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [layer.gate_up, layer.down, layer.attention.out, *(m for m, _ in layer.attention.qkv)]
        tied = self.embedding.data_ptr() == self.head.data.data_ptr()
        return sum(m.nbytes for m in matrices) + (0 if tied else self.embedding.nbytes)


def kv_bytes_per_token(decoder: Decoder) -> int:
    """Bytes of keys and values, all layers, of one token."""
    mixers = [layer.mixer for layer in decoder.layers]
    return sum(4 * m.kv_heads * m.key_dim for m in mixers if isinstance(m, Attention))


def upload(decoder: Decoder, device: torch.device, blocks: int, context: int, lone_rows: int) -> DeviceModel:
    """Bring a decoder to the device, with KV of `blocks` blocks (and a spare one) and positions up to `context`."""
    first = decoder.layers[0].mixer
    assert isinstance(first, Attention)
    shapes = {(m.kv_heads, m.key_dim) for layer in decoder.layers if isinstance(m := layer.mixer, Attention)}
    kv_heads, dim = first.kv_heads, first.key_dim
    assert len(shapes) == 1, "layers of one size, see `loading`"
    kv = torch.zeros((len(decoder.layers), 2, blocks + 1, kv_heads, 32, dim), dtype=torch.bfloat16, device=device)
    tables: dict[tuple[tuple[float, ...], float], tuple[torch.Tensor, torch.Tensor]] = {}
    layers = []
    for number, layer in enumerate(decoder.layers):
        attention = layer.mixer
        assert isinstance(attention, Attention) and attention.rotary is not None
        key = (attention.rotary.frequencies, attention.rotary.factor)
        if key not in tables:
            tables[key] = _rotary(*key, context, device)
        layers.append(_layer(layer, attention, tables[key], kv[number], device))
    head = stacked([decoder.head.weight], device)[0]
    embedding = head.data if decoder.tied and head.form == 0 else _plain(decoder, device)
    return DeviceModel(
        device, decoder.width, decoder.vocab_size, decoder.norm.eps, embedding, decoder.embedding_scale, layers,
        _norm(decoder.norm, device), head, decoder.soft_cap, decoder.logit_scale, decoder.layers[0].residual_scale,
        kv, torch.zeros(lone_rows, dtype=torch.int32, device=device),
    )  # fmt: skip


def _plain(decoder: Decoder, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(decoder.embedding.values()).to(torch.bfloat16).to(device)


def _rotary(
    frequencies: tuple[float, ...], factor: float, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = np.arange(context)[:, None] * np.asarray(frequencies)[None, :]
    both = [(np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)]
    return torch.from_numpy(both[0]).to(device), torch.from_numpy(both[1]).to(device)


def _norm(norm: Norm | None, device: torch.device) -> torch.Tensor:
    assert norm is not None and norm.weight is not None
    return vector(norm.weight, device)


def _layer(
    layer: Layer, a: Attention, rotary: tuple[torch.Tensor, torch.Tensor], kv: torch.Tensor, device: torch.device
) -> DenseLayer:
    assert a.k is not None and a.v is not None
    ff = layer.feed_forward
    assert isinstance(ff, Dense) and ff.gate is not None
    linears = (a.q, a.k, a.v)
    qkv: list[tuple[Matrix, torch.Tensor | None]] = []
    column = 0
    biases = None
    if any(linear.bias is not None for linear in linears):
        parts = [
            torch.zeros(linear.weight.shape[0], device=device) if linear.bias is None else vector(linear.bias, device)
            for linear in linears
        ]
        biases = torch.cat(parts)
    for matrix in stacked([linear.weight for linear in linears], device):
        qkv.append((matrix, None if biases is None else biases[column : column + matrix.n].contiguous()))
        column += matrix.n
    one = torch.ones(a.key_dim, device=device)
    attention = DeviceAttention(
        a.heads, a.kv_heads, a.key_dim, a.scale, qkv, stacked([a.out.weight], device)[0],
        None if a.out.bias is None else vector(a.out.bias, device),
        one if a.q_norm is None else _norm(a.q_norm, device), one if a.k_norm is None else _norm(a.k_norm, device),
        a.q_norm is not None, *rotary, one if a.sinks is None else vector(a.sinks, device), a.sinks is not None,
        a.window, a.soft_cap, kv[0], kv[1],
    )  # fmt: skip
    return DenseLayer(
        attention, _norm(layer.mixer_norm, device), layer.mixer_post_norm and _norm(layer.mixer_post_norm, device),
        _norm(layer.ff_norm, device), layer.ff_post_norm and _norm(layer.ff_post_norm, device),
        paired(ff.gate.weight, ff.up.weight, device), stacked([ff.down.weight], device)[0], _ACTIVATIONS[ff.activation],
    )  # fmt: skip
