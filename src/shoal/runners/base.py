"""What a runner is: the one thing between the scheduler and a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.types import SeqId, StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the core must know of a loaded model. Sizes in bytes, lengths in tokens.

    `step_bytes` is the most a step of `max_step_tokens` needs beside weights and KV (the transient).
    `copies_blocks`: the runner can copy a block (`StepPlan.copies`), so a prefix may be cut at any token.
    `exact`: logits of a sequence are the same bits whatever else is in the batch and however it is chunked.
    """

    name: str
    architecture: str
    runner: str
    precision: str
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    weight_bytes: int
    step_bytes: int = 0
    max_chain: int = 1
    copies_blocks: bool = True
    exact: bool = False
    recurrent: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits all blocks together."""
        return self.num_blocks * self.block_size


class Runner(Protocol):
    """Executes plans on one device. All calls come from the one thread that created it.

    Block ids are the caller's. A block's slots keep what was written until written again, also after the sequence that
    wrote them was released: that is what makes a shared prefix free.
    """

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
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
