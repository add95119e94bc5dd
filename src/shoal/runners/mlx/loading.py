"""From files to a model of `mlx-lm` and the facts about it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from shoal.errors import ConfigError, ModelError, ModelFormatError, UnsupportedModelError
from shoal.models.files import ModelFiles
from shoal.models.gguf import read_gguf
from shoal.runners.base import kv_budget
from shoal.runners.mlx.gguf import load_gguf
from shoal.runners.mlx.rows import BATCHED, Rows, kv_leaves, leaves, state_leaves
from shoal.runners.plan import ModelSpec

BLOCK_SIZE = 32
MAX_CHAIN = 16
_ROWS = 64  # rows of logits that the estimate of a step's memory counts
_CHECKPOINTS = 256  # the most that are kept, where memory is plenty
_MOST_BLOCKS = 1 << 20  # the core keeps books of each, also where a block takes next to nothing

Precision: TypeAlias = Literal["auto", "bf16", "f32"]

_DTYPES = {"bf16": mx.bfloat16, "f32": mx.float32}
_PROBES: tuple[Sequence[int], Sequence[int]] = ((1, 2), (3, 4, 5))
_NOISE = 0.1
"""How far a row of logits may be from the same row computed alone, against its own size: rounding stays far below."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, tried out alone and in a batch. Sizes in bytes.

    `window` is the shortest of its sliding windows in tokens, None where it has none. `row_bytes` is about what one
    token of a pass takes in activations. `kv_bytes_per_token` is 1 for a model without KV. `state_bytes` is the
    recurrent state of one sequence.
    """

    model: Any
    name: str
    architecture: str
    precision: str
    vocab_size: int
    context_length: int
    weight_bytes: int
    row_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    window: int | None


def device() -> str:
    """What MLX computes on by default: "cpu" or "gpu"."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def leave_thread() -> None:
    """End MLX's streams of this thread, if it is not the main one: a thread that ends with them aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        mx.synchronize()
        mx.clear_streams()


def read_model(files: ModelFiles, precision: Precision) -> Loaded:
    """Load a GGUF file or a directory with safetensors. Raises the `ModelError` that says what is wrong with it."""
    if files.kind == "openvino":
        raise UnsupportedModelError(
            f"{files.name} is an OpenVINO model", value=files.kind, hint="use runner='openvino', or other files of it"
        )
    if files.kind == "gguf":
        gguf = read_gguf(files.path)
        dtype = _DTYPES.get(precision, mx.float32 if device() == "cpu" else mx.float16)
        return describe(load_gguf(gguf, dtype), gguf.name, gguf.architecture, gguf.context_length)
    model, config = _from_directory(files.path)
    if precision != "auto":
        model.set_dtype(_DTYPES[precision])
    return describe(model, files.name, str(config["model_type"]), _context_length(config))


def _from_directory(path: Path) -> tuple[Any, dict[str, Any]]:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFormatError(f"{path}/config.json cannot be read ({error})", hint="fetch the model again") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise ModelFormatError(f"{path}/config.json names no model_type", value=model_type, hint="fetch it again")
    try:
        loaded: tuple[Any, dict[str, Any]] = load_model(path)
        return loaded
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise ModelFormatError(f"{path}: {error}", value=str(path), hint="it needs model*.safetensors") from error
    except ValueError as error:
        if "not supported" in str(error) or "custom module" in str(error):
            raise UnsupportedModelError(
                f"{path}: mlx-lm {metadata.version('mlx-lm')} has no model type {model_type!r} ({error})",
                value=model_type,
                hint="update mlx-lm, or use the model's GGUF file with another runner",
            ) from error
        raise ModelFormatError(f"{path}: {error}", value=model_type, hint="fetch the model again") from error
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelFormatError(
            f"{path}: not a complete {model_type} ({type(error).__name__}: {error})", hint="fetch the model again"
        ) from error


def _context_length(config: dict[str, Any]) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "max_seq_len"):
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return 4096


def describe(model: Any, name: str, architecture: str, context_length: int) -> Loaded:
    """Try a loaded model out, and read its sizes off the arrays. `UnsupportedModelError` when it cannot be batched."""
    caches = make_prompt_cache(model)
    _refuse_unknown(caches, name, architecture)
    logits = _tried(model, name, architecture)
    rows = Rows(caches, [0], [0])
    rows.feed(model, [_PROBES[0]])
    kv, states = kv_leaves(rows.caches), state_leaves(rows.caches)
    weights = [array for _, array in tree_flatten(model.parameters())]
    floats = [array.dtype for array in weights if mx.issubdtype(array.dtype, mx.floating)]
    heads = [array for leaf in kv for array in leaf.keys_and_values()]
    kinds = sorted({f"q{layer.bits}" for _, layer in model.named_modules() if hasattr(layer, "bits")})
    dtype = max(set(floats), key=floats.count)
    return Loaded(
        model=model,
        name=name,
        architecture=architecture,
        precision="/".join([str(dtype).rsplit(".", 1)[-1], *kinds]),
        vocab_size=logits.shape[-1],
        context_length=context_length,
        weight_bytes=sum(array.nbytes for array in weights),
        row_bytes=32 * max((array.shape[-1] for array in weights if array.dtype == dtype), default=0) * dtype.size,
        kv_bytes_per_token=sum(a.shape[1] * a.shape[3] * a.dtype.size for a in heads) or 1,
        state_bytes=sum(part.nbytes for leaf in states for part in leaf.cache if part is not None),
        window=min((leaf.max_size for leaf in kv if isinstance(leaf, RotatingKVCache)), default=None),
    )


def _refuse_unknown(caches: list[Any], name: str, architecture: str) -> None:
    for leaf in leaves(caches):
        if type(leaf) not in BATCHED or (isinstance(leaf, RotatingKVCache) and leaf.keep):
            raise UnsupportedModelError(
                f"{name}: layers of a {architecture} keep a {type(leaf).__name__}, which cannot be batched",
                value=type(leaf).__name__,
                limit=[kind.__name__ for kind in BATCHED],
                hint="use another model, or its GGUF file with another runner",
            )


def _tried(model: nn.Module, name: str, architecture: str) -> mx.array:
    """Logits after the probes, [2, V], once it is seen that a batch of both gives each what it gives alone."""

    def logits_of(chunks: Sequence[Sequence[int]]) -> mx.array:
        rows = Rows(make_prompt_cache(model), [0], [0])
        rows.join([Rows(make_prompt_cache(model), [i], [0]) for i in range(1, len(chunks))])
        rows.feed(model, [chunk[:-1] for chunk in chunks])
        return model(mx.array([chunk[-1:] for chunk in chunks]), cache=rows.caches)[:, -1, :].astype(mx.float32)

    try:
        alone = mx.concatenate([logits_of([probe]) for probe in _PROBES])
        together = logits_of(_PROBES)
        centred = alone - mx.mean(alone, axis=-1, keepdims=True)
        apart = mx.linalg.norm(together - alone, axis=-1) / mx.linalg.norm(centred, axis=-1)
        worst = float(mx.max(apart))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{name}: a {architecture} cannot be batched ({error})", value=architecture, hint="use another model"
        ) from error
    if not worst <= _NOISE:
        raise UnsupportedModelError(
            f"{name}: a {architecture} gives other logits in a batch than alone (relative distance {worst:.3f})",
            value=worst,
            limit=_NOISE,
            hint="use another model, or its GGUF file with another runner",
        )
    return together


def spec_of(loaded: Loaded, kv_bytes: int, memory_bytes: int | None, max_step_tokens: int) -> ModelSpec:
    """Facts for the core. A quarter of the budget for KV goes to checkpoints, where a model needs them."""
    step_bytes = max_step_tokens * loaded.row_bytes + _ROWS * loaded.vocab_size * 4
    budget = kv_budget(kv_bytes, memory_bytes, loaded.weight_bytes + step_bytes)
    checkpoints = 0
    if loaded.state_bytes:
        checkpoints = max(1, min(_CHECKPOINTS, budget // 4 // loaded.state_bytes))
    block_bytes = BLOCK_SIZE * loaded.kv_bytes_per_token
    left = budget - checkpoints * loaded.state_bytes
    blocks = min(left // block_bytes, _MOST_BLOCKS)
    if blocks < 1:
        needed = block_bytes + loaded.state_bytes
        raise ConfigError(
            f"kv_memory comes to {budget:,} bytes",
            value=budget,
            limit=needed,
            hint=f"a block of KV and a checkpoint take {needed:,} bytes: raise it to at least that",
        )
    return ModelSpec(
        name=loaded.name,
        architecture=loaded.architecture,
        runner="mlx",
        precision=loaded.precision,
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        weight_bytes=loaded.weight_bytes,
        step_bytes=step_bytes,
        max_chain=MAX_CHAIN if loaded.window is None else max(1, min(MAX_CHAIN, loaded.window // 2)),
        recurrent=loaded.state_bytes > 0,
        num_checkpoints=checkpoints,
        checkpoint_bytes=loaded.state_bytes,
    )
