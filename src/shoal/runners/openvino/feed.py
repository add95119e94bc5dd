"""From a plan to the inputs of the model, with as little work per step as the interpreter allows.

    tokens               |--- A: 3 ---|B|C|     input_ids, position_ids [T], rows [R]
    subsequence_begins   0            3 4 5     [B + 1], past_lens [B]
    block_indices        |- A's used blocks -|B's|C's|, where each begins in block_indices_begins [B + 1]

All inputs are int32 parts of one buffer, filled by one conversion: after a pass over all weights the interpreter's own
memory is out of the CPU's caches, and each call into numpy costs ten times what it does in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.plan import BlockId, SeqId, StepPlan, Want

INPUTS = ("input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices_begins", "rows")


@dataclass(slots=True)
class Wanted:
    """Whose logits the rows of the output are: first `logits` rows, then those of `argmax`, then filler."""

    logits: int = 0
    argmax: list[SeqId] = field(default_factory=list)


class _Batch:
    """The spans of one pass, as the paged attention wants them: consecutive tokens over one block table each."""

    def __init__(self, block_size: int, scratch: NDArray[np.int32]) -> None:
        self.block_size, self.scratch = block_size, scratch
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.past: list[int] = []
        self.begins = [0]
        self.block_begins = [0]
        self.tables: list[NDArray[np.int32]] = []
        self.longest = 0

    def add_prompt(self, tokens: Sequence[int], start: int, table: NDArray[np.int32]) -> int:
        """Add tokens of a prompt as one span of at least two; the row of the last one."""
        row = len(self.tokens) + len(tokens) - 1
        if len(tokens) == 1:
            tokens = (tokens[0], 0)
            if (start + 1) % self.block_size == 0:  # the filler begins a block: not one of the sequence's
                table = np.append(table[: start // self.block_size + 1], self.scratch)
        self._span(tokens, start, table)
        return row

    def add_generated(self, tokens: Sequence[int], start: int, table: NDArray[np.int32]) -> int:
        """Add tokens that the model wrote as spans of one; the row of the last one."""
        for at, token in enumerate(tokens, start):
            self._span((token,), at, table)
        return len(self.tokens) - 1

    def _span(self, tokens: Sequence[int], start: int, table: NDArray[np.int32]) -> None:
        end = start + len(tokens)
        used = -(-end // self.block_size)
        self.tokens += tokens
        self.positions += range(start, end)
        self.past.append(start)
        self.begins.append(len(self.tokens))
        self.tables.append(table[:used])
        self.block_begins.append(self.block_begins[-1] + used)
        self.longest = max(self.longest, end)


class Feed:
    """Writes plans into the inputs of one inference request. Keeps, per sequence, its block table as an array.

    Results depend on which kernels run, so each token is kept to the same ones in any company. A product with a single
    row takes a kernel of its own: every pass has at least two tokens, and no row or at least two. So does attention of
    a single token, with logits that differ by up to 1: prompt tokens go in spans of two or more, a lone one with a
    filler behind it, and tokens that the model wrote go in spans of one, also when they are computed again after a
    preemption. The filler's KV goes to the slot that the sequence writes next, or to the scratch block; nobody looks at
    its logits.
    """

    def __init__(self, request: Any, vocab_size: int, block_size: int, num_blocks: int) -> None:
        import openvino as ov

        self._request: Any = request
        self._tensor = ov.Tensor
        self._vocab, self._block, self._num_blocks = vocab_size, block_size, num_blocks
        self._buffer = np.zeros(1024, np.int32)
        self._blocks = np.zeros(256, np.int32)
        self._lengths: tuple[int, ...] = ()
        self._num_indices = -1
        self._longest = np.zeros((), np.int32)
        request.set_tensor("max_context_len", ov.Tensor(self._longest, shared_memory=True))
        self._tables: dict[SeqId, tuple[tuple[BlockId, ...], NDArray[np.int32]]] = {}
        self._scratch = np.array([num_blocks], np.int32)

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        """Drop the tables of these sequences; unknown ids are ignored."""
        for seq_id in seq_ids:
            self._tables.pop(seq_id, None)

    def close(self) -> None:
        """Let go of the request, and with it of the compiled model."""
        self._request = None

    def write(self, plan: StepPlan) -> Wanted:
        """Set all inputs for one pass; each sequence's tokens are all of its prompt or all generated.

        Raises `RunnerError` for a token or block that does not exist.
        """
        batch = _Batch(self._block, self._scratch)
        wanted = Wanted()
        rows: list[int] = []
        argmax_rows: list[int] = []
        for each in plan.sequences:
            add = batch.add_generated if each.generated else batch.add_prompt
            row = add(each.tokens, each.start, self._table(each.seq_id, each.block_table))
            if each.want is Want.LOGITS:
                wanted.logits += each.rows
                rows += range(row + 1 - each.rows, row + 1)
            elif each.want is Want.ARGMAX:
                wanted.argmax += [each.seq_id] * each.rows
                argmax_rows += range(row + 1 - each.rows, row + 1)
        if min(batch.tokens) < 0 or max(batch.tokens) >= self._vocab:
            raise RunnerError("a token is outside the vocabulary", value=batch.tokens, limit=self._vocab)
        if len(batch.tokens) == 1:
            batch.add_generated((0,), 0, self._scratch)
        rows += argmax_rows
        if len(rows) == 1:
            rows *= 2
        self._longest[()] = batch.longest
        self._set_blocks(batch.tables, batch.block_begins[-1])
        self._set([batch.tokens, batch.positions, batch.past, batch.begins, batch.block_begins, rows])
        return wanted

    def _set(self, parts: list[list[int]]) -> None:
        """Fill the buffer with `parts`, in the order of INPUTS; the request is told only when a length changed."""
        flat = [number for part in parts for number in part]
        lengths = tuple(map(len, parts))
        if lengths != self._lengths:
            if len(flat) > len(self._buffer):
                self._buffer = np.zeros(2 * len(flat), np.int32)
            self._lengths, begin = lengths, 0
            for name, length in zip(INPUTS, lengths, strict=True):
                self._request.set_tensor(name, self._tensor(self._buffer[begin : begin + length], shared_memory=True))
                begin += length
        self._buffer[: len(flat)] = flat

    def _set_blocks(self, tables: list[NDArray[np.int32]], total: int) -> None:
        if total != self._num_indices:
            if total > len(self._blocks):
                self._blocks = np.zeros(2 * total, np.int32)
            self._num_indices = total
            self._request.set_tensor("block_indices", self._tensor(self._blocks[:total], shared_memory=True))
        np.concatenate(tables, out=self._blocks[:total])

    def _table(self, seq_id: SeqId, table: tuple[BlockId, ...]) -> NDArray[np.int32]:
        known = self._tables.get(seq_id)
        if known is not None and known[0] is table:
            return known[1]
        array = np.array(table, np.int32)
        # A block that does not exist would be written to all the same, outside the arrays.
        if array.min() < 0 or array.max() >= self._num_blocks:
            raise RunnerError(f"sequence {seq_id}: a block does not exist", value=table, limit=self._num_blocks)
        self._tables[seq_id] = table, array
        return array
