"""GGUF to the converted form: checks every tensor, fuses what is multiplied with the same input, and encodes in 8 bits.

Names in the result: `embed`, `output` (when untied), `output_norm`, `inv_freq` (rotary frequencies), and per layer N
`N.attn_norm`, `N.qkv`, `N.qkv_bias`, `N.q_norm`, `N.k_norm`, `N.attn_out`, `N.ffn_norm`, `N.gate_up`, `N.down`. A
weight is two or three arrays: `.codes`, `.scales` and, where the zero point is not 128 throughout, `.zeros`; signed
codes have none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.gguf import GgufModel, GgufTensor, read_gguf
from shoal.runners.openvino.store import ConvertedModel, Description, open_converted, write_converted
from shoal.runners.openvino.weights import GROUP, Codes, encode, stack

__all__ = ["ARCHITECTURES", "VERSION", "Codes", "converted", "describe", "encode"]

VERSION = 1
"""Raised whenever the converted form changes, so that older files are not read."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ARRAYS_PER_LAYER = 17
_KNOWN = re.compile(
    r"(token_embd|output|output_norm|rope_freqs)\.weight"
    r"|blk\.\d+\.((attn|ffn)_norm|attn_[qk](_norm)?|attn_v|attn_output|ffn_(gate|up|down))\.weight"
    r"|blk\.\d+\.attn_[qkv]\.bias"
)


def converted(source: Path, cache_dir: Path) -> ConvertedModel:
    """The converted form of the GGUF file `source`, from `cache_dir` if it is there, else converted and kept there.

    Raises `UnsupportedModelError` for another architecture or feature, `ModelFormatError` for a damaged file, missing
    or odd tensors, `StoreError` when the cache cannot be written.
    """
    path = cache_dir / f"{source.stem}-{_key(source)}.safetensors"
    if path.exists():
        try:
            return open_converted(path)
        except ModelFormatError:
            path.unlink()  # damaged from outside: our own writes are all or nothing
    model = read_gguf(source)
    description = describe(model)
    write_converted(path, description, _arrays(model, description), 8 + _ARRAYS_PER_LAYER * model.n_layers)
    return open_converted(path)


def _key(source: Path) -> str:
    """Changes with the source file and with the converter."""
    stat = source.stat()
    parts = (VERSION, str(source.resolve()), stat.st_size, stat.st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def describe(model: GgufModel) -> Description:
    """Check that `model` is one this package can build, and say what the graph must know. Raises as `converted`."""
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model.path}: architecture {model.architecture!r}",
            value=model.architecture,
            limit=ARCHITECTURES,
            hint=f"GGUF files of {', '.join(ARCHITECTURES)} are converted; OpenVINO models of others load as they are",
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.type != "linear":
        raise UnsupportedModelError(
            f"{model.path}: rotary scaling {scaling.type!r}",
            value=scaling.type,
            limit="linear",
            hint="not converted yet",
        )
    if model.rope_dim != model.head_dim or model.n_heads % model.n_kv_heads or model.head_dim % 2:
        raise UnsupportedModelError(
            f"{model.path}: {model.n_heads} heads of {model.head_dim} elements, {model.rope_dim} of them rotated, over "
            f"{model.n_kv_heads} KV heads",
            value=(model.n_heads, model.n_kv_heads, model.head_dim, model.rope_dim),
            hint="all elements must be rotated and KV heads divide heads",
        )
    for size, what in (
        (model.n_embd, "embedding"),
        (model.n_ff, "feed-forward"),
        (model.n_heads * model.head_dim, "attention"),
    ):
        if size % GROUP:
            raise UnsupportedModelError(
                f"{model.path}: {what} size {size}", value=size, limit=f"a multiple of {GROUP}", hint="not converted"
            )
    unknown = sorted(name for name in model.tensors if not _KNOWN.fullmatch(name))
    if unknown:
        raise UnsupportedModelError(
            f"{model.path}: tensor {unknown[0]!r}",
            value=unknown,
            hint="this variant is not converted",
        )
    return Description(
        name=model.name,
        architecture=model.architecture,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        n_embd=model.n_embd,
        n_ff=model.n_ff,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        rms_eps=model.rms_eps,
        tied=model.tied_embeddings,
        qkv_bias="blk.0.attn_q.bias" in model.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in model.tensors,
    )


