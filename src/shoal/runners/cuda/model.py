"""A decoder on the device: weights, rotary tables and KV, from its description."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from shoal.models.decoder import Attention, Decoder, DeltaNet, Float, Layer, Norm
from shoal.runners.balance import balances
from shoal.runners.cuda.delta import DeviceDelta, upload_delta
from shoal.runners.cuda.feed import DeviceDense, DeviceMixture, upload_feed_forward
from shoal.runners.cuda.states import StateStore
from shoal.runners.cuda.supports import state_shapes
from shoal.runners.cuda.weights import Matrix, stacked, vector

LayerKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys, values, scales of keys, scales of values of one layer."""


@dataclass(frozen=True, slots=True, eq=False)
class KVStore:
    """KV of all layers with attention, keys before values: bf16 [layers, 2, blocks + 1, KV heads, 32, dim].

    The last block is a spare.
    In 8 bits they are int8 codes, and `scales` float32 [layers, 2, blocks + 1, KV heads, 32], one a token and head.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device, *, eight: bool) -> KVStore:
        """KV of zeros."""
        codes = torch.zeros(shape, dtype=torch.int8 if eight else torch.bfloat16, device=device)
        return cls(codes, torch.zeros(shape[:-1], device=device) if eight else None)

    @property
    def parts(self) -> list[torch.Tensor]:
        """What makes up a block."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    def of_layer(self, number: int) -> LayerKV:
        """For the kernels; without scales, the codes stand where nobody reads."""
        keys, values = self.codes[number]
        scales = (keys, values) if self.scales is None else self.scales[number]
        return keys, values, scales[0], scales[1]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAttention:
    """Attention of one layer. `kv` are keys, values and the scales of both, as `KVStore` has them of this layer.

    `products`' outputs lie side by side, queries, keys and values, with their biases; `gate` is the output's, if it has
    one. `cosines`, `sines` float32 [positions, pairs].
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    products: list[tuple[Matrix, torch.Tensor | None]]
    gate: Matrix | None
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
    kv: LayerKV

    @property
    def width(self) -> int:
        """Outputs of query, key and value products together."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def inner(self) -> int:
        """What goes into `out`."""
        return self.heads * self.dim


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; norms are float32 [width], None where there is none."""

    mixer: DeviceAttention | DeviceDelta
    mixer_norm: torch.Tensor
    mixer_post_norm: torch.Tensor | None
    ff_norm: torch.Tensor
    ff_post_norm: torch.Tensor | None
    feed_forward: DeviceDense | DeviceMixture


@dataclass(slots=True, eq=False)
class DeviceModel:
    """A decoder that `refusal` has nothing against, on one device."""

    device: torch.device
    width: int
    vocab_size: int
    eps: float
    embedding: torch.Tensor
    embedding_scale: float
    layers: list[DecoderLayer]
    norm: torch.Tensor
    head: Matrix
    soft_cap: float | None
    logit_scale: float
    residual_scale: float
    kv: KVStore = field(repr=False)
    states: StateStore | None = field(repr=False)
    zeros: torch.Tensor = field(repr=False)

    @property
    def eight(self) -> bool:
        """Whether KV is kept in 8 bits."""
        return self.kv.scales is not None

    @property
    def attentions(self) -> list[DeviceAttention]:
        """Those of all layers that have attention."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeviceAttention)]

    @property
    def nets(self) -> list[DeviceDelta]:
        """The gated delta nets of all other layers."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeviceDelta)]

    @property
    def weight_bytes(self) -> int:
        """What the weights take on the device."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [*layer.feed_forward.matrices, layer.mixer.out, *(m for m, _ in layer.mixer.products)]
        matrices += [a.gate for a in self.attentions if a.gate is not None]
        tied = self.embedding.data_ptr() == self.head.data.data_ptr()
        return sum(m.nbytes for m in matrices) + (0 if tied else self.embedding.nbytes)


