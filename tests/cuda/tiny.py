"""A tiny dense decoder with random weights, for the CUDA runner on Triton's interpreter or a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.models.decoder import Attention, Decoder, DeltaNet, Dense, Layer, Linear, Mixture, Norm, Rotary, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor in memory, as a file would hold it."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = field(repr=False)

    def encoded_rows(self, index: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        return self.data.reshape(int(np.prod(self.shape[:-1])), -1)[index]

    def dequantize(self) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = self.data.reshape(int(np.prod(self.shape[:-1])), -1)
        return np.array(dequantize(rows, GGMLQuantizationType[self.type]), np.float32).reshape(self.shape)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)


def _random_blocks(rng: np.random.Generator, kind: str, n: int, k: int) -> NDArray[np.uint8]:
    """Random codes with scales that give weights of about 0.05."""
    sizes = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144), "Q6_K": (256, 210)}
    block, nbytes = sizes[kind]
    raw = rng.integers(0, 256, (n * k // block, nbytes), np.uint8)
    units = {"Q8_0": [(0, 0.0006)], "Q4_0": [(0, 0.01)], "Q4_K": [(0, 0.0003), (2, 0.002)], "Q6_K": [(208, 0.00003)]}
    for at, unit in units[kind]:
        raw[:, at : at + 2] = np.full(len(raw), unit, np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


def random_weight(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    """A matrix of n outputs and k inputs."""
    rng = np.random.default_rng(seed)
    bf16 = kind == "BF16"
    data = _bf16(rng.normal(0, 0.05, (n, k)).astype(np.float32)) if bf16 else _random_blocks(rng, kind, n, k)
    return Weight(Stored("w", kind, (n, k), data), (n, k))


def tiny_decoder(
    *,
    seed: int = 0,
    layers: int = 2,
    kind: str = "BF16",
    window: int | None = None,
    qk_norm: bool = True,
    bias: bool = False,
    sinks: bool = False,
    soft_cap: float | None = None,
    post_norms: bool = False,
    width: int = 256,
    vocab: int = 300,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    ff: int = 512,
    mixture: Mapping[str, Any] | None = None,
    nets: tuple[int, int, int, int] | None = None,
) -> Decoder:
    """Of the qwen3 kind, with what else is asked for. `mixture`: fields of `Mixture`; "shared", "gated" are bools.

    `nets`, (key heads, value heads, key_dim, value_dim), make it of the qwen35 kind: gated delta nets in all layers but
    every second, gated attention there, which turns a quarter of a head.
    """
    rng = np.random.default_rng(seed)

    def matrix(name: str, n: int, k: int, form: str = kind) -> Weight:
        if form == "BF16":
            data = _bf16(rng.normal(0, 1.5 / k**0.5, (n, k)).astype(np.float32))
        else:
            data = _random_blocks(rng, form, n, k)
        return Weight(Stored(name, form, (n, k), data), (n, k))

    def vector(name: str, n: int, around: float = 1.0, spread: float = 0.1) -> Weight:
        values = rng.normal(around, spread, n).astype(np.float32)
        return Weight(Stored(name, "F32", (n,), values.view(np.uint8)), (n,), axis=-1)

    def norm(name: str, n: int) -> Norm:
        return Norm(1e-6, vector(name, n))

    def linear(name: str, n: int, k: int) -> Linear:
        return Linear(matrix(name, n, k), vector(f"{name}.bias", n, 0.0) if bias else None)

    def dense(name: str) -> Dense:
        gate, up = Linear(matrix(f"{name}gate", ff, width)), Linear(matrix(f"{name}up", ff, width))
        return Dense(ff, "silu", gate, up, Linear(matrix(f"{name}down", width, ff)))

    def experts(name: str, count: int, n: int, k: int) -> Linear:
        flat = matrix(name, count * n, k)
        weight = Weight(Stored(name, kind, (count, n, k), flat.tensor.data), (count, n, k))
        biases = vector(f"{name}.bias", count * n, 0.0).values().reshape(count, n)
        stored = Stored(f"{name}.bias", "F32", (count, n), biases.reshape(-1).view(np.uint8))
        return Linear(weight, Weight(stored, (count, n), axis=-1) if bias else None)

    def mixed(name: str) -> Mixture:
        how = dict(mixture or {})
        count, used, shared, gated = (
            how.pop("experts"),
            how.pop("used"),
            how.pop("shared", False),
            how.pop("gated", False),
        )
        if how.pop("selection", False):
            how["selection_bias"] = vector(f"{name}selection", count, 0.0, 0.3)
        return Mixture(
            count,
            used,
            ff,
            how.pop("activation", "silu"),
            how.pop("scoring", "softmax"),
            Linear(matrix(f"{name}router", count, width, "BF16"), vector(f"{name}rb", count, 0.0) if bias else None),
            experts(f"{name}gate", count, ff, width),
            experts(f"{name}up", count, ff, width),
            experts(f"{name}down", count, width, ff),
            how.pop("normalise", True),
            shared=dense(f"{name}shared.") if shared else None,
            shared_gate=Linear(matrix(f"{name}sg", 1, width, "BF16")) if gated else None,
            **how,
        )

    def net(name: str, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> DeltaNet:
        keys, values, taps = key_heads * key_dim, value_heads * value_dim, 4
        drawn = rng.normal(0, 0.5, (2 * keys + values, taps)).astype(np.float32)
        conv = Weight(Stored(f"{name}conv", "F32", drawn.shape, drawn.reshape(-1).view(np.uint8)), drawn.shape)
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "alpha": value_heads, "beta": value_heads}
        parts = {
            part: Linear(matrix(f"{name}{part}", n, width, "BF16" if n == value_heads else kind))
            for part, n in sizes.items()
        }
        return DeltaNet(
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            tuple(h % key_heads for h in range(value_heads)),
            **parts,
            conv=conv,
            decay=vector(f"{name}decay", value_heads, -0.5),
            dt_bias=vector(f"{name}dt", value_heads, 0.0, 1.0),
            norm=norm(f"{name}norm", value_dim),
            out=Linear(matrix(f"{name}out", width, values)),
            l2_eps=1e-6,
        )

    turned = dim // 2 if nets is None else dim // 8
    rotary = Rotary(tuple(float(f) for f in 10000.0 ** (-np.arange(turned) / turned)))
    made = []
    for i in range(layers):
        attention = Attention(
            heads,
            kv_heads,
            dim,
            dim,
            linear(f"{i}.q", heads * dim, width),
            linear(f"{i}.k", kv_heads * dim, width),
            linear(f"{i}.v", kv_heads * dim, width),
            linear(f"{i}.o", width, heads * dim),
            dim**-0.5,
            rotary,
            q_norm=norm(f"{i}.qn", dim) if qk_norm else None,
            k_norm=norm(f"{i}.kn", dim) if qk_norm else None,
            window=window if i % 2 == 0 else None,
            sinks=vector(f"{i}.sinks", heads, 0.0, 1.0) if sinks else None,
            soft_cap=soft_cap,
            gate=None if nets is None else Linear(matrix(f"{i}.gate", heads * dim, width)),
        )
        mixer = net(f"{i}.", *nets) if nets is not None and i % 2 == 0 else attention
        post = norm(f"{i}.post", width) if post_norms else None
        feed = dense(f"{i}.") if mixture is None else mixed(f"{i}.")
        made.append(Layer(mixer, feed, norm(f"{i}.n1", width), post, norm(f"{i}.n2", width), post))
    embedding = matrix("embedding", vocab, width, "BF16")
    return Decoder("tiny", "qwen3", width, vocab, 1024, embedding, tuple(made), norm("final", width), Linear(embedding))


def prompts(seed: int, lengths: Sequence[int], vocab: int = 300) -> list[tuple[int, ...]]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, vocab, n)) for n in lengths]


def qwen3_shape(layers: int = 28, context: int = 4096) -> Decoder:
    """Random weights in the shape of Qwen3-0.6B, bf16, drawn from a small table so that they are there at once."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    width, heads, kv_heads, dim, ff, vocab = 1024, 16, 8, 128, 3072, 151936

    def weight(name: str, n: int, k: int) -> Weight:
        start = int(rng.integers(0, 1 << 16))
        values = np.resize(table[start:], n * k)
        return Weight(Stored(name, "BF16", (n, k), _bf16(values)), (n, k))

    def norm(name: str, n: int) -> Norm:
        return Norm(1e-6, Weight(Stored(name, "F32", (n,), np.ones(n, np.float32).view(np.uint8)), (n,), axis=-1))

    rotary = Rotary(tuple(float(f) for f in 1e6 ** (-np.arange(dim // 2) / (dim // 2))))
    made = []
    for i in range(layers):
        q, k, v = (
            Linear(weight(f"{i}.{c}", h * dim, width)) for c, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        attention = Attention(
            heads,
            kv_heads,
            dim,
            dim,
            q,
            k,
            v,
            Linear(weight(f"{i}.o", width, heads * dim)),
            dim**-0.5,
            rotary,
            q_norm=norm(f"{i}.qn", dim),
            k_norm=norm(f"{i}.kn", dim),
        )
        gate, up = Linear(weight(f"{i}.gate", ff, width)), Linear(weight(f"{i}.up", ff, width))
        dense = Dense(ff, "silu", gate, up, Linear(weight(f"{i}.down", width, ff)))
        made.append(Layer(attention, dense, norm(f"{i}.n1", width), None, norm(f"{i}.n2", width)))
    embedding = weight("embedding", vocab, width)
    return Decoder(
        "qwen3-0.6b", "qwen3", width, vocab, context, embedding, tuple(made), norm("final", width), Linear(embedding)
    )
