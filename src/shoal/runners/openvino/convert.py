"""GGUF to the converted form: fuses what is multiplied with the same input, and encodes in 8 bits.

Names in the result: `embed`, `output` (when untied), `output_norm`, `inv_freq` (rotary frequencies), and per layer N
`N.attn_norm`, `N.qkv`, `N.qkv_bias`, `N.q_norm`, `N.k_norm`, `N.attn_out`, `N.ffn_norm`, `N.gate_up`, `N.down`. A
weight is two or three arrays: `.codes`, `.scales` and, where the zero point is not 128 throughout, `.zeros`; signed
codes have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models import families
from shoal.models.decoder import Decoder, Linear, Norm, Weight
from shoal.models.gguf import read_gguf
from shoal.runners.affine import GROUP
from shoal.runners.openvino.store import ConvertedModel, Description, open_converted, write_converted
from shoal.runners.openvino.weights import Codes, encode, stack
from shoal.runners.plain import Plain, PlainLayer, plain

__all__ = ["VERSION", "Codes", "converted", "describe", "encode"]

VERSION = 2
"""Raised whenever the converted form changes, so that older files are not read."""

_ARRAYS_PER_LAYER = 17


def converted(source: Path, cache_dir: Path) -> ConvertedModel:
    """The converted form of the GGUF file `source`, from `cache_dir` if it is there, else converted and kept there.

    Raises `UnsupportedModelError` for what a plain decoder lacks, `ModelFormatError` for a damaged file, missing
    or odd tensors, `StoreError` when the cache cannot be written.
    """
    path = cache_dir / f"{source.stem}-{_key(source)}.safetensors"
    if path.exists():
        try:
            return open_converted(path)
        except ModelFormatError:
            path.unlink()  # damaged from outside: our own writes are all or nothing
    model = families.describe(read_gguf(source))
    description = describe(model)
    write_converted(path, description, _arrays(model), 8 + _ARRAYS_PER_LAYER * len(model.layers))
    return open_converted(path)


def _key(source: Path) -> str:
    """Changes with the source file and with the converter."""
    stat = source.stat()
    parts = (VERSION, str(source.resolve()), stat.st_size, stat.st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def describe(model: Decoder) -> Description:
    """Check that `model` is one this package can build, and say what the graph must know.

    Raises `UnsupportedModelError` with the name of what it has beside a plain decoder.
    """
    about = _plain(model)
    sizes = {"embedding": model.width, "feed-forward": about.size, "attention": about.heads * about.head_dim}
    for what, size in sizes.items():
        if size % GROUP:
            raise UnsupportedModelError(
                f"{model.name}: {what} size {size}", value=size, limit=f"a multiple of {GROUP}", hint="not converted"
            )
    return Description(
        name=model.name,
        architecture=model.family,
        n_layers=len(model.layers),
        n_heads=about.heads,
        n_kv_heads=about.kv_heads,
        head_dim=about.head_dim,
        n_embd=model.width,
        n_ff=about.size,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        rms_eps=about.eps,
        tied=model.tied,
        qkv_bias=about.qkv_bias,
        qk_norm=about.qk_norm,
    )


def _plain(model: Decoder) -> Plain:
    found = plain(model)
    if isinstance(found, str):
        raise UnsupportedModelError(
            f"{model.name}: {found}",
            value=model.family,
            hint="GGUF files with it are not converted; OpenVINO's own models load as they are",
        )
    return found


def _weight(name: str, codes: Codes) -> Iterator[tuple[str, NDArray[Any]]]:
    if codes.symmetric:
        yield f"{name}.codes", (codes.codes ^ 128).view(np.int8)
    else:
        yield f"{name}.codes", codes.codes
        yield f"{name}.zeros", codes.zeros
    yield f"{name}.scales", codes.scales


def _codes(weight: Weight) -> Codes:
    codes = encode(weight.tensor)
    return codes if weight.rows is None else codes.take(weight.rows)


def _arrays(model: Decoder) -> Iterator[tuple[str, NDArray[Any]]]:
    about = _plain(model)
    yield from _weight("embed", _codes(model.embedding))
    if not model.tied:
        yield from _weight("output", _codes(model.head.weight))
    yield "output_norm", _values(model.norm)
    yield "inv_freq", np.array(about.frequencies, dtype=np.float32)
    for i, layer in enumerate(about.layers):
        yield from _layer(layer, about, f"{i}.")


def _layer(layer: PlainLayer, about: Plain, at: str) -> Iterator[tuple[str, NDArray[Any]]]:
    mixer, ff = layer.mixer, layer.feed_forward
    assert mixer.k is not None
    assert mixer.v is not None
    assert ff.gate is not None
    qkv: tuple[Linear, ...] = (mixer.q, mixer.k, mixer.v)
    yield at + "attn_norm", _values(layer.mixer_norm)
    yield from _weight(at + "qkv", stack([_codes(part.weight) for part in qkv]))
    if about.qkv_bias:
        yield at + "qkv_bias", np.concatenate([part.bias.values() for part in qkv if part.bias is not None])
    if mixer.q_norm is not None and mixer.k_norm is not None:
        yield at + "q_norm", _values(mixer.q_norm)
        yield at + "k_norm", _values(mixer.k_norm)
    yield from _weight(at + "attn_out", _codes(mixer.out.weight))
    yield at + "ffn_norm", _values(layer.ff_norm)
    yield from _weight(at + "gate_up", stack([_codes(ff.gate.weight), _codes(ff.up.weight)]))
    yield from _weight(at + "down", _codes(ff.down.weight))


def _values(norm: Norm) -> NDArray[np.float32]:
    assert norm.weight is not None
    return norm.weight.values()
