"""GGUF files of random weights in the shapes and formats that people run: speed is measured without a download.

A file has the sizes of the real model, in the mixture of types that `llama-quantize` gives it, and random codes and
scales: speed depends on nothing else. Its vocabulary is a byte-level BPE of the right size whose tokens are made up.
What such a model says means nothing, so fidelity is measured on real files only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder; `qk_norm` is Qwen3's norm of every head of Q and K. Embeddings are tied."""

    architecture: str
    layers: int
    embd: int
    ff: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    context: int
    rope_theta: float
    qk_norm: bool = False


SHAPES = {
    "smollm2-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5),
    "qwen3-0.6b": ModelShape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, qk_norm=True),
    "qwen3-4b": ModelShape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, qk_norm=True),
}
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "iq4_nl", "mxfp4", "bf16")
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # where rows are no multiple of 256
_MIXED = {"q4_k_m": ("Q4_K", "Q6_K"), "q5_k_m": ("Q5_K", "Q6_K")}
# Where a block has its f16 scales, and how large its values are with d = 1.
_SCALES_AT: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_0": ((0,), 4.6),
    "Q4_1": ((0, 2), 9.0),
    "Q5_0": ((0,), 9.2),
    "Q5_1": ((0, 2), 18.0),
    "Q8_0": ((0,), 74.0),
    "Q4_K": ((0, 2), 324.0),
    "Q5_K": ((0, 2), 650.0),
    "Q6_K": ((208,), 1370.0),
    "IQ4_XS": ((0,), 1260.0),
    "IQ4_NL": ((0,), 70.0),
    "MXFP4": ((), 6.0),
}
_POOL = 1 << 24  # random bytes that all tensors are cut from


def write_shape(path: Path, shape: str, format: str, *, seed: int = 1, layers: int | None = None) -> Path:
    """A GGUF file of random weights at `path`, as `shoal bench --shape SHAPE --format FORMAT` measures it.

    `layers` makes it shorter than the real one. `ConfigError` for a shape or a format that is not known.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is unknown", value=shape, limit=tuple(SHAPES))
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown", value=format, limit=FORMATS)
    s = SHAPES[shape]
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp")
    writer = GGUFWriter(str(staged), s.architecture, use_temp_file=False)
    count = layers if layers is not None else s.layers
    _write_metadata(writer, s, count, f"{shape}-{format}")
    pool = np.random.default_rng(seed).integers(0, 256, _POOL, dtype=np.uint8)
    for number, (name, size, kind) in enumerate(_tensors(s, format, count)):
        if kind == "F32":
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            raw = _random_rows(np.roll(pool, number * 4099), kind, *size)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    staged.replace(path)
    return path


def _tensors(s: ModelShape, format: str, count: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of every tensor."""
    usual, better = _MIXED.get(format, (format.upper(), "Q6_K" if format != "bf16" else "BF16"))
    if format in ("q8_0", "mxfp4"):
        better = "Q8_0"

    def fitting(kind: str, columns: int) -> str:
        return _FALLBACK.get(kind, kind) if columns % 256 else kind

    yield "token_embd.weight", (s.vocab, s.embd), fitting(better, s.embd)
    q, kv = s.heads * s.dim, s.kv_heads * s.dim
    sizes = {
        "attn_q": (q, s.embd),
        "attn_k": (kv, s.embd),
        "attn_v": (kv, s.embd),
        "attn_output": (s.embd, q),
        "ffn_gate": (s.ff, s.embd),
        "ffn_up": (s.ff, s.embd),
        "ffn_down": (s.embd, s.ff),
    }
    for i in range(count):
        # As llama-quantize: more bits for V and the last projection in the outer eighths, and in every third between.
        more = i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2
        for part, size in sizes.items():
            kind = better if format in _MIXED and more and part in ("attn_v", "ffn_down") else usual
            yield f"blk.{i}.{part}.weight", size, fitting(kind, size[1])
        for part in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{part}.weight", (s.embd,), "F32"
        if s.qk_norm:
            for part in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{i}.{part}.weight", (s.dim,), "F32"
    yield "output_norm.weight", (s.embd,), "F32"


def _random_rows(pool: NDArray[np.uint8], kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Encoded rows [rows, bytes]: bytes of the pool, and scales that make values about as large as trained ones."""
    from gguf import GGMLQuantizationType
    from gguf.constants import GGML_QUANT_SIZES

    size_of, bytes_of = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = rows * columns // size_of
    if kind == "BF16":
        signs = np.resize(pool, count).astype(np.uint16)
        return ((signs & 0x80) << 8 | 0x3C80 | signs & 0x7F).view(np.uint8).reshape(rows, -1)
    raw = np.resize(pool, count * bytes_of).reshape(count, bytes_of)
    places, typical = _SCALES_AT[kind]
    scale = columns**-0.5 / typical
    for index, at in enumerate(places):
        middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind] if index else 1.0
        raw[:, at : at + 2] = np.array([scale * middle], np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 128 + round(np.log2(scale))
    return raw.reshape(rows, -1)


def _write_metadata(writer: Any, s: ModelShape, count: int, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.embd)
    writer.add_block_count(count)
    writer.add_feed_forward_length(s.ff)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.dim)
    writer.add_value_length(s.dim)
    writer.add_rope_dimension_count(s.dim)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(s.vocab)
    tokens, merges = _vocabulary(s.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if s.architecture == "qwen3" else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (s.vocab - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(s.vocab - 1)
    writer.add_eos_token_id(s.vocab - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """A byte-level BPE: the 256 bytes, then pairs of them, then triples, each the merge of two earlier tokens."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    letters = [chr(b) if b in plain else chr(next(others)) for b in range(256)]
    merged = itertools.chain(
        ((a, b) for a in letters for b in letters), ((a + b, c) for a in letters for b in letters for c in letters)
    )
    pairs = list(itertools.islice(merged, size - len(letters) - 1))
    return [*letters, *(a + b for a, b in pairs), "<|endoftext|>"], [f"{a} {b}" for a, b in pairs]
