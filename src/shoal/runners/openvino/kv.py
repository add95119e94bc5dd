"""The KV arrays of one compiled model: one anonymous mapping, whose pages cost nothing until they are written."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BackendError, ConfigError


@dataclass(frozen=True, slots=True)
class CachePort:
    """One input that takes a KV array: `shape` is that of one block, [H_kv, slots, D], of `itemsize` bytes each."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    itemsize: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this array."""
        return math.prod(self.shape) * self.itemsize


def cache_ports(compiled: Any) -> list[CachePort]:
    """The KV inputs of a compiled model, with the types and shapes that the plugin chose."""
    ports = []
    for port in compiled.inputs:
        name = port.get_any_name()
        if name.startswith(("key_cache.", "value_cache.")):
            shape = tuple(d.get_length() for d in list(port.get_partial_shape())[1:])
            dtype = port.get_element_type()
            ports.append(CachePort(name, dtype, shape, dtype.size))
    if not ports or len({port.shape[-2] for port in ports}) != 1:
        raise BackendError("the plugin gave no KV arrays with blocks of one length", value=[p.shape for p in ports])
    return ports


class KVArrays:
    """`num_blocks` blocks that the core may use, and block `scratch` after them for rows that nobody reads.

    The invariant: block b of every array is bytes [b * block_bytes, (b + 1) * block_bytes) of its part of the mapping.
    """

    def __init__(self, ports: Sequence[CachePort], kv_bytes: int) -> None:
        per_block = sum(port.block_bytes for port in ports)
        self.num_blocks = kv_bytes // per_block
        if self.num_blocks < 1:
            raise ConfigError(
                f"kv_memory is {kv_bytes:,} bytes",
                value=kv_bytes,
                limit=per_block,
                hint=f"one block of KV takes {per_block:,} bytes: raise it to at least that",
            )
        self.scratch = self.num_blocks
        self.block_size = ports[0].shape[-2]
        self.bytes_per_token = per_block // self.block_size
        self.block_bytes = per_block
        self._ports = ports
        total = self.num_blocks + 1
        self._memory = _private_memory(per_block * total)
        self._blocks: list[NDArray[np.uint8]] = []
        begin = 0
        for port in ports:
            flat = np.frombuffer(self._memory, np.uint8, port.block_bytes * total, begin)
            self._blocks.append(flat.reshape(total, port.block_bytes))
            begin += flat.nbytes

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """(name of the input, `openvino.Tensor` over this memory) for every array."""
        import openvino as ov

        for port, blocks in zip(self._ports, self._blocks, strict=True):
            yield port.name, ov.Tensor(blocks.reshape(-1), ov.Shape([len(blocks), *port.shape]), port.dtype)

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole block, all layers."""
        for blocks in self._blocks:
            blocks[destination] = blocks[source]

    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a whole block to `out`, [block_bytes], array by array."""
        np.concatenate([blocks[block] for blocks in self._blocks], out=out)

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read` gave."""
        begin = 0
        for blocks in self._blocks:
            end = begin + blocks.shape[1]
            blocks[block] = data[begin:end]
            begin = end


def _private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed memory whose pages are taken when first written; in pages of 2 MiB where the system has them.

    Attention reads KV all over the mapping. With large pages, step times at 1,000 tokens of context changed by -14 to
    +4 %, most by -2 to -13 % (two runs at batch 1 to 32, on a busy machine); they cost one page per array once the
    first of its blocks is used.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows, whose anonymous mappings are private anyway
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