def _tensor(model: GgufModel, name: str, *shape: int) -> GgufTensor:
    tensor = model.tensors.get(name)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
        raise ModelFormatError(
            f"{model.path}: tensor {name!r} {found}",
            value=None if tensor is None else tensor.shape,
            limit=shape,
            hint=f"its shape must be {list(shape)}",
        )
    return tensor


def _vector(model: GgufModel, name: str, size: int) -> NDArray[np.float32]:
    return _tensor(model, name, size).dequantize()


def _halves_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Rows in the order that rotates element i with i + D/2, from files that rotate 2i with 2i + 1 (llama)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _weight(name: str, codes: Codes) -> Iterator[tuple[str, NDArray[Any]]]:
    if codes.symmetric:
        yield f"{name}.codes", (codes.codes ^ 128).view(np.int8)
    else:
        yield f"{name}.codes", codes.codes
        yield f"{name}.zeros", codes.zeros
    yield f"{name}.scales", codes.scales


def _arrays(model: GgufModel, about: Description) -> Iterator[tuple[str, NDArray[Any]]]:
    yield from _weight("embed", encode(_tensor(model, "token_embd.weight", about.vocab_size, about.n_embd)))
    if not about.tied:
        yield from _weight("output", encode(_tensor(model, "output.weight", about.vocab_size, about.n_embd)))
    yield "output_norm", _vector(model, "output_norm.weight", about.n_embd)
    yield "inv_freq", _inverse_frequencies(model)
    for layer in range(about.n_layers):
        yield from _layer(model, about, f"blk.{layer}.", f"{layer}.")


def _inverse_frequencies(model: GgufModel) -> NDArray[np.float32]:
    """Radians per position of each rotated pair, [D / 2]; Llama 3 files divide them by factors of their own."""
    half = model.head_dim // 2
    frequencies = model.rope_theta ** (-np.arange(half) / half)
    if model.rope_scaling is not None:
        frequencies /= model.rope_scaling.factor
    if "rope_freqs.weight" in model.tensors:
        frequencies /= _vector(model, "rope_freqs.weight", half)
    return frequencies.astype(np.float32)


def _layer(model: GgufModel, about: Description, source: str, target: str) -> Iterator[tuple[str, NDArray[Any]]]:
    embd, ff, head_dim = about.n_embd, about.n_ff, about.head_dim
    heads = {"q": about.n_heads, "k": about.n_kv_heads, "v": about.n_kv_heads}
    rotated = {c: _halves_order(heads[c], head_dim) if c != "v" else None for c in "qkv"}
    if about.architecture != "llama":
        rotated = dict.fromkeys("qkv")

    yield target + "attn_norm", _vector(model, f"{source}attn_norm.weight", embd)
    parts, biases = [], []
    for c, rows in rotated.items():
        size = heads[c] * head_dim
        codes = encode(_tensor(model, f"{source}attn_{c}.weight", size, embd))
        parts.append(codes if rows is None else codes.take(rows))
        if about.qkv_bias:
            bias = _vector(model, f"{source}attn_{c}.bias", size)
            biases.append(bias if rows is None else bias[rows])
    yield from _weight(target + "qkv", stack(parts))
    if about.qkv_bias:
        yield target + "qkv_bias", np.concatenate(biases)
    if about.qk_norm:
        for c in "qk":
            yield f"{target}{c}_norm", _vector(model, f"{source}attn_{c}_norm.weight", head_dim)
    out = encode(_tensor(model, f"{source}attn_output.weight", embd, about.n_heads * head_dim))
    yield from _weight(target + "attn_out", out)
    yield target + "ffn_norm", _vector(model, f"{source}ffn_norm.weight", embd)
    gate_up = [encode(_tensor(model, f"{source}ffn_{c}.weight", ff, embd)) for c in ("gate", "up")]
    yield from _weight(target + "gate_up", stack(gate_up))
    yield from _weight(target + "down", encode(_tensor(model, f"{source}ffn_down.weight", embd, ff)))
