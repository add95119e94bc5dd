"""Tiny random models in the weight types that the `gguf` package cannot quantise to, and runners over tiny models."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from shoal.models.files import local_files
from shoal.runners.native import runner as native_runner
from shoal.runners.native.core import load_core
from shoal.runners.native.runner import KvPrecision, NativeRunner
from shoal.runners.registry import LocalModel
from tests.support.tiny_models import write_model

EMBD, FF, HEADS, KV_HEADS, DIM, VOCAB = 256, 256, 4, 2, 64, 130

SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "IQ2_XXS": (0,),
    "IQ3_S": (0,),
}
_CODES = {
    "Q4_0": 4.6,
    "Q4_1": 9.0,
    "Q5_0": 9.2,
    "Q5_1": 18.0,
    "Q8_0": 74.0,
    "Q4_K": 9.0 * 36,
    "Q5_K": 18.0 * 36,
    "Q6_K": 18.5 * 74,
    "Q2_K": 1.1 * 8,
    "Q3_K": 2.3 * 18,
    "IQ4_NL": 70.0,
    "IQ4_XS": 70.0 * 18,
    "MXFP4": 6.0,
    "IQ2_XXS": 25.0 * 2,
    "IQ3_S": 9.0 * 16,
}


def random_blocks(rng: np.random.Generator, kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Bytes of a weight with random codes and scales that make its values about as large as a trained one's."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    typical = 1.0 / math.sqrt(columns) / _CODES[kind]
    for index, at in enumerate(SCALES_AT[kind]):
        scale = typical * rng.uniform(0.5, 1.5, raw.shape[:2])
        if index and kind in ("Q4_1", "Q5_1"):
            scale = -scale * (7.5 if kind == "Q4_1" else 15.5)
        elif index:
            scale = scale * {"Q4_K": 7.5, "Q2_K": 1.5}.get(kind, 15.5)
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 128 + round(math.log2(typical)) + rng.integers(0, 2, raw.shape[:2])
    return raw.reshape(rows, -1)


def write_blocks(path: Path, kind: str, *, layers: int = 2, bad_token: int | None = None, zero: str = "") -> Path:
    """A llama with matrices of type `kind`. The embedding of `bad_token` has infinite scales, tensor `zero` is zero."""
    rng = np.random.default_rng(5)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)

    def matrix(name: str, rows: int, columns: int) -> None:
        raw = random_blocks(rng, kind, rows, columns)
        if name == zero:
            raw[:] = 0
        if name == "token_embd.weight" and bad_token is not None:
            at = SCALES_AT[kind][0]
            raw[bad_token, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])

    matrix("token_embd.weight", VOCAB, EMBD)
    matrix("output.weight", VOCAB, EMBD)
    writer.add_tensor("output_norm.weight", np.ones(EMBD, np.float32))
    for i in range(layers):
        for part, rows, columns in (
            ("attn_q", HEADS * DIM, EMBD),
            ("attn_k", KV_HEADS * DIM, EMBD),
            ("attn_v", KV_HEADS * DIM, EMBD),
            ("attn_output", EMBD, HEADS * DIM),
            ("ffn_gate", FF, EMBD),
            ("ffn_up", FF, EMBD),
            ("ffn_down", EMBD, FF),
        ):
            matrix(f"blk.{i}.{part}.weight", rows, columns)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{part}.weight", (1 + 0.3 * rng.standard_normal(EMBD)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_tiny(
    path: Path,
    *,
    isa: str = "auto",
    threads: int = 2,
    kv: KvPrecision = "auto",
    kv_bytes: int = 4 << 20,
    window_blocks: bool = False,
) -> NativeRunner:
    """A runner of some hundred blocks over the file, its packed form beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_ISA", isa)
        return NativeRunner.load(
            LocalModel.read(local_files("tiny", path)),
            kv_bytes=kv_bytes,
            cache_dir=path.parent,
            threads=threads,
            kv_precision=kv,
            window_blocks=window_blocks,
        )


def tiny_native(
    name: str, folder: Path, *, kind: str = "Q8_0", threads: int = 3, kv: KvPrecision = "auto", blocks: int = 160
) -> NativeRunner:
    """A runner over a tiny model of `tiny_models`, with room for about that many blocks and some checkpoints."""
    path = write_model(folder / f"{name}.gguf", name, kind)
    spec = open_tiny(path, kv=kv, kv_bytes=64 << 20).spec
    return open_tiny(path, threads=threads, kv=kv, kv_bytes=spec.block_bytes * blocks + spec.checkpoint_bytes * 16)


def windowed(
    name: str, folder: Path, *, blocks: int = 160, windows: int, kv: KvPrecision = "auto", kind: str = "Q8_0"
) -> NativeRunner:
    """A runner over a tiny model with a window: so many blocks, and so few window blocks that they run short."""
    path = write_model(folder / f"{name}.gguf", name, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_runner, "_windows_in", lambda *_: windows)
        spec = open_tiny(path, kv=kv, kv_bytes=64 << 20, window_blocks=True).spec
        kv_bytes = spec.block_bytes * blocks + spec.window_bytes * windows
        runner = open_tiny(path, threads=3, kv=kv, kv_bytes=kv_bytes, window_blocks=True)
    assert (runner.spec.num_blocks, runner.spec.num_windows) == (blocks, windows), runner.spec
    return runner


def isas() -> list[str]:
    """Instruction sets of this machine, best first; none where the extension is not built."""
    core = pytest.importorskip("shoal.runners.native._core")
    assert core is load_core()
    return list(core.isas())
