"""Where the KV of each sequence is: in a row, in blocks, or the older part in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from shoal.errors import RunnerError
from shoal.runners.mlx.rows import Rows, alike
from shoal.runners.mlx.store import KV, BlockStore, RowSpan
from shoal.runners.plan import BlockId, SeqId, StepPlan


@dataclass(slots=True, eq=False)
class Live:
    """A sequence that has a row, in `rows`: `stored` of its positions are in the block store too."""

    table: tuple[BlockId, ...]
    stored: int
    rows: Rows


class Places:
    """Sequences with rows, and the copies of their KV in blocks.

    Invariant: `_owner[block]` is the one sequence that may still have slots of the block that are not in the store.
    """

    def __init__(self, block_size: int, store_every: int | None) -> None:
        """Rotating caches forget: with them rows are stored every `store_every` positions, None where nothing does."""
        self.live: dict[SeqId, Live] = {}
        self._block_size = block_size
        self._store_every = store_every
        self._store = BlockStore(block_size)
        self._owner: dict[BlockId, SeqId] = {}

    def length(self, seq_id: SeqId) -> int:
        """Tokens in the sequence's row."""
        rows = self.live[seq_id].rows
        return rows.lengths[rows.ids.index(seq_id)]

    def settle(self, rows: Rows) -> None:
        """Note that the sequences of `rows` are in them now."""
        for seq_id in rows.ids:
            self.live[seq_id].rows = rows

    def claim(self, plan: StepPlan) -> None:
        """Note that the blocks which each item writes are its own from the first fed slot on."""
        size = self._block_size
        for item in plan.sequences:
            table = self.live[item.seq_id].table = item.block_table
            first, last = item.start // size, (item.start + len(item.tokens) + plan.chain - 2) // size
            if last >= len(table):
                raise RunnerError(f"sequence {item.seq_id} feeds past its block table", value=last, limit=len(table))
            for index in range(first, last + 1):
                block = table[index]
                if self._owner.get(block) != item.seq_id:
                    self._owner[block] = item.seq_id
                    self._store.truncate(block, item.start % size if index == first else 0)

    def read(self, table: Sequence[BlockId], end: int) -> list[KV]:
        """KV of positions 0 .. end - 1 along a table, also what only rows had so far. See `BlockStore.read`."""
        self._flush_owners(table[: -(-end // self._block_size)])
        return self._store.read(table, end)

    def copy(self, source: BlockId, destination: BlockId) -> None:
        """Let the destination hold what the source does."""
        self._flush_owners([source])
        self._owner.pop(destination, None)
        self._store.copy(source, destination)

    def forget(self, seq_ids: Sequence[SeqId]) -> None:
        """Leave sequences' KV to the store; their rows are nobody's then."""
        self.flush(seq_ids)
        for seq_id in seq_ids:
            for block in self.live.pop(seq_id).table:
                if self._owner.get(block) == seq_id:
                    del self._owner[block]

    def lose(self, seq_ids: Iterable[SeqId]) -> None:
        """Let go of sequences whose rows may not be read any more. Their blocks keep what had been stored."""
        for seq_id in seq_ids:
            self.live.pop(seq_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self.live.clear()
        self._owner.clear()
        self._store.clear()

    def flush(self, seq_ids: Sequence[SeqId]) -> None:
        """Copy what the store lacks of sequences into it, where their blocks are still their own.

        Rows that lie together are copied together, a few operations a layer for them all.
        """
        together: dict[Rows, list[tuple[int, RowSpan]]] = {}
        for seq_id in seq_ids:
            live = self.live[seq_id]
            row = live.rows.ids.index(seq_id)
            begin, length = live.stored, live.rows.lengths[row]
            blocks = live.table[: -(-length // self._block_size)]
            mine = [self._owner.get(block) == seq_id for block in blocks]
            if any(mine[begin // self._block_size :]) and begin < length:
                together.setdefault(live.rows, []).append((row, RowSpan(live.table, begin, length - begin, mine)))
            live.stored = length
        for rows, parts in together.items():
            for group in self._of_like_length(parts):
                kv = rows.kv([row for row, _ in group], max(part.count for _, part in group))
                mx.async_eval(kv)
                self._store.write(kv, [part for _, part in group])

    def store_old(self, seq_ids: Sequence[SeqId]) -> None:
        """Before a rotating cache forgets them, store positions that only rows have."""
        every = self._store_every
        if every is not None:
            self.flush([i for i in seq_ids if self.length(i) - self.live[i].stored >= every])

    def _of_like_length(self, parts: Sequence[tuple[int, RowSpan]]) -> list[list[tuple[int, RowSpan]]]:
        """Parts that may be copied together: little of the copy is nobody's. Rotating caches give one row at a time."""
        if self._store_every is not None:
            return [[part] for part in parts]
        return alike(parts, lambda part: part[1].count)

    def _flush_owners(self, blocks: Iterable[BlockId]) -> None:
        owners = {self._owner.get(block) for block in blocks}
        self.flush([seq_id for seq_id in owners if seq_id is not None and seq_id in self.live])
