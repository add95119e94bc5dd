"""Recurrent state on the device: where each sequence's lies, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.plan import ScheduledSequence, SeqId, StepPlan, Want


@dataclass(frozen=True, slots=True, eq=False)
class StateStore:
    """Recurrent state of all layers that have one, entry by entry: two of each place, then one of each checkpoint.

    `inputs` bf16 [entries, layers, taps - 1, channels]: what the convolutions took last, oldest first. `matrices`
    float32 [entries, layers, value heads, key_dim, value_dim].
    """

    inputs: torch.Tensor
    matrices: torch.Tensor
    places: int

    @classmethod
    def empty(
        cls, inputs: tuple[int, ...], matrices: tuple[int, ...], places: int, checkpoints: int, device: torch.device
    ) -> StateStore:
        """For `places` sequences at once; shapes are those of one entry."""
        entries = 2 * places + checkpoints
        return cls(
            torch.zeros((entries, *inputs), dtype=torch.bfloat16, device=device),
            torch.zeros((entries, *matrices), device=device),
            places,
        )

    @property
    def checkpoints(self) -> int:
        """Room for so many."""
        return len(self.inputs) - 2 * self.places

    @property
    def entry_bytes(self) -> int:
        """Bytes of one state."""
        return int(self.inputs[0].nbytes + self.matrices[0].nbytes)

    def parts(self, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of one entry."""
        return self.inputs[entry], self.matrices[entry]

    def copy(self, source: int, target: int) -> None:
        """On the device, after all that was started."""
        for here, there in zip(self.parts(source), self.parts(target), strict=True):
            there.copy_(here, non_blocking=True)


@dataclass(slots=True)
class _Held:
    """A sequence's state after `seen` tokens is in entry 2 * place + (seen + flip) % 2."""

    place: int
    flip: int = 0
    seen: int = 0


class States:
    """Which place holds which sequence's state, and after how many tokens.

    Invariant: a step reads one entry of a place and writes the other. So one that ran ahead and is thrown away, failed,
    or is computed twice (to capture its graph) has spoiled nothing that the next one reads. The entry follows from the
    position, so it goes on by itself where tokens are chained on the device.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._free = list(range(store.places - 1, -1, -1))
        self._held: dict[SeqId, _Held] = {}  # least recently started first
        self._saved = [0] * store.checkpoints  # tokens that a checkpoint was kept after; 0: nothing is there

    def check(self, plan: StepPlan) -> None:
        """`RunnerError` for checkpoints out of range, and for sequences that go on without their state."""
        for s in plan.sequences:
            for checkpoint in (s.load, s.save):
                if checkpoint is not None:
                    self._entry(checkpoint)
            if s.save is not None and s.want is not Want.NOTHING:
                raise RunnerError(f"sequence {s.seq_id}: a chunk that wants output keeps no state", value=s.save)
            own = self._held.get(s.seq_id)
            seen = self._saved[s.load] if s.load is not None else 0 if own is None else own.seen
            if s.start > 0 and seen != s.start:
                what = f"sequence {s.seq_id} goes on at {s.start} without its recurrent state"
                raise RunnerError(f"{what}, which is that of {seen} tokens", value=seen, limit=s.start)
        if len({s.seq_id for s in plan.sequences}) > self._store.places:
            raise RunnerError(
                f"{len(plan.sequences)} sequences in a step", value=len(plan.sequences), limit=self._store.places
            )

    def begin(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Give each a place, and bring the checkpoints that they start from there."""
        here = {s.seq_id for s in sequences}
        for s in sequences:
            held = self._held.pop(s.seq_id, None)
            if held is None:
                if not self._free:
                    self.release([next(seq_id for seq_id in self._held if seq_id not in here)])
                held = _Held(self._free.pop())
            self._held[s.seq_id] = held
            if s.load is not None and s.start > 0:
                self._store.copy(self._entry(s.load), self._current(held, s.start))

    def of(self, seq_id: SeqId) -> tuple[int, int]:
        """The place and flip of a sequence of this step, as kernels want them."""
        held = self._held[seq_id]
        return held.place, held.flip

    def end(self, plan: StepPlan) -> None:
        """The step is on its way: states are those after its tokens. Checkpoints are kept."""
        for s in plan.sequences:
            held, fed = self._held[s.seq_id], len(s.tokens)
            held.seen = s.start + fed + plan.chain - 1
            held.flip ^= (fed + 1) & 1  # one step is one change of entries, of however many tokens
            if s.save is not None:
                self._store.copy(self._current(held, held.seen), self._entry(s.save))
                self._saved[s.save] = held.seen

    def release(self, seq_ids: Iterable[SeqId]) -> None:
        """Give their places to others."""
        for seq_id in seq_ids:
            held = self._held.pop(seq_id, None)
            if held is not None:
                self._free.append(held.place)

    def read(self, checkpoint: int) -> NDArray[np.uint8]:
        """A copy of a checkpoint's bytes."""
        entry = self._entry(checkpoint)
        if not self._saved[checkpoint]:
            raise RunnerError(f"nothing was saved to checkpoint {checkpoint}", value=checkpoint)
        parts = [part.reshape(-1).view(torch.uint8).cpu().numpy() for part in self._store.parts(entry)]
        return np.concatenate(parts)

    def write(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read` gave."""
        entry, size = self._entry(checkpoint), self._store.entry_bytes
        if tokens < 1 or data.dtype != np.uint8 or data.shape != (size,):
            raise RunnerError(f"a checkpoint is {data.dtype} {data.shape}", value=data.shape, limit=size)
        at = 0
        for part in self._store.parts(entry):
            share = torch.from_numpy(data[at : at + part.nbytes].copy())
            part.copy_(share.view(part.dtype).reshape(part.shape))
            at += part.nbytes
        self._saved[checkpoint] = tokens

    def _entry(self, checkpoint: int) -> int:
        if not 0 <= checkpoint < self._store.checkpoints:
            raise RunnerError(
                f"checkpoint {checkpoint} is out of range", value=checkpoint, limit=self._store.checkpoints
            )
        return 2 * self._store.places + checkpoint

    @staticmethod
    def _current(held: _Held, seen: int) -> int:
        return 2 * held.place + (seen + held.flip) % 2
