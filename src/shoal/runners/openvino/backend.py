"""OpenVINO as the registry sees it; this file imports no OpenVINO."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Literal, cast

from shoal.config import EngineConfig
from shoal.errors import ModelError
from shoal.models.files import Progress
from shoal.runners.base import Runner
from shoal.runners.registry import LocalModel, RunnerCard

WHY = "OpenVINO's kernels for CPUs"
INSTALL = "pip install openvino"
HONOURS = ("threads", "pin_threads", "kv_host", "kv_cache")
PRECISIONS = ("bf16", "f32")
OPTIONS = ()


def refuses(model: LocalModel | None, config: EngineConfig) -> str | None:
    """Why OpenVINO cannot run here, or this model."""
    if importlib.util.find_spec("openvino") is None:
        return f"openvino is not installed for {sys.executable}"
    if model is None or model.files.kind == "openvino":
        return None
    if model.gguf is None:
        return f"it reads GGUF files and OpenVINO models, not {model.files.kind}"
    from shoal.models import families
    from shoal.runners.openvino import convert

    try:
        convert.describe(families.describe(model.gguf))
    except ModelError as error:
        return str(error)
    return None


def load(model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None) -> Runner:
    """Load a directory with an OpenVINO model, or a GGUF, which is converted once, into `cache_dir`."""
    from shoal.runners.openvino.runner import OpenVINORunner

    kv_bytes = config.bytes_of("kv_memory")
    assert kv_bytes is not None
    return OpenVINORunner.load(
        model.files.path,
        kv_bytes=kv_bytes,
        memory_bytes=config.bytes_of("memory"),
        cache_dir=cache_dir,
        threads=config.threads,
        pin_threads=config.pin_threads,
        precision=cast(Literal["auto", "bf16", "f32"], config.precision),  # the registry has refused others
        max_step_tokens=config.max_step_tokens,
    )


def describe(model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
    """The precision that this CPU multiplies, and what the plugin says it can do."""
    from shoal.runners.openvino.loading import best_precision, open_core

    core = open_core()
    name, why = best_precision(core)
    return RunnerCard(
        devices=tuple(core.available_devices),
        precision=name,
        why=f"{why}; KV alike",
        kv=(name,),
        isa=tuple(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        file_bytes=None if model is None else model.file_bytes,
    )
