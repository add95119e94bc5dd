"""GGUF files of random weights in the shapes and formats that people run: speed is measured without a download.

A file has the sizes of the real model, in the mixture of types that `llama-quantize` gives it, and random codes and
scales: speed depends on nothing else. Its vocabulary is a byte-level BPE of the right size whose tokens are made up.
What such a model says means nothing, so fidelity is measured on real files only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in place of every feed-forward: `used` of `count` experts of `ff` elements for each token."""

    count: int
    used: int
    ff: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta nets in all layers but every fourth; attention has a gate and turns `turned` elements of a head."""

    keys: int
    values: int
    dim: int
    turned: int
    taps: int = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder; `qk_norm` is Qwen3's norm of every head of Q and K. Embeddings are tied."""

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
    experts: Experts | None = None
    delta: Delta | None = None

    def attends(self, i: int) -> bool:
        """Whether layer `i` has attention."""
        return self.delta is None or i % 4 == 3


_A3B, _NETS = Experts(128, 8, 768), Delta(16, 32, 128, 64)
SHAPES = {
    "smollm2-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5),
    "qwen3-0.6b": ModelShape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, qk_norm=True),
    "qwen3-4b": ModelShape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, qk_norm=True),
    # Shorter than the real ones (48 and 32 layers): per layer the same.
    "qwen3-30b-a3b-4l": ModelShape("qwen3moe", 4, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, True, experts=_A3B),
    "qwen3.5-4b-8l": ModelShape("qwen35", 8, 2560, 9216, 16, 4, 256, 248320, 262144, 1e7, True, delta=_NETS),
}
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "iq4_nl", "mxfp4", "bf16")
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # where rows are no multiple of 256
_SPARED = ("attn_v", "ffn_down", "ffn_down_exps")  # what a mixed format gives more bits, in some layers
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
            writer.add_tensor(name, _floats(np.roll(pool, number * 4099), name, size))
        else:
            raw = _random_rows(np.roll(pool, number * 4099), kind, math.prod(size[:-1]), size[-1])
            writer.add_tensor(name, raw.reshape(*size[:-1], -1), raw_dtype=GGMLQuantizationType[kind])
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
    for i in range(count):
        # As llama-quantize: more bits for V and the last projection in the outer eighths, and in every third between.
        more = i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2
        for part, size in _matrices(s, i):
            kind = better if format in _MIXED and more and part in _SPARED else usual
            yield f"blk.{i}.{part}.weight", size, fitting(kind, size[-1])
        for part, floats in _vectors(s, i):
            yield f"blk.{i}.{part}", floats, "F32"
    yield "output_norm.weight", (s.embd,), "F32"


def _matrices(s: ModelShape, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the matrices of layer `i`."""
    q, kv = s.heads * s.dim, s.kv_heads * s.dim
    if s.delta is not None and not s.attends(i):
        keys, values = s.delta.keys * s.delta.dim, s.delta.values * s.delta.dim
        yield from (("attn_qkv", (2 * keys + values, s.embd)), ("attn_gate", (values, s.embd)))
        yield from ((f"ssm_{part}", (s.delta.values, s.embd)) for part in ("alpha", "beta"))
        yield "ssm_out", (s.embd, values)
    else:
        yield "attn_q", (2 * q if s.delta is not None else q, s.embd)  # with its gate
        yield from ((f"attn_{part}", (kv, s.embd)) for part in ("k", "v"))
        yield "attn_output", (s.embd, q)
    if s.experts is None:
        yield from ((f"ffn_{part}", (s.ff, s.embd)) for part in ("gate", "up"))
        yield "ffn_down", (s.embd, s.ff)
    else:
        yield from ((f"ffn_{part}_exps", (s.experts.count, s.experts.ff, s.embd)) for part in ("gate", "up"))
        yield "ffn_down_exps", (s.experts.count, s.embd, s.experts.ff)


def _vectors(s: ModelShape, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what layer `i` has in float32."""
    yield "attn_norm.weight", (s.embd,)
    yield f"{'ffn' if s.delta is None else 'post_attention'}_norm.weight", (s.embd,)
    if s.qk_norm and s.attends(i):
        yield from ((f"attn_{part}_norm.weight", (s.dim,)) for part in ("q", "k"))
    if s.experts is not None:
        yield "ffn_gate_inp.weight", (s.experts.count, s.embd)
    if s.delta is not None and not s.attends(i):
        yield "ssm_conv1d.weight", ((2 * s.delta.keys + s.delta.values) * s.delta.dim, s.delta.taps)
        yield from ((name, (s.delta.values,)) for name in ("ssm_a", "ssm_dt.bias"))
        yield "ssm_norm.weight", (s.delta.dim,)


def _floats(pool: NDArray[np.uint8], name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms are ones; a router and a convolution are random; a state decays."""
    if name.endswith("norm.weight"):
        return np.ones(size, np.float32)
    if name.endswith("ssm_a"):
        return np.full(size, -0.1, np.float32)
    drawn = (np.resize(pool, size).astype(np.float32) - np.float32(127.5)) / np.float32(74 * size[-1] ** 0.5)
    return drawn.astype(np.float32)


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
    writer.add_rope_dimension_count(s.dim if s.delta is None else s.delta.turned)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(s.vocab)
    if s.experts is not None:
        writer.add_expert_count(s.experts.count)
        writer.add_expert_used_count(s.experts.used)
        writer.add_expert_feed_forward_length(s.experts.ff)
    if s.delta is not None:
        writer.add_uint32(f"{s.architecture}.full_attention_interval", 4)
        writer.add_array(f"{s.architecture}.rope.dimension_sections", [s.delta.turned // 2 - 21, 11, 10, 0])
        writer.add_ssm_conv_kernel(s.delta.taps)
        writer.add_ssm_state_size(s.delta.dim)
        writer.add_ssm_group_count(s.delta.keys)
        writer.add_ssm_time_step_rank(s.delta.values)
        writer.add_ssm_inner_size(s.delta.values * s.delta.dim)
    tokens, merges = _vocabulary(s.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if s.architecture == "llama" else "qwen2")
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
