"""MLX as the registry sees it; this file imports no MLX."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

from shoal.config import EngineConfig, parse_bytes
from shoal.errors import BackendError, ModelError
from shoal.models.files import Progress
from shoal.runners.base import Runner
from shoal.runners.registry import LocalModel, RunnerCard

WHY = "Apple silicon"
INSTALL = "pip install 'shoal[mlx]', or use runner='openvino'"
HONOURS = ()
PRECISIONS = ("bf16", "f32")
OPTIONS = ("cache_limit",)
"""`cache_limit`: bytes of freed memory that MLX keeps for reuse, in this process; without it MLX decides."""


def on_apple_silicon() -> bool:
    """Whether this process runs natively on one of Apple's own processors."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def refuses(model: LocalModel | None, config: EngineConfig) -> str | None:
    """Why MLX cannot run here, or this model. It is never chosen unasked off Apple silicon, where it is slow."""
    if config.runner == "auto" and not on_apple_silicon():
        return "this is not Apple silicon"
    missing = [module for module in ("mlx", "mlx_lm") if importlib.util.find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed for {sys.executable}"
    if model is None:
        return None
    if model.files.kind == "openvino":
        return f"{model.files.name} is an OpenVINO model"
    if model.gguf is None:
        return None
    try:
        reason: str | None = import_mlx("gguf").refusal(model.gguf)
    except (BackendError, ModelError) as error:
        return str(error) if isinstance(error, ModelError) else error.message
    return reason


def load(model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None) -> Runner:
    """Load a GGUF, or a directory that `mlx-lm` knows. Nothing is kept in `cache_dir`."""
    limit = config.runner_options.get("cache_limit")
    runner: Runner = import_mlx("runner").MLXRunner.load(
        model.files,
        kv_bytes=config.bytes_of("kv_memory"),
        memory_bytes=config.bytes_of("memory"),
        precision=config.precision,
        max_step_tokens=config.max_step_tokens,
        cache_limit=None if limit is None else parse_bytes(limit, "cache_limit"),
    )
    return runner


def describe(model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
    """The device of MLX. Weights stay as the files have them: there is no packed form."""
    device = import_mlx("loading").device()
    floats = "float32" if device == "cpu" else "float16"
    return RunnerCard(
        devices=(f"MLX, {device}",),
        precision="as the files have it",
        why=f"MLX computes on {device}; a GGUF's floats become {floats}",
        file_bytes=None if model is None else model.file_bytes,
    )


def import_mlx(module: str) -> Any:
    """A module of this folder that needs MLX. `BackendError` when MLX is not installed, or does not run here."""
    try:
        return importlib.import_module(f"shoal.runners.mlx.{module}")
    except ImportError as error:
        raise BackendError(f"MLX cannot be imported ({error})", hint=INSTALL) from error
