"""From files to a model that can be compiled: a GGUF file by way of the conversion cache, or an OpenVINO directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.errors import BackendError, ModelFormatError, ModelNotFoundError
from shoal.runners.openvino.convert import converted
from shoal.runners.openvino.graph import build, paged_from_ir

Precision: TypeAlias = Literal["auto", "bf16", "f32"]

IR_NAME = "openvino_model.xml"


@dataclass(frozen=True, slots=True)
class PagedSource:
    """A paged `openvino.Model` that is not compiled yet. `keep` must live as long as what is compiled from it.

    `identity` changes with the files. `step_elements_per_token` is how many elements of activations a pass holds at a
    time, per token fed.
    """

    model: Any
    identity: str
    name: str
    architecture: str
    context_length: int
    weight_bytes: int
    step_elements_per_token: int
    keep: object = None


def open_core() -> Any:
    """A fresh `openvino.Core`; OpenVINO is imported here and not before. Raises `BackendError` without it."""
    try:
        import openvino as ov
    except ImportError as error:
        raise BackendError(f"OpenVINO cannot be imported ({error})", hint="pip install openvino") from error
    core = ov.Core()
    if "CPU" not in core.available_devices:
        raise BackendError("OpenVINO has no CPU plugin here", value=core.available_devices, hint="reinstall openvino")
    return core


def best_precision(core: Any) -> tuple[Precision, str]:
    """The precision to use on this CPU, and why."""
    if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return "bf16", "this CPU multiplies it natively"
    return "f32", "this CPU has no native bf16"


def machine(core: Any) -> tuple[str, str]:
    """What decides which kernels run: the CPU's name and OpenVINO's version."""
    import openvino as ov

    return str(core.get_property("CPU", "FULL_DEVICE_NAME")), str(ov.__version__)


def read_source(core: Any, path: Path, cache_dir: Path) -> PagedSource:
    """Read the GGUF file or OpenVINO directory at `path`. Raises the `ModelError` that fits."""
    if path.is_dir():
        return _from_directory(core, path)
    if not path.is_file():
        raise ModelNotFoundError(f"{path} does not exist", value=str(path), hint="check the path or pull the model")
    model = converted(path, cache_dir)
    about = model.description
    return PagedSource(
        model=build(model),
        identity=model.path.name,
        name=about.name,
        architecture=about.architecture,
        context_length=about.context_length,
        weight_bytes=model.weight_bytes,
        step_elements_per_token=_step_elements_per_token(about.n_embd, about.n_ff),
        keep=model,
    )


def _from_directory(core: Any, path: Path) -> PagedSource:
    xml, config_path = path / IR_NAME, path / "config.json"
    if not xml.is_file():
        raise ModelFormatError(f"{path} has no {IR_NAME}", value=str(path), hint="give a directory that has one")
    try:
        config = json.loads(config_path.read_bytes())
        architecture, context_length = str(config["model_type"]), int(config["max_position_embeddings"])
        sizes = int(config["hidden_size"]), int(config["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"{config_path} does not describe a decoder ({error!r})",
            value=str(config_path),
            hint="it comes with the model on the hub",
        ) from error
    return PagedSource(
        model=paged_from_ir(core, xml),
        identity=f"{xml.resolve()} {xml.stat().st_size} {xml.stat().st_mtime_ns}",
        name=path.name,
        architecture=architecture,
        context_length=context_length,
        weight_bytes=xml.with_suffix(".bin").stat().st_size,
        step_elements_per_token=_step_elements_per_token(*sizes),
    )


def _step_elements_per_token(n_embd: int, n_ff: int) -> int:
    """Elements of activations that a pass holds per token; measured 20,000 to 20,400 for sizes of 576 and 1,536."""
    return 8 * n_ff + 14 * n_embd
