"""The converted weights of one model in one file, written once and mapped at every later load.

The file is in the safetensors format (a JSON header with names, types, shapes and offsets, then the bytes), so that
other tools can read it; the model's description is in the header's `__metadata__`. Arrays are views of the mapped
file: nothing is read before it is used, and the system may drop the pages again. The `safetensors` library writes only
what is in memory all at once, without alignment, and reads copies: so what stands here is written by hand.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelFormatError, StoreError

_TYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_PADDING = ".padding"
_ALIGN = 64  # a cache line, and the widest vector
_HEADER_ROOM = 4096  # bytes kept for the description and the padding of the header
_ENTRY_ROOM = 256  # bytes kept per array: a name, a type, a shape and two offsets, and the same for its padding


@dataclass(frozen=True, slots=True)
class Description:
    """What the graph needs beside its weights. Lengths count tokens, sizes count elements.

    `tied`: the projection to the vocabulary is the token embedding; `qkv_bias`: the products of Q, K and V have biases;
    `qk_norm`: queries and keys are normalised per head.
    """

    name: str
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_embd: int
    n_ff: int
    vocab_size: int
    context_length: int
    rms_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A mapped file: its description and its arrays by name, not to be written to, valid while referenced."""

    path: Path
    description: Description
    arrays: Mapping[str, NDArray[Any]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())


def write_converted(
    path: Path, description: Description, arrays: Iterable[tuple[str, NDArray[Any]]], max_arrays: int
) -> None:
    """Write `arrays` one after the other as they come, so that one is in memory at a time; replaces `path` at once.

    Either the whole file is there under its name, or none. Raises `StoreError` when the disk refuses.
    """
    room = -(-(_HEADER_ROOM + max_arrays * _ENTRY_ROOM) // _ALIGN) * _ALIGN - 8  # with the 8 of its length, aligned
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                header: dict[str, Any] = {"__metadata__": {"shoal": json.dumps(asdict(description))}}
                file.seek(8 + room)
                begin = 0
                for name, array in arrays:
                    # The format has no holes: what aligns the next array is an array too.
                    padding = np.zeros(-array.nbytes % _ALIGN, np.uint8)
                    for key, each in ((name, array), (name + _PADDING, padding)):
                        if each.nbytes:
                            file.write(np.ascontiguousarray(each).data)
                            header[key] = {
                                "dtype": _NAMES[each.dtype],
                                "shape": list(each.shape),
                                "data_offsets": [begin, begin + each.nbytes],
                            }
                            begin += each.nbytes
                text = json.dumps(header).encode()
                file.seek(0)
                # Spaces after the JSON are part of the format.
                file.write(struct.pack("<Q", room) + text.ljust(room))
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror})", value=str(path), hint="check the disk or set another cache"
        ) from error


def open_converted(path: Path) -> ConvertedModel:
    """Map a file that `write_converted` made. Raises `ModelFormatError` when it is missing or not such a file."""
    try:
        with path.open("rb") as file:
            # OpenVINO shares only writable memory; copy on write keeps the file as it is whatever happens.
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (room,) = struct.unpack_from("<Q", buffer)
        header: dict[str, Any] = json.loads(buffer[8 : 8 + room])
        description = Description(**json.loads(header.pop("__metadata__")["shoal"]))
        arrays = {}
        for name, entry in header.items():
            if name.endswith(_PADDING):
                continue
            dtype, shape, (begin, end) = _TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            flat = np.frombuffer(buffer, dtype, (end - begin) // dtype.itemsize, 8 + room + begin)
            arrays[name] = flat.reshape(shape)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelFormatError(
            f"{path} is not a converted model ({error})", value=str(path), hint="delete it and load again"
        ) from error
    return ConvertedModel(path, description, arrays)
