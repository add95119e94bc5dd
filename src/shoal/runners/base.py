"""What a runner is: the one thing between the scheduler and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.errors import ConfigError
from shoal.runners.plan import ModelSpec, SeqId, StepOutput, StepPlan

__all__ = ["ModelSpec", "Runner", "kv_budget"]


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
