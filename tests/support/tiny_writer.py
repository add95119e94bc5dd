"""Writes GGUF files of tiny decoders: what a layer of any kind is made of, drawn at random."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from numpy.typing import NDArray

WIDTH, FF, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 64, 96, 4, 2, 32, 4, 288
EXPERTS, USED, EXPERT_FF = 8, 3, 32
CONTEXT = 512


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Byte-level BPE: 256 bytes, 30 merges, an end and an unknown; (tokens, merges, types)."""
    codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in codes]
    tokens = [chr(code) for code in codes] + [chr(256 + i) for i in range(len(rest))]
    letters = "etaoinshrdlucmf"
    merges = [f"Ġ {letter}" for letter in letters] + [
        f"{a} {b}" for a, b in zip(letters, letters[1:] + "e", strict=True)
    ]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|end|>", "<|start|>"]
    return tokens, merges, [1] * (len(tokens) - 2) + [3, 3]


class Tiny:
    """A file being written: `matrix` and `vector` draw weights, `key` sets the metadata of the architecture."""

    def __init__(self, path: Path, architecture: str, kind: str, seed: str) -> None:
        self.writer = GGUFWriter(str(path), architecture)
        self.architecture, self.kind, self.layers = architecture, kind, LAYERS
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))
        tokens, merges, types = vocabulary()
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("qwen2")
        self.writer.add_token_list(tokens)
        self.writer.add_token_merges(merges)
        self.writer.add_token_types(types)
        self.writer.add_eos_token_id(len(tokens) - 2)
        self.writer.add_bos_token_id(len(tokens) - 1)
        self.writer.add_add_bos_token(False)
        self.keys(
            context_length=CONTEXT,
            embedding_length=WIDTH,
            vocab_size=VOCAB,
            feed_forward_length=FF,
            **{
                "attention.head_count": HEADS,
                "attention.head_count_kv": KV_HEADS,
                "attention.key_length": HEAD,
                "attention.value_length": HEAD,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.freq_base": 10000.0,
            },
        )

    def keys(self, **values: Any) -> None:
        """Metadata under the architecture's prefix; a later value replaces an earlier one."""
        for key, value in values.items():
            full = f"{self.architecture}.{key}"
            self.writer.kv_data[0].pop(full, None)
            if isinstance(value, bool):
                self.writer.add_bool(full, value)
            elif isinstance(value, int):
                self.writer.add_uint32(full, value)
            elif isinstance(value, float):
                self.writer.add_float32(full, value)
            elif isinstance(value, str):
                self.writer.add_string(full, value)
            else:
                self.writer.add_array(full, list(value))

    def drop(self, *keys: str) -> None:
        """Take metadata back that a family's files do not have."""
        for key in keys:
            self.writer.kv_data[0].pop(f"{self.architecture}.{key}", None)

    def matrix(self, name: str, *shape: int, kind: str | None = None) -> None:
        """A matrix [.., outputs, inputs] in the file's type, or in `kind`."""
        values = self.rng.standard_normal(shape).astype(np.float32) * np.float32(1.5 / np.sqrt(shape[-1]))
        quantization = GGMLQuantizationType[kind or self.kind]
        self.writer.add_tensor(f"{name}.weight", quantize(values, quantization), raw_dtype=quantization)

    def vector(self, name: str, *shape: int, mean: float = 0.0) -> None:
        """Small numbers around `mean`, float32, under their full name."""
        self.raw(name, (mean + 0.3 * self.rng.standard_normal(shape)).astype(np.float32))

    def raw(self, name: str, values: NDArray[Any]) -> None:
        """These numbers, as float32."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, size: int = WIDTH) -> None:
        """The weight of a norm, around one."""
        self.vector(f"{name}.weight", size, mean=1.0)

    def outside(self, *, tied: bool = False, norm: str = "output_norm") -> None:
        """Embedding, final norm, head."""
        self.matrix("token_embd", VOCAB, WIDTH)
        self.norm(norm)
        if not tied:
            self.matrix("output", VOCAB, WIDTH)

    def attention(
        self,
        i: int,
        *,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        head: int = HEAD,
        bias: str = "",
        qk_norm: int = 0,
        gated: bool = False,
        fused: bool = False,
        kv: str = "kv",
    ) -> None:
        """Q, K, V and output of layer i. `bias` names the parts with biases, `kv` the parts of K and V that it has."""
        at = f"blk.{i}.attn_"
        sizes = {"q": heads * head * (2 if gated else 1), "k": kv_heads * head, "v": kv_heads * head}
        if fused:
            self.matrix(f"{at}qkv", sum(sizes.values()), WIDTH)
        else:
            for part in ("q", *kv):
                self.matrix(f"{at}{part}", sizes[part], WIDTH)
                if part in bias:
                    self.vector(f"{at}{part}.bias", sizes[part])
        self.matrix(f"{at}output", WIDTH, heads * head)
        if "o" in bias:
            self.vector(f"{at}output.bias", WIDTH)
        for part in ("q", "k")[: 1 if kv == "" else 2] if qk_norm else ():
            count = 1 if qk_norm == 1 else (heads if part == "q" else kv_heads)
            self.norm(f"{at}{part}_norm", count * head)

    def dense(self, i: int, size: int = FF, *, gate: bool = True, fused: bool = False, suffix: str = "") -> None:
        """The feed-forward of layer i."""
        at = f"blk.{i}.ffn_"
        if gate and not fused:
            self.matrix(f"{at}gate{suffix}", size, WIDTH)
        self.matrix(f"{at}up{suffix}", 2 * size if fused else size, WIDTH)
        self.matrix(f"{at}down{suffix}", WIDTH, size)

    def experts(
        self,
        i: int,
        size: int = EXPERT_FF,
        *,
        gate: bool = True,
        fused: bool = False,
        bias: bool = False,
        kind: str | None = None,
        inner: int = WIDTH,
    ) -> None:
        """Router and experts of layer i."""
        at = f"blk.{i}.ffn_"
        self.matrix(f"{at}gate_inp", EXPERTS, WIDTH, kind="F32")
        names = ("gate_up",) if fused else ("gate", "up") if gate else ("up",)
        for name in names:
            outputs = 2 * size if fused else size
            self.matrix(f"{at}{name}_exps", EXPERTS, outputs, inner, kind=kind)
            if bias:
                self.vector(f"{at}{name}_exps.bias", EXPERTS, outputs)
        self.matrix(f"{at}down_exps", EXPERTS, inner, size, kind=kind)
        if bias:
            self.vector(f"{at}down_exps.bias", EXPERTS, WIDTH)
            self.vector(f"{at}gate_inp.bias", EXPERTS)

    def delta_net(self, i: int) -> None:
        """A gated delta net of 2 key heads and 4 value heads."""
        at = f"blk.{i}."
        keys, values = 2 * HEAD, 4 * HEAD
        self.matrix(f"{at}attn_qkv", 2 * keys + values, WIDTH)
        self.matrix(f"{at}attn_gate", values, WIDTH)
        self.raw(f"{at}ssm_conv1d.weight", 0.5 * self.rng.standard_normal((2 * keys + values, 4)))
        self.decay(f"{at}ssm_a", 4)
        self.vector(f"{at}ssm_dt.bias", 4)
        self.norm(f"{at}ssm_norm", HEAD)
        self.matrix(f"{at}ssm_out", WIDTH, values)

    def mamba2(self, i: int, groups: int) -> None:
        """A Mamba 2 mixer of 4 heads of 32 and a state of 32."""
        at, inner, state = f"blk.{i}.", 2 * WIDTH, 32
        channels = inner + 2 * groups * state
        self.matrix(f"{at}ssm_in", inner + channels + 4, WIDTH)
        self.raw(f"{at}ssm_conv1d.weight", 0.5 * self.rng.standard_normal((channels, 4)))
        self.vector(f"{at}ssm_conv1d.bias", channels)
        self.decay(f"{at}ssm_a", 4, 1)
        self.vector(f"{at}ssm_d", 4, 1)
        self.vector(f"{at}ssm_dt.bias", 4)
        self.vector(f"{at}ssm_norm.weight", groups, inner // groups, mean=1.0)
        self.matrix(f"{at}ssm_out", WIDTH, inner)

    def decay(self, name: str, *shape: int) -> None:
        """Numbers below zero."""
        self.raw(name, -np.exp(self.rng.uniform(-3, 1, shape)))

    def norms(self, i: int, *names: str) -> None:
        """Norms of layer i over the stream."""
        for name in names:
            self.norm(f"blk.{i}.{name}")

    def close(self) -> None:
        """Write it all."""
        self.keys(block_count=self.layers)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
