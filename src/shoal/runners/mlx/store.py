"""KV of blocks that no row holds any more, or that several sequences read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from shoal.errors import RunnerError
from shoal.runners.plan import BlockId

KV = list[tuple[mx.array, mx.array]]
"""K and V, [1, H, T, D] each, one pair per KV leaf of a model's caches."""


@dataclass(slots=True, eq=False)
class Segment:
    """KV of `count` consecutive positions; `live` of them are still some block's."""

    kv: KV
    count: int
    live: int = 0
    blocks: set[BlockId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` slots of a block: those of a segment from `offset` on."""

    segment: Segment
    offset: int
    count: int


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
                kept.append(Piece(piece.segment, piece.offset, stay))
        if kept:
            self._pieces[block] = kept
        else:
            del self._pieces[block]
        for segment in {piece.segment for piece in pieces}:
            if 0 < segment.live * 2 < segment.count:
                self._compact(segment)

    def _let_go(self, piece: Piece, block: BlockId, count: int, *, gone: bool) -> None:
        piece.segment.live -= count
        if gone:
            piece.segment.blocks.discard(block)

    def write(self, table: Sequence[BlockId], begin: int, kv: KV, mine: Sequence[bool]) -> None:
        """Note KV of consecutive positions from `begin` on, block by block of `table`; `mine[i]` says which to take."""
        count = kv[0][0].shape[2] if kv else 0
        segment = Segment(kv, count)
        at = begin
        while at < begin + count:
            index, slot = divmod(at, self.block_size)
            take = min(self.block_size - slot, begin + count - at)
            block = table[index]
            if mine[index]:
                self.truncate(block, slot)
                self._append(block, Piece(segment, at - begin, take), slot)
            at += take
        if segment.live * 2 < segment.count:
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
        """KV of positions 0 .. end - 1 along a table, as consecutive parts. RunnerError for what nothing wrote."""
        found: list[KV] = []
        for segment, offset, count in self._spans(table, end):
            span = slice(offset, offset + count)
            whole = count == segment.count
            found.append(segment.kv if whole else [(k[:, :, span], v[:, :, span]) for k, v in segment.kv])
        return found

    def _spans(self, table: Sequence[BlockId], end: int) -> list[tuple[Segment, int, int]]:
        """The segments that hold the first `end` positions, neighbours joined."""
        spans: list[tuple[Segment, int, int]] = []
        for index in range(-(-end // self.block_size)):
            block = table[index]
            wanted = min(self.block_size, end - index * self.block_size)
            for piece in self._pieces.get(block, ()):
                count = min(piece.count, wanted)
                if count:
                    _extend(spans, piece.segment, piece.offset, count)
                wanted -= count
            if wanted:
                message = f"block {block} is read at slot {self.filled(block)}, which nothing wrote"
                raise RunnerError(message, value=block, limit=self.filled(block))
        return spans

    def _compact(self, segment: Segment) -> None:
        """Copy what is left of a segment, and let its arrays go."""
        for block in segment.blocks:
            self._pieces[block] = [
                _copied(piece, block) if piece.segment is segment else piece for piece in self._pieces[block]
            ]

    def clear(self) -> None:
        """Forget everything."""
        self._pieces.clear()


def _extend(spans: list[tuple[Segment, int, int]], segment: Segment, offset: int, count: int) -> None:
    if spans and spans[-1][0] is segment and spans[-1][1] + spans[-1][2] == offset:
        spans[-1] = (segment, spans[-1][1], spans[-1][2] + count)
    else:
        spans.append((segment, offset, count))


def _copied(piece: Piece, block: BlockId) -> Piece:
    span = slice(piece.offset, piece.offset + piece.count)
    kv = [(mx.contiguous(k[:, :, span]), mx.contiguous(v[:, :, span])) for k, v in piece.segment.kv]
    mx.async_eval(kv)
    return Piece(Segment(kv, piece.count, piece.count, {block}), 0, piece.count)
