"""The exact answer: a decoder of the llama family in plain numpy, float32 throughout, no cache, one sequence.

Slow and short on purpose. What the runners compute is measured against this, over the weights exactly as the GGUF
stores them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.models.gguf import GgufModel

Array = NDArray[np.float32]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale the last axis of `x` to a root mean square of one, times `weight`."""
    scale: Array = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x * scale * weight


def rotate(x: Array, frequencies: NDArray[np.float64], interleaved: bool) -> Array:
    """Rotary positions 0..T-1 on x [T, H, D]: pairs are (2i, 2i+1) when interleaved, else (i, i + D/2)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * frequencies
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = np.empty_like(x)
    first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [T, H, D] over k and v [T, H_kv, D], query heads grouped over KV heads; [T, H * D]."""
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", weights, v)
    return mixed.reshape(len(q), -1)


def logits(model: GgufModel, tokens: list[int]) -> Array:
    """Logits [T, V] after each of `tokens`. llama files store Q and K for interleaved rotation, qwen files do not."""

    def tensor(name: str) -> Array | None:
        found = model.tensors.get(name)
        return None if found is None else found.dequantize()

    def project(x: Array, name: str) -> Array:
        weight, bias = tensor(f"{name}.weight"), tensor(f"{name}.bias")
        assert weight is not None, name
        return x @ weight.T if bias is None else x @ weight.T + bias

    def norm(x: Array, name: str) -> Array:
        weight = tensor(f"{name}.weight")
        return x if weight is None else rms_norm(x, weight, model.rms_eps)  # only qwen3 has norms of Q and K

    embedding = tensor("token_embd.weight")
    assert embedding is not None
    frequencies = model.rope_theta ** (-np.arange(model.head_dim // 2) / (model.head_dim // 2))
    factors = tensor("rope_freqs.weight")  # Llama 3 stretches its positions with these
    frequencies = frequencies if factors is None else frequencies / factors
    x = embedding[tokens]
    for layer in range(model.n_layers):
        at = f"blk.{layer}."
        h = norm(x, at + "attn_norm")
        q, k, v = (project(h, f"{at}attn_{c}").reshape(len(tokens), -1, model.head_dim) for c in "qkv")
        q, k = norm(q, at + "attn_q_norm"), norm(k, at + "attn_k_norm")
        q, k = (rotate(a, frequencies, model.architecture == "llama") for a in (q, k))
        x = x + project(attention(q, k, v), at + "attn_output")
        h = norm(x, at + "ffn_norm")
        gate = project(h, at + "ffn_gate")
        with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinite, and its SiLU zero
            gate = gate / (1 + np.exp(-gate))
        x = x + project(gate * project(h, at + "ffn_up"), at + "ffn_down")
    x = norm(x, "output_norm")
    return x @ embedding.T if model.tied_embeddings else project(x, "output")


def mean_kl(exact: Array, other: Array) -> float:
    """Mean over rows of KL(exact || other) of the softmaxes, in nats."""
    p, q = (a - np.logaddexp.reduce(a.astype(np.float64), axis=-1, keepdims=True) for a in (exact, other))
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))
