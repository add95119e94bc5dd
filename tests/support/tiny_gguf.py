"""Writes GGUF files of tiny decoders with random weights: every family and feature the converter knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

EMBD, FF, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 160


def write_tiny(
    path: Path, arch: str, *, kind: str = "F16", head_dim: int = 32, tied: bool = True, rope_factors: bool = False
) -> Path:
    """A model of architecture `arch` whose matrices have type `kind` (F32, F16, BF16, Q8_0, Q4_0, Q4_1)."""
    rng = np.random.default_rng(sum(map(ord, arch + kind)))
    writer = GGUFWriter(str(path), arch)
    writer.add_context_length(512)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    quantization = GGMLQuantizationType[kind]

    def matrix(name: str, rows: int, columns: int) -> None:
        values = (rng.standard_normal((rows, columns)) * (1.5 / np.sqrt(columns))).astype(np.float32)
        writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)

    def vector(name: str, size: int, mean: float) -> None:
        writer.add_tensor(name, (mean + 0.3 * rng.standard_normal(size)).astype(np.float32))

    matrix("token_embd.weight", VOCAB, EMBD)
    if not tied:
        matrix("output.weight", VOCAB, EMBD)
    vector("output_norm.weight", EMBD, 1)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for c, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{at}attn_{c}.weight", heads * head_dim, EMBD)
            if arch == "qwen2":
                vector(f"{at}attn_{c}.bias", heads * head_dim, 0)
            if arch == "qwen3" and c != "v":
                vector(f"{at}attn_{c}_norm.weight", head_dim, 1)
        matrix(f"{at}attn_output.weight", EMBD, HEADS * head_dim)
        matrix(f"{at}ffn_gate.weight", FF, EMBD)
        matrix(f"{at}ffn_up.weight", FF, EMBD)
        matrix(f"{at}ffn_down.weight", EMBD, FF)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{at}{name}.weight", EMBD, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
