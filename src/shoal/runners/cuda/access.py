"""KV blocks of the device as bytes, for those who keep them in host memory or on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.cuda.states import States
from shoal.runners.plan import BlockId, ScheduledSequence, WindowId


class DeviceBlocks:
    """Reads and writes whole blocks of a model's KV; knows which of them have all their slots written.

    `parts` are the tensors that make up KV, [layers, 2, blocks + 1, ...] each: a block's bytes are its share of the
    first, then of the second. Copies go through the stream that computes, so they come after all that was started.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        blocks: int,
        block_size: int,
        identity: str,
        states: States | None = None,
    ) -> None:
        self._parts = tuple(parts)
        self._blocks, self._size = blocks, block_size
        self._identity = identity
        self._states = states
        self._sizes = [part[:, :, 0].numel() * part.element_size() for part in self._parts]
        self._full: set[BlockId] = set()

    @property
    def identity(self) -> str:
        """Model, precision of KV, GPU architecture, versions of the compiler, and these very kernels."""
        return self._identity

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        return sum(self._sizes)

    def wrote(self, sequences: Iterable[ScheduledSequence], chain: int) -> None:
        """A step was computed: the blocks that it wrote the last slot of are full."""
        size = self._size
        for s in sequences:
            first, end = s.start // size, (s.start + len(s.tokens) + chain - 1) // size
            if end > first:
                self._full.update(s.block_table[first:end])

    def copy(self, source: BlockId, target: BlockId) -> None:
        """All of a block's slots, on the device."""
        self._check(source)
        self._check(target)
        for part in self._parts:
            part[:, :, target] = part[:, :, source]
        (self._full.add if source in self._full else self._full.discard)(target)

    def read_block(self, block: BlockId, out: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Copy one block to `out`. `RunnerError` when it is not full, or `out` is of another size."""
        self._check(block, window)
        if block not in self._full:
            raise RunnerError(f"block {block} has slots that nothing was written to", value=block)
        for part, data in self._shares(out):
            torch.from_numpy(data).copy_(part[:, :, block].reshape(-1).view(torch.uint8))

    def write_block(self, block: BlockId, data: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Put back what `read_block` gave."""
        self._check(block, window)
        for part, share in self._shares(data):
            here = part[:, :, block]
            # A copy of our own: bytes of a file may be read only and at any address, torch wants neither.
            source = torch.from_numpy(share.copy()).view(part.dtype).reshape(here.shape)
            here.copy_(source)
        self._full.add(block)

    def discard_blocks(self, blocks: Sequence[BlockId], windows: Sequence[WindowId] = ()) -> None:
        """Forget what is in them. The device's memory stays with KV: it was taken as a whole."""
        for window in windows:
            raise RunnerError("all KV of this runner is in the blocks", value=window)
        self._full.difference_update(blocks)

    def read_checkpoint(self, checkpoint: int) -> NDArray[np.uint8]:
        """A copy of a recurrent state. `RunnerError` when none was saved there."""
        return self._recurrent(checkpoint).read(checkpoint)

    def write_checkpoint(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_checkpoint` gave: the state after that many tokens."""
        self._recurrent(checkpoint).write(checkpoint, tokens, data)

    def _recurrent(self, checkpoint: int) -> States:
        if self._states is None:
            raise RunnerError("this model has no recurrent state", value=checkpoint)
        return self._states

    def _check(self, block: BlockId, window: WindowId | None = None) -> None:
        if window is not None:
            raise RunnerError(f"all KV of this runner is in the blocks, and block {block} has none apart", value=window)
        if not 0 <= block < self._blocks:
            raise RunnerError(f"block {block} is out of range", value=block, limit=self._blocks)

    def _shares(self, data: NDArray[np.uint8]) -> list[tuple[torch.Tensor, NDArray[np.uint8]]]:
        """Each part with its share of a block's bytes."""
        if data.dtype != np.uint8 or data.shape != (self.block_bytes,):
            raise RunnerError(
                f"a block is {data.dtype} {data.shape}", value=data.shape, limit=self.block_bytes, hint="pass its bytes"
            )
        ends = np.cumsum(self._sizes)
        return [(part, data[end - size : end]) for part, size, end in zip(self._parts, self._sizes, ends, strict=True)]


def identity_of(key: str, kv_precision: str, device: torch.device) -> str:
    """Everything beside tokens that KV's bits depend on. `key` names the model's files by their contents."""
    where = "interpreter"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"sm_{major}{minor}"
    return f"cuda {key} {kv_precision} {where} torch {torch.__version__} triton {triton.__version__} {_kernels()}"


@cache
def _kernels() -> str:
    """A digest of this folder's sources: what computes KV, how it is launched, and how weights are stored."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
