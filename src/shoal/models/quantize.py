"""A GGUF file at another precision, so that one model can be compared with itself."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import ConfigError, ModelFormatError
from shoal.models.fetch import store_error
from shoal.models.gguf import GgufTensor, read_gguf

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = {"q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0", "q4_1": "MOSTLY_Q4_1"}
"""What can be written, and what the format calls a file of it."""

_SET_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What became of a file. Bytes before and after; `rms_error` is the root mean square of what the weights changed
    by, over that of the weights; `tensors` counts the ones that were quantised, the rest are as they were."""

    source_bytes: int
    bytes: int
    tensors: int
    rms_error: float


def quantize_gguf(source: Path, target: Path, kind: str, progress: Progress | None = None) -> Quantized:
    """Write the model at `source` to the new file `target` with its matrices as `kind`, one of `TYPES`.

    Norms and biases stay as they are. A kill leaves no `target`. `progress` hears of weights done and in all. Raises
    `ConfigError`, `ModelFormatError`, `UnsupportedModelError` and `StoreError`.
    """
    if kind not in TYPES:
        raise ConfigError(f"type is {kind!r}", value=kind, limit=list(TYPES), hint=f"known are {', '.join(TYPES)}")
    if target.exists():
        raise ConfigError(f"{target} exists", value=str(target), hint="give another name, or delete it first")
    model = read_gguf(source)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    tensors = list(model.tensors.values())
    total = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    done, changed, power, count = 0, 0.0, 0.0, 0
    try:
        with contextlib.closing(_begin(source, work, model.architecture, kind)) as writer:
            for tensor in tensors:
                error, squares = _add(writer, tensor, kind)
                changed, power, count = changed + error, power + squares, count + (squares > 0)
                done += int(np.prod(tensor.shape))
                if progress is not None:
                    progress(done, total)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        work.replace(target)
    except OSError as failure:
        if failure.errno is None:  # numpy tells only that less was written than it should: the disk is full
            failure = OSError(errno.ENOSPC, str(failure))
        raise store_error(failure, target) from failure
    finally:
        with contextlib.suppress(OSError):
            work.unlink(missing_ok=True)
    rms = float(np.sqrt(changed / power)) if power else 0.0
    return Quantized(source.stat().st_size, target.stat().st_size, count, rms)


def _begin(source: Path, target: Path, architecture: str, kind: str) -> GGUFWriter:
    """A writer with all metadata of `source`, each value in the type it has there."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

    writer = GGUFWriter(str(target), architecture)
    for field in GGUFReader(str(source)).fields.values():
        if field.name in _SET_ANEW or field.name.startswith("GGUF."):
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_quantization_version(2)
    writer.add_file_type(LlamaFileType[TYPES[kind]])
    return writer


def _add(writer: GGUFWriter, tensor: GgufTensor, kind: str) -> tuple[float, float]:
    """Add one tensor; gives the sum of squares of what changed and of the weights, or zeros for one that is kept."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

    wanted = GGMLQuantizationType[kind.upper()]
    if len(tensor.shape) != 2 or tensor.shape[1] % GGML_QUANT_SIZES[wanted][0]:
        stands = GGMLQuantizationType[tensor.type]
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        if stands is GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, np.ascontiguousarray(rows).view(np.float32))
        else:
            writer.add_tensor(tensor.name, rows, raw_dtype=stands)
        return 0.0, 0.0
    values = tensor.dequantize()
    if not np.isfinite(values).all():
        raise ModelFormatError(f"tensor {tensor.name!r} has values that are no numbers", value=tensor.name)
    packed = quantize(values, wanted)
    writer.add_tensor(tensor.name, packed, raw_dtype=wanted)
    error = dequantize(packed, wanted) - values
    return float(np.vdot(error, error)), float(np.vdot(values, values))