def upload(
    decoder: Decoder,
    device: torch.device,
    blocks: int,
    context: int,
    lone_rows: int,
    *,
    eight: bool,
    states: tuple[int, int],
) -> DeviceModel:
    """Bring a decoder to the device, with KV of `blocks` blocks (and a spare one) and positions up to `context`.

    `eight` keeps KV in 8 bits. `states` are the places and checkpoints of recurrent state, see `StateStore`.
    """
    attentions = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, Attention)]
    kv_heads, dim = attentions[0].kv_heads, attentions[0].key_dim  # all are alike: `refusal` saw to it
    kv = KVStore.empty((len(attentions), 2, blocks + 1, kv_heads, 32, dim), device, eight=eight)
    shapes = state_shapes(decoder)
    store = None if shapes is None else StateStore.empty(*shapes, *states, device)
    tables: dict[tuple[tuple[float, ...], float], tuple[torch.Tensor, torch.Tensor]] = {}
    layers: list[DecoderLayer] = []
    factors = balances(decoder) if eight else {}
    made = 0  # layers with attention
    for number, layer in enumerate(decoder.layers):
        if isinstance(layer.mixer, DeltaNet):
            assert store is not None
            mixer: DeviceAttention | DeviceDelta = upload_delta(layer.mixer, store, number - made, device)
        else:
            attention = layer.mixer
            assert isinstance(attention, Attention)
            assert attention.rotary is not None
            key = (attention.rotary.frequencies, attention.rotary.factor)
            if key not in tables:
                tables[key] = _rotary(*key, context, device)
            mixer = _attention(attention, tables[key], kv.of_layer(made), factors.get(number), device)
            made += 1
        layers.append(_layer(layer, mixer, device))
    head = stacked([decoder.head.weight], device)[0]
    embedding = head.data if decoder.tied and head.form == 0 else _plain(decoder, device)
    return DeviceModel(
        device,
        decoder.width,
        decoder.vocab_size,
        decoder.norm.eps,
        embedding,
        decoder.embedding_scale,
        layers,
        _norm(decoder.norm, device),
        head,
        decoder.soft_cap,
        decoder.logit_scale,
        decoder.layers[0].residual_scale,
        kv,
        store,
        torch.zeros(lone_rows, dtype=torch.int32, device=device),
    )


def _plain(decoder: Decoder, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(decoder.embedding.values()).to(torch.bfloat16).to(device)


def _rotary(
    frequencies: tuple[float, ...], factor: float, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = np.arange(context)[:, None] * np.asarray(frequencies)[None, :]
    both = [(np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)]
    return torch.from_numpy(both[0]).to(device), torch.from_numpy(both[1]).to(device)


def _norm(norm: Norm | None, device: torch.device) -> torch.Tensor:
    assert norm is not None
    assert norm.weight is not None
    return vector(norm.weight, device)


def _layer(layer: Layer, mixer: DeviceAttention | DeviceDelta, device: torch.device) -> DecoderLayer:
    assert layer.feed_forward is not None
    return DecoderLayer(
        mixer,
        _norm(layer.mixer_norm, device),
        layer.mixer_post_norm and _norm(layer.mixer_post_norm, device),
        _norm(layer.ff_norm, device),
        layer.ff_post_norm and _norm(layer.ff_post_norm, device),
        upload_feed_forward(layer.feed_forward, device),
    )


def _attention(
    a: Attention,
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv: LayerKV,
    factors: Float | None,
    device: torch.device,
) -> DeviceAttention:
    """`factors` [dim]: what queries' norm is multiplied by and keys' divided, see `balances`."""
    assert a.k is not None
    assert a.v is not None
    linears = (a.q, a.k, a.v)
    products: list[tuple[Matrix, torch.Tensor | None]] = []
    column = 0
    biases = None
    if any(linear.bias is not None for linear in linears):
        parts = [
            torch.zeros(linear.weight.shape[0], device=device) if linear.bias is None else vector(linear.bias, device)
            for linear in linears
        ]
        biases = torch.cat(parts)
    for matrix in stacked([linear.weight for linear in linears], device):
        products.append((matrix, None if biases is None else biases[column : column + matrix.n].contiguous()))
        column += matrix.n
    one = torch.ones(a.key_dim, device=device)
    factor = one if factors is None else torch.from_numpy(factors).to(device)
    return DeviceAttention(
        a.heads,
        a.kv_heads,
        a.key_dim,
        a.scale,
        products,
        None if a.gate is None else stacked([a.gate.weight], device)[0],
        stacked([a.out.weight], device)[0],
        None if a.out.bias is None else vector(a.out.bias, device),
        one if a.q_norm is None else _norm(a.q_norm, device) * factor,
        one if a.k_norm is None else _norm(a.k_norm, device) / factor,
        a.q_norm is not None,
        *rotary,
        one if a.sinks is None else vector(a.sinks, device),
        a.sinks is not None,
        a.window,
        a.soft_cap,
        kv,
    )
