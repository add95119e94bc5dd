"""The step that a device computes before its plan is known, and whether a plan is that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shoal.runners.cuda.step import BLOCK, Shape
from shoal.runners.plan import BlockId, SeqId, StepPlan, Want


@dataclass(slots=True)
class StepAhead:
    """A step that the device computes already: the one that follows if all sequences go on as they are.

    `seq_ids`, `starts` and `tables` are what its plan must say, in its order; `tokens` too, as a plan has them, but
    they are not known before the step before is over. `rows` are the sequences' rows on the device. `room` is how many
    steps more, after this one, the tables and the context have place for. `gone` have been released meanwhile.
    """

    shape: Shape
    seq_ids: tuple[SeqId, ...]
    starts: tuple[int, ...]
    tables: tuple[tuple[BlockId, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    rows: Sequence[int]
    room: int
    chosen: torch.Tensor
    done: torch.cuda.Event | None
    gone: set[SeqId] = field(default_factory=set)

    def is_plan(self, plan: StepPlan) -> bool:
        """Whether a plan is this step, row for row."""
        sequences = plan.sequences
        if self.gone or plan.copies or plan.chain != 1 or len(sequences) != len(self.seq_ids):
            return False
        seq_ids, tokens, starts, tables, wants, _, _, _, _, rows, _ = zip(*sequences, strict=True)
        if seq_ids != self.seq_ids or starts != self.starts or tokens != self.tokens:
            return False
        if wants.count(Want.ARGMAX) != len(wants) or max(rows) != 1:
            return False
        return tables == self.tables or all(map(_same_place, starts, tables, self.tables))

    def rows_of(self, plan: StepPlan) -> list[int] | None:
        """The device's rows of a plan's sequences, where all of them are in this step: others have ended since."""
        if plan.copies or plan.chain != 1 or not plan.sequences:
            return None
        places = {seq_id: place for place, seq_id in enumerate(self.seq_ids) if seq_id not in self.gone}
        found = []
        for s in plan.sequences:
            place = places.get(s.seq_id)
            if place is None or s.start != self.starts[place] or s.tokens != self.tokens[place]:
                return None
            if s.want is not Want.ARGMAX or s.rows != 1 or not _same_place(s.start, s.block_table, self.tables[place]):
                return None
            found.append(self.rows[place])
        return found

    def take(self) -> list[int]:
        """Wait for the tokens of its rows."""
        if self.done is not None:
            self.done.synchronize()
        chosen: list[int] = self.chosen.tolist()
        return chosen


def _same_place(start: int, table: tuple[BlockId, ...], old: tuple[BlockId, ...]) -> bool:
    """Whether a token's KV belongs where the step has put it.

    What is before it may be elsewhere by now: of two blocks that were filled with the same tokens all hold one, and
    what is in them has the same bits. Tables grow, too.
    """
    return table is old or table[start // BLOCK] == old[start // BLOCK]


def room_of(starts: Sequence[int], tables: Sequence[tuple[BlockId, ...]], context_length: int) -> int:
    """How many steps more than one could go on from there; below 0 where not even one can."""
    blocks = min(len(table) * BLOCK - start for table, start in zip(tables, starts, strict=True))
    return min(blocks, context_length - max(starts)) - 1
