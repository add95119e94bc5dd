"""What of a GGUF model the native kernels need, and whether they can run it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.errors import ModelFormatError
from shoal.models.gguf import GgufModel, GgufTensor
from shoal.runners.native.pack import FORMS, Order

ARCHITECTURES = {"llama": False, "qwen2": True, "qwen3": True}
"""Architecture to whether rotary pairs are (i, i + D/2), as the kernels rotate them; llama files have (2i, 2i + 1)."""

_LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_VECTORS = ("attn_norm.weight", "ffn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight")


def supports(model: GgufModel) -> str | None:
    """Why the native runner leaves this model to another, or None when it takes it. Looks at no weight."""
    if model.architecture not in ARCHITECTURES:
        return f"architecture {model.architecture!r}: native kernels know {', '.join(ARCHITECTURES)}"
    if model.rope_scaling is not None and model.rope_scaling.type != "linear":
        return f"rotary scaling {model.rope_scaling.type!r}"
    if f"{model.architecture}.expert_count" in model.metadata:
        return "a mixture of experts"
    window = model.metadata.get(f"{model.architecture}.attention.sliding_window")
    if isinstance(window, int) and 0 < window < model.context_length:
        return "sliding-window attention"
    sizes = {"head size": model.head_dim, "embedding": model.n_embd, "feed-forward size": model.n_ff}
    for what, size in sizes.items():
        if size % 32:
            return f"{what} {size} is no multiple of 32"
    if model.head_dim > 256 or model.n_heads % model.n_kv_heads:
        return f"{model.n_heads} heads of {model.head_dim} over {model.n_kv_heads}"
    matrices, vectors = _matrix_names(model), _vector_names(model)
    for name, tensor in model.tensors.items():
        if name in matrices and tensor.type not in FORMS:
            return f"tensor {name} has type {tensor.type}"
        if name not in matrices and name not in vectors and name != "rope_freqs.weight":
            return f"tensor {name} is unknown"
    return None


def _matrix_names(model: GgufModel) -> set[str]:
    layers = {f"blk.{i}.{part}.weight" for i in range(model.n_layers) for part in _LAYER}
    return layers | {"token_embd.weight", "output.weight"}


def _vector_names(model: GgufModel) -> set[str]:
    norms = {f"blk.{i}.{part}" for i in range(model.n_layers) for part in _VECTORS}
    biases = {f"blk.{i}.{part}.bias" for i in range(model.n_layers) for part in _BIASED}
    return norms | biases | {"output_norm.weight"}


def tensors_of(model: GgufModel) -> list[GgufTensor]:
    """The tensors to pack, checked against the metadata: `ModelFormatError` for what is missing or misshapen."""
    shapes = _shapes(model)
    found = []
    for name, shape in shapes.items():
        tensor = model.tensors.get(name)
        if tensor is None:
            if _optional(model, name):
                continue
            raise ModelFormatError(f"{model.path}: tensor {name} is missing", value=name, hint="fetch the model again")
        if tensor.shape != shape:
            raise ModelFormatError(f"{model.path}: tensor {name} has a wrong shape", value=tensor.shape, limit=shape)
        found.append(tensor)
    return found


def orders_of(model: GgufModel) -> dict[str, Order]:
    """For Q and K with rotary pairs (2i, 2i + 1), the order of rows that makes them (i, i + D/2), by tensor name.

    Scores are sums over a head's dimensions: moving those of Q and K alike changes none.
    """
    if ARCHITECTURES[model.architecture]:
        return {}
    head = np.arange(model.head_dim)
    head[: model.rope_dim] = head[: model.rope_dim].reshape(-1, 2).T.reshape(-1)
    parts = {"attn_q": model.n_heads, "attn_k": model.n_kv_heads, "attn_q_norm": 1, "attn_k_norm": 1}
    return {
        f"blk.{i}.{part}.{kind}": (np.arange(heads)[:, None] * model.head_dim + head).reshape(-1)
        for i in range(model.n_layers)
        for part, heads in parts.items()
        for kind in ("weight", "bias")
    }


def _optional(model: GgufModel, name: str) -> bool:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return model.architecture != "qwen3"
    return name.endswith(".bias") or name == "output.weight"


def _shapes(model: GgufModel) -> dict[str, tuple[int, ...]]:
    embd, ff = model.n_embd, model.n_ff
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = {
        "attn_q": (q, embd),
        "attn_k": (kv, embd),
        "attn_v": (kv, embd),
        "attn_output": (embd, q),
        "ffn_gate": (ff, embd),
        "ffn_up": (ff, embd),
        "ffn_down": (embd, ff),
    }
    norms = {"attn_norm": embd, "ffn_norm": embd, "attn_q_norm": model.head_dim, "attn_k_norm": model.head_dim}
    out: dict[str, tuple[int, ...]] = {}
    for i in range(model.n_layers):
        out |= {f"blk.{i}.{part}.weight": size for part, size in sizes.items()}
        out |= {f"blk.{i}.{part}.bias": size[:1] for part, size in sizes.items()}
        out |= {f"blk.{i}.{part}.weight": (size,) for part, size in norms.items()}
    vocabulary = (model.vocab_size, embd)
    return out | {"token_embd.weight": vocabulary, "output.weight": vocabulary, "output_norm.weight": (embd,)}


def frequencies(model: GgufModel) -> list[float]:
    """Radians a position of each rotated pair, [rope_dim / 2]; `rope_freqs.weight` (Llama 3) divides them."""
    half = model.rope_dim // 2
    base = model.rope_theta ** (-np.arange(half) / half)
    factors = model.tensors.get("rope_freqs.weight")
    if factors is not None:
        values = factors.dequantize().reshape(-1)
        if len(values) != half or not np.isfinite(values).all() or (values == 0).any():
            raise ModelFormatError(f"{model.path}: rope_freqs.weight is damaged", value=len(values), limit=half)
        base = base / values
    if model.rope_scaling is not None:
        base = base / model.rope_scaling.factor
    return [float(f) for f in base]


def facts_of(model: GgufModel) -> dict[str, Any]:
    """What the packed file says of the model beside its tensors; JSON-ready."""
    if not 0 < model.rms_eps < 1 or not math.isfinite(model.rope_theta) or model.rope_theta <= 0 or model.rope_dim % 2:
        raise ModelFormatError(f"{model.path}: its norms or rotary settings are out of range", value=model.rope_theta)
    return {
        "name": model.name,
        "architecture": model.architecture,
        "layers": model.n_layers,
        "embd": model.n_embd,
        "heads": model.n_heads,
        "kv_heads": model.n_kv_heads,
        "dim": model.head_dim,
        "ff": model.n_ff,
        "vocab": model.vocab_size,
        "rope_dim": model.rope_dim,
        "context": model.context_length,
        "eps": model.rms_eps,
        "frequencies": frequencies(model),
    }
