"""What a runner is: the one thing between the scheduler and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.errors import ConfigError
from shoal.runners.plan import BlockId, ModelSpec, SeqId, StepOutput, StepPlan, WindowId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockAccess", "ModelSpec", "Runner", "kv_budget"]


class BlockAccess(Protocol):
    """KV blocks and checkpoints of recurrent state as bytes, for those who keep them outside the device.

    Only whole blocks are read. What is written must be what was read, from a runner of the same `identity`; sequences
    that use it then compute the same bits as if the block had been computed here. Calls come from the runner's thread,
    between steps. All raise `RunnerError` for ids out of range. Where the model has a window (`ModelSpec.window`), a
    block is read with its window block and only with it; what is read goes back to both, or to a block alone.
    """

    @property
    def identity(self) -> str:
        """Everything beside tokens that the bits of KV depend on: model files, kernels, precision, layout."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as it is read, its window block included."""
        ...

    def read_block(self, block: BlockId, out: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Copy one block to `out`, [block_bytes]. `RunnerError` when some of its slots were never written."""
        ...

    def write_block(self, block: BlockId, data: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Put back what `read_block` gave."""
        ...

    def discard_blocks(self, blocks: Sequence[BlockId], windows: Sequence[WindowId] = ()) -> None:
        """Nobody needs what is in these: give their memory back to the system where that can be done."""
        ...

    def read_checkpoint(self, checkpoint: int) -> NDArray[np.uint8]:
        """A copy of a recurrent state, [ModelSpec.checkpoint_bytes]. `RunnerError` when none was saved there."""
        ...

    def write_checkpoint(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_checkpoint` gave: the state after that many tokens."""
        ...


class Runner(Protocol):
    """Executes plans on one device. All calls come from the one thread that created it.

    Block ids are the caller's. A block's slots keep what was written until written again, also after the sequence that
    wrote them was released: that is what makes a shared prefix free.
    """

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use at once so far, in this process; None where the backend does not count it."""
        ...

    @property
    def access(self) -> BlockAccess | None:
        """How blocks are read and written as bytes; None where the backend cannot."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput:
        """One forward pass over all sequences of the plan (or `plan.chain` of them, chained).

        Raises `RunnerError` when the pass fails; KV written by a failed pass must be taken for undefined.
        """
        ...

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Drop whatever is kept per sequence. Unknown ids are ignored; KV blocks stay as they are."""
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent; no other call may follow."""
        ...


def kv_budget(kv_bytes: int, memory_bytes: int | None, fixed_bytes: int) -> int:
    """Bytes for KV: `kv_bytes`, or what `memory_bytes` leaves beside `fixed_bytes` (weights and a step) if less.

    Raises `ConfigError` when nothing is left.
    """
    if memory_bytes is None:
        return kv_bytes
    left = memory_bytes - fixed_bytes
    if left <= 0:
        raise ConfigError(
            f"memory is {memory_bytes:,} bytes, and weights and a step take {fixed_bytes:,} of it",
            value=memory_bytes,
            limit=fixed_bytes,
            hint="raise memory, lower max_step_tokens, or load a smaller model",
        )
    return min(kv_bytes, left)
