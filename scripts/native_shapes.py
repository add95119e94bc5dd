"""Write a GGUF of random weights in the shape of a published model, with fewer layers: for `scripts/native_bench.py`.

`python scripts/native_shapes.py qwen3moe PATH` is Qwen3-30B-A3B's shape, `qwen35` that of a Qwen3.5 hybrid of 4B.
Matrices are Q4_K, the head Q6_K, as in most published files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
VOCAB = 32_000


class Shape:
    """A file being written."""

    def __init__(self, path: Path, architecture: str, width: int, layers: int, **keys: Any) -> None:
        from tests.support.tiny_writer import vocabulary

        self.writer, self.width, self.layers = GGUFWriter(str(path), architecture), width, layers
        self.rng = np.random.default_rng(1)
        tokens, merges, types = vocabulary()
        more = VOCAB - len(tokens)
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("qwen2")
        self.writer.add_token_list([*tokens, *(f"<{i}>" for i in range(more))])
        self.writer.add_token_merges(merges)
        self.writer.add_token_types([*types, *[1] * more])
        self.writer.add_eos_token_id(len(tokens) - 2)
        keys |= {"context_length": 4096, "embedding_length": width, "block_count": layers}
        for key, value in keys.items():
            add = self.writer.add_float32 if isinstance(value, float) else self.writer.add_uint32
            if isinstance(value, list):
                self.writer.add_array(f"{architecture}.{key}", value)
            else:
                add(f"{architecture}.{key}", value)

    def matrix(self, name: str, *shape: int, kind: str = "Q4_K") -> None:
        """Random codes, and scales that make values about as large as trained ones."""
        from tests.support.native_tiny import random_blocks

        raw = np.stack([random_blocks(self.rng, kind, *shape[-2:]) for _ in range(shape[0] if len(shape) == 3 else 1)])
        self.writer.add_tensor(
            f"{name}.weight", raw if len(shape) == 3 else raw[0], raw_dtype=GGMLQuantizationType[kind]
        )

    def vector(self, name: str, *shape: int, mean: float = 1.0, spread: float = 0.1) -> None:
        """Float32 numbers around `mean`."""
        self.writer.add_tensor(name, (mean + spread * self.rng.standard_normal(shape)).astype(np.float32))

    def close(self) -> None:
        """Embedding, head, and all to the disk."""
        self.matrix("token_embd", VOCAB, self.width)
        self.matrix("output", VOCAB, self.width, kind="Q6_K")
        self.vector("output_norm.weight", self.width)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def attention(s: Shape, i: int, heads: int, kv_heads: int, head: int, *, gated: bool = False) -> None:
    """Q, K, V and output, with norms of Q and K."""
    at = f"blk.{i}.attn_"
    s.matrix(f"{at}q", heads * head * (2 if gated else 1), s.width)
    s.matrix(f"{at}k", kv_heads * head, s.width)
    s.matrix(f"{at}v", kv_heads * head, s.width)
    s.matrix(f"{at}output", s.width, heads * head)
    for part in ("q", "k"):
        s.vector(f"{at}{part}_norm.weight", head)


def qwen3moe(path: Path, layers: int) -> None:
    """Qwen3-30B-A3B: 128 experts of 768, 8 used."""
    s = Shape(
        path, "qwen3moe", 2048, layers, feed_forward_length=6144, expert_count=128, expert_used_count=8,
        expert_feed_forward_length=768, **{
            "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
            "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        },
    )  # fmt: skip
    for i in range(layers):
        at = f"blk.{i}."
        s.vector(f"{at}attn_norm.weight", s.width)
        s.vector(f"{at}ffn_norm.weight", s.width)
        attention(s, i, 32, 4, 128)
        s.vector(f"{at}ffn_gate_inp.weight", 128, s.width, mean=0.0, spread=0.05)
        for part in ("gate", "up"):
            s.matrix(f"{at}ffn_{part}_exps", 128, 768, s.width)
        s.matrix(f"{at}ffn_down_exps", 128, s.width, 768)
    s.close()


def qwen35(path: Path, layers: int) -> None:
    """A Qwen3.5 hybrid: three delta nets of 16 key and 32 value heads of 128, then gated attention of heads of 256."""
    s = Shape(
        path, "qwen35", 2560, layers, feed_forward_length=9216, full_attention_interval=4, **{
            "attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": 256,
            "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
            "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4,
            "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
        },
    )  # fmt: skip
    for i in range(layers):
        at = f"blk.{i}."
        s.vector(f"{at}attn_norm.weight", s.width)
        s.vector(f"{at}post_attention_norm.weight", s.width)
        if i % 4 == 3:
            attention(s, i, 16, 4, 256, gated=True)
        else:
            s.matrix(f"{at}attn_qkv", 8192, s.width)
            s.matrix(f"{at}attn_gate", 4096, s.width)
            s.matrix(f"{at}ssm_out", s.width, 4096)
            for part in ("alpha", "beta"):
                s.matrix(f"{at}ssm_{part}", 32, s.width)
            s.vector(f"{at}ssm_conv1d.weight", 8192, 4, mean=0.0, spread=0.5)
            s.vector(f"{at}ssm_a", 32, mean=-0.5)
            s.vector(f"{at}ssm_dt.bias", 32, mean=0.0)
            s.vector(f"{at}ssm_norm.weight", 128)
        for part, rows, columns in (("gate", 9216, s.width), ("up", 9216, s.width), ("down", s.width, 9216)):
            s.matrix(f"{at}ffn_{part}", rows, columns)
    s.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=("qwen3moe", "qwen35"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    {"qwen3moe": qwen3moe, "qwen35": qwen35}[options.shape](options.path, options.layers)
