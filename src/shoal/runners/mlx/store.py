"""KV of blocks that no row holds any more, or that several sequences read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from shoal.errors import RunnerError
from shoal.runners.plan import BlockId

KV = list[tuple[mx.array, mx.array]]
"""K and V, [R, H, T, D] each, one pair per KV leaf of a model's caches."""


@dataclass(slots=True, eq=False)
class Segment:
    """KV of `rows` times `count` consecutive positions; `live` of them are still some block's."""

    kv: KV
    rows: int
    count: int
    live: int = 0
    blocks: set[BlockId] = field(default_factory=set)

    @property
    def sparse(self) -> bool:
        """Whether less than half of it is somebody's."""
        return 0 < self.live * 2 < self.rows * self.count


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` slots of a block: those of a segment's row from `offset` on."""

    segment: Segment
    row: int
    offset: int
    count: int

    @property
    def end(self) -> int:
        """Where in the row it ends."""
        return self.offset + self.count

    def holds(self, other: Piece) -> bool:
        """Whether another piece of the same segment lies within this one."""
        return self.row == other.row and self.offset <= other.offset and other.end <= self.end


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What one row of a copy is: positions `begin` .. `begin + count - 1` along a table; `mine[i]`: its block i's."""

    table: Sequence[BlockId]
    begin: int
    count: int
    mine: Sequence[bool]


class BlockStore:
    """Maps block ids to KV.

    Invariant: the pieces of a block cover its slots from 0 on without a gap. A segment of which less than half is still
    somebody's is cut down, so that the arrays here hold at most twice what the blocks do.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pieces: dict[BlockId, list[Piece]] = {}

    def filled(self, block: BlockId) -> int:
        """Slots of the block that are here."""
        return sum(piece.count for piece in self._pieces.get(block, ()))

    def truncate(self, block: BlockId, slots: int) -> None:
        """Drop what is in the block from slot `slots` on: it is about to be written again."""
        pieces = self._pieces.get(block)
        if pieces is None:
            return
        kept: list[Piece] = []
        for piece in pieces:
            stay = min(piece.count, slots)
            slots -= stay
            self._let_go(piece, block, piece.count - stay, gone=not stay)
            if stay:
                kept.append(Piece(piece.segment, piece.row, piece.offset, stay))
        if kept:
            self._pieces[block] = kept
        else:
            del self._pieces[block]
        for segment in {piece.segment for piece in pieces}:
            if segment.sparse:
                self._compact(segment)

    def _let_go(self, piece: Piece, block: BlockId, count: int, *, gone: bool) -> None:
        piece.segment.live -= count
        if gone:
            piece.segment.blocks.discard(block)

    def write(self, kv: KV, parts: Sequence[RowSpan]) -> None:
        """Note KV, block by block: row i is `parts[i]`, whose last position is the row's last."""
        if not kv:
            return
        segment = Segment(kv, len(parts), kv[0][0].shape[2])
        for row, part in enumerate(parts):
            at, end = part.begin, part.begin + part.count
            while at < end:
                index, slot = divmod(at, self.block_size)
                take = min(self.block_size - slot, end - at)
                if part.mine[index]:
                    self.truncate(part.table[index], slot)
                    self._append(part.table[index], Piece(segment, row, segment.count - (end - at), take), slot)
                at += take
        if segment.sparse:
            self._compact(segment)

    def _append(self, block: BlockId, piece: Piece, slot: int) -> None:
        pieces = self._pieces.setdefault(block, [])
        if sum(p.count for p in pieces) != slot:
            raise RunnerError(
                f"block {block} is written from slot {slot} on, and the slots before are empty", value=slot
            )
        pieces.append(piece)
        piece.segment.live += piece.count
        piece.segment.blocks.add(block)

    def copy(self, source: BlockId, destination: BlockId) -> None:
        """Let the destination hold what the source does. Nothing is moved: both read the same arrays."""
        pieces = list(self._pieces.get(source, ()))
        self.truncate(destination, 0)
        for piece in pieces:
            self._append(destination, piece, self.filled(destination))

    def read(self, table: Sequence[BlockId], end: int) -> list[KV]:
        """KV of positions 0 .. end - 1 along a table, as consecutive parts of one row. RunnerError for what nothing
        wrote.
        """
        return [_of(piece) for piece in _joined(self._along(table, end))]

    def _along(self, table: Sequence[BlockId], end: int) -> Iterator[Piece]:
        """The pieces that hold the first `end` positions, in order."""
        for index in range(-(-end // self.block_size)):
            block = table[index]
            wanted = min(self.block_size, end - index * self.block_size)
            for piece in self._pieces.get(block, ()):
                count = min(piece.count, wanted)
                if count:
                    yield Piece(piece.segment, piece.row, piece.offset, count)
                wanted -= count
            if wanted:
                message = f"block {block} is read at slot {self.filled(block)}, which nothing wrote"
                raise RunnerError(message, value=block, limit=self.filled(block))

    def _compact(self, segment: Segment) -> None:
        """Copy what is left of a segment, neighbours together, and let its arrays go."""
        held = [(piece, block) for block in segment.blocks for piece in self._pieces[block] if piece.segment is segment]
        held.sort(key=lambda pair: (pair[0].row, pair[0].offset))
        runs = iter(_joined((piece for piece, _ in held), overlapping=True))
        moved: dict[Piece, Piece] = {}
        run = copy = None
        for piece, block in held:
            if run is None or copy is None or not run.holds(piece):
                run = next(runs)
                copy = _copied(run)
            copy.live += piece.count
            copy.blocks.add(block)
            moved[piece] = Piece(copy, 0, piece.offset - run.offset, piece.count)
        for block in segment.blocks:
            self._pieces[block] = [moved.get(piece, piece) for piece in self._pieces[block]]

    def clear(self) -> None:
        """Forget everything."""
        self._pieces.clear()


def _of(piece: Piece) -> KV:
    """The KV of a piece, [1, H, T, D]."""
    row, span = slice(piece.row, piece.row + 1), slice(piece.offset, piece.end)
    return [(keys[row, :, span], values[row, :, span]) for keys, values in piece.segment.kv]


def _joined(pieces: Iterable[Piece], *, overlapping: bool = False) -> list[Piece]:
    """Pieces in order, each made one with that before it which it goes on (`overlapping`: or from within it)."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is None or (last.segment, last.row) != (piece.segment, piece.row):
            joined.append(piece)
        elif piece.offset == last.end or (overlapping and piece.offset < last.end):
            joined[-1] = Piece(last.segment, last.row, last.offset, max(last.end, piece.end) - last.offset)
        else:
            joined.append(piece)
    return joined


def _copied(piece: Piece) -> Segment:
    kv = [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in _of(piece)]
    mx.async_eval(kv)
    return Segment(kv, 1, piece.count)
