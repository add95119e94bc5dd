"""The native kernels as the registry sees them."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.config import EngineConfig
from shoal.errors import BackendError, UnsupportedModelError
from shoal.models.files import Progress
from shoal.models.precision import AT_LOAD
from shoal.runners.base import Runner
from shoal.runners.native.core import INSTALL as INSTALL
from shoal.runners.registry import LocalModel, RunnerCard

WHY = "kernels of our own for this CPU and model"
HONOURS = ("threads", "pin_threads", "kv_precision", "kv_host", "kv_cache")
PRECISIONS = AT_LOAD
OPTIONS = ("mmap",)


def refuses(model: LocalModel | None, config: EngineConfig) -> str | None:
    """Why the kernels cannot run here, or leave this model to another runner."""
    from shoal.runners.native import describe as describe_native
    from shoal.runners.native.core import load_core

    try:
        load_core()
    except BackendError as error:
        return error.message
    if model is None:
        return None
    try:
        return describe_native.refuses(model.decoder())
    except UnsupportedModelError as error:
        return error.message


def load(model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None) -> Runner:
    """Load a GGUF file or a directory with safetensors; the weights are packed once, into `cache_dir`."""
    from shoal.runners.native.runner import NativeRunner

    kv_bytes = config.bytes_of("kv_memory")
    assert kv_bytes is not None
    return NativeRunner.load(
        model,
        kv_bytes=kv_bytes,
        memory_bytes=config.bytes_of("memory"),
        cache_dir=cache_dir,
        threads=config.threads,
        pin_threads=config.pin_threads,
        kv_precision=config.kv_precision,
        max_step_tokens=config.max_step_tokens,
        max_batch=config.max_batch,
        mmap=bool(config.runner_options.get("mmap", False)),
        window_blocks=True,
        precision=config.precision,
        progress=progress,
    )


def describe(model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
    """Threads, instruction sets and the size of the packed weights."""
    from shoal.runners.native.core import load_core
    from shoal.runners.native.runner import activations, packed_path

    core = load_core()
    asked = os.environ.get("SHOAL_ISA", "auto")
    isas = tuple(name for name in core.isas() if asked == "auto" or name.startswith(asked))
    inputs = activations(isas[0] if isas else asked)
    packed = None
    if model is not None and cache_dir is not None:
        packed = packed_path(model.files, cache_dir, config.precision)
    return RunnerCard(
        devices=(f"CPU, {config.threads or core.cpus()} threads",),
        precision=inputs if config.precision == "auto" else config.precision,
        why=f"weights {'as the file has them' if config.precision == 'auto' else f'quantised to {config.precision}'}, "
        f"activations in {'8 bits per group of 32' if inputs == 'int8' else f'{inputs} on matrix registers'}; "
        "KV in bf16 (kv_precision='u8' halves it)",
        kv=("bf16", "u8"),
        isa=isas,
        file_bytes=None if model is None else model.file_bytes,
        packed_bytes=packed.stat().st_size if packed is not None and packed.exists() else None,
    )
