"""The KV blocks of sequences: claimed when one joins, grown as it runs, shared as they fill, given back at the end."""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import EngineConfig
from shoal.core.blocks import BlockPool
from shoal.core.checkpoints import Checkpoints
from shoal.core.nodes import Match
from shoal.core.prefix_tree import PrefixTree
from shoal.core.sequence import Sequence
from shoal.core.windows import WindowBlocks
from shoal.runners.plan import BlockId, ModelSpec, SeqId, WindowId


class Restored(NamedTuple):
    """Blocks that are in the tree and must be written before they are read; a checkpoint too, after that many tokens.

    `windows` are their window blocks, None where one gets none: for all of them where the model has no window.
    `skipped` of the blocks that were offered, at the front, had come back otherwise meanwhile.
    """

    blocks: tuple[BlockId, ...] = ()
    skipped: int = 0
    checkpoint: int | None = None
    tokens: int = 0
    windows: tuple[WindowId | None, ...] = ()


class KVCacheManager:
    """Ties sequences to the block pool and the prefix tree.

    Invariant: a sequence's `blocks` each carry one reference of it, its `copy_source` one more, and nothing else
    does but pins. Whether a sequence may join and who has to go for it is the scheduler's.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self._spec = spec
        self.block_size = spec.block_size
        self.sharing = config.prefix_sharing
        self.splits_decode = spec.splits_decode
        self.pool = BlockPool(spec.num_blocks)
        self.checkpoints = Checkpoints(spec.num_checkpoints) if spec.recurrent else None
        prefix_bytes = config.bytes_of("prefix_memory")
        self._max_cached = None if prefix_bytes is None else _blocks_in(prefix_bytes, spec)
        self.tree = PrefixTree(
            self.pool,
            spec.block_size,
            copies_blocks=spec.copies_blocks,
            max_cached=self._max_cached,
            checkpoints=self.checkpoints,
        )
        self.windows = WindowBlocks(spec, self.tree) if spec.window else None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold KV of that many tokens."""
        return -(-tokens // self.block_size)

    @property
    def available(self) -> int:
        """Blocks that are free or can be made so by eviction."""
        return self.pool.num_free + self.pool.num_cached

    @property
    def growth(self) -> int:
        """Blocks by which sequences could grow: each takes a window block too, where the model has a window."""
        return self.available if self.windows is None else min(self.available, self.windows.available)

    def has_room(self, tokens: int) -> bool:
        """True when a sequence of that many tokens could find blocks and window blocks."""
        blocks = self.blocks_for(tokens)
        if blocks > self.available:
            return False
        return self.windows is None or min(blocks, self.windows.most) <= self.windows.available

    def room(self, seq: Sequence, chunk: int) -> int:
        """So many of the next `chunk` tokens could be fed: there may be no window blocks for all."""
        return chunk if self.windows is None else min(chunk, self.windows.room(seq) - seq.computed)

    def tree_tokens(self, seq: Sequence) -> list[int]:
        """The sequence's tokens as the tree knows them.

        Where a runner's KV of a generated token has other bits than that of the same token in a prompt, generated
        tokens are marked (as ~token, which no prompt has): sharing the one for the other would change logits.
        """
        if not self.splits_decode or len(seq.tokens) == seq.prompt_len:
            return seq.tokens
        return [*seq.tokens[: seq.prompt_len], *(~token for token in seq.tokens[seq.prompt_len :])]

    # -- sequences that wait ------------------------------------------------------------------------------------

    def announce(self, seq: Sequence) -> None:
        """Let the tree spare what this waiting sequence will need."""
        if self.sharing:
            seq.hashes = self.tree.path_hashes(self.tree_tokens(seq), seq.spec.namespace)
            self.tree.eviction.announce(seq.hashes)

    def withdraw(self, seq: Sequence) -> None:
        """The sequence no longer waits."""
        self.tree.eviction.withdraw(seq.hashes)

    def restore(self, seq: Sequence, first: int, count: int, *, spare: int, state: bool) -> Restored:
        """Make room in the tree for blocks `first` .. of a waiting sequence that are back from another tier.

        As many as leave `spare` blocks available; none when the tree has lost what comes before them.
        """
        size, tokens, namespace = self.block_size, self.tree_tokens(seq), seq.spec.namespace
        path = [node.block for node in self.tree.path(tokens, namespace, limit=(first + count) * size)]
        if len(path) < first or self.tree.is_stale(namespace):
            return Restored()
        self.pool.hold(path)  # what is continued must not make room for it
        missing = first + count - len(path)
        wanted = min(missing, self.available - spare)
        if self.tree.max_cached is not None:  # more would be evicted again before anybody joins
            wanted = min(wanted, self.tree.max_cached - len(path))
        self.tree.evict(wanted - self.pool.num_free)
        blocks = [self.pool.take() for _ in range(max(0, min(wanted, self.pool.num_free)))]
        whole = [*path, *blocks]
        known = self.tree.recomputed
        self.tree.insert(tokens[: len(whole) * size], whole, namespace)
        self.tree.recomputed = known  # brought back, not computed again
        checkpoint = None
        if state and self.checkpoints is not None and whole and len(blocks) == missing:
            checkpoint = self.checkpoints.reserve(self.pool)
            if checkpoint is not None:
                self.tree.keep_state(whole[-1], size, checkpoint)
        begin = len(path)
        windows: tuple[WindowId | None, ...] = (None,) * len(blocks)
        if self.windows is not None:
            begin, windows = self.windows.restore(whole, first, len(path))
        self.tree.release(whole)
        return Restored(tuple(whole[begin:]), begin - first, checkpoint, len(whole) * size, windows)

    # -- sequences that run -------------------------------------------------------------------------------------

    def claim(self, seq: Sequence, *, spare: int) -> Match | None:
        """Give a joining sequence what the tree has of its tokens, and blocks of its own for the rest.

        None, with nothing changed, when that would leave fewer than `spare` blocks available.
        """
        match = Match()
        if self.sharing:
            # One token is left to compute, for its logits; a step feeds each at least one.
            limit = seq.scored if seq.scoring else len(seq.tokens) - 1
            match = self.tree.match(self.tree_tokens(seq), seq.spec.namespace, limit=limit)
            if match.tail is not None and not self._fits(seq, match, spare):
                # The source of a copy is a block more than the sequence itself needs: it may do without.
                limit = len(match.blocks) * self.block_size
                match = self.tree.match(self.tree_tokens(seq), seq.spec.namespace, limit=limit)
        if not self._fits(seq, match, spare):
            return None
        self.pool.hold(match.held)
        needed = self.blocks_for(len(seq.tokens)) - len(match.blocks)
        if self.windows is not None:
            self.windows.join(seq, match)
        self.tree.evict(needed - self.pool.num_free)
        seq.blocks = [*match.blocks, *(self.pool.take() for _ in range(needed))]
        seq.blocks_changed()
        if self.windows is None:
            seq.ready = len(seq.blocks)
        seq.indexed = seq.shared_blocks = len(match.blocks)
        seq.copy_source = match.tail
        seq.computed = match.tokens
        seq.load = match.checkpoint
        seq.marks = self._marks(seq, match)
        return match

    def _fits(self, seq: Sequence, match: Match, spare: int) -> bool:
        """True when a joining sequence that takes up `match` leaves `spare` blocks available."""
        needed = self.blocks_for(len(seq.tokens)) - len(match.blocks)
        cached = sum(self.pool.refs(block) == 0 for block in match.held)  # they would be available no longer
        if needed + spare > self.available - cached:
            return False
        return self.windows is None or self.windows.fits(match, self.blocks_for(len(seq.tokens)), spare)

    def _marks(self, seq: Sequence, match: Match) -> list[int]:
        """Where to keep recurrent state of a joining sequence, as numbers of tokens in order.

        At the last block boundary of its tokens, where the tree shows that its way parts from another's, and at the end
        of a prefix computed for others.
        """
        if self.checkpoints is None or not self.sharing or seq.scoring:
            return []
        size, length = self.block_size, len(seq.tokens)
        marks = {(length - 1) // size * size, match.known // size * size}
        if seq.spec.prefill_only:
            marks.add(length)
        return sorted(mark for mark in marks if mark > seq.computed)

    def mark(self, seq: Sequence, tokens: int) -> None:
        """Keep recurrent state of a running sequence after that many tokens: another waits to go on from there."""
        if self.checkpoints is not None and not seq.scoring and tokens > seq.computed and tokens not in seq.marks:
            seq.marks = sorted([*seq.marks, tokens])

    def reserve(self, seq: Sequence, end: int) -> int | None:
        """Where to save the state of a sequence whose next chunk ends at `end`, if it is to be kept."""
        while seq.marks and seq.marks[0] < end:
            seq.marks.pop(0)
        if self.checkpoints is None or not seq.marks or seq.marks[0] != end:
            return None
        seq.marks.pop(0)
        seq.saving = self.checkpoints.reserve(self.pool)
        return seq.saving

    def saved(self, seq: Sequence) -> None:
        """The step that saves a sequence's state is done, and its blocks are in the tree."""
        if seq.saving is None:
            return
        checkpoint, seq.saving = seq.saving, None
        index, slots = divmod(seq.computed - 1, self.block_size)
        self.tree.keep_state(seq.blocks[index], slots + 1, checkpoint)

    def miss_reason(self, seq: Sequence, match: Match) -> str | None:
        """Why the tree had no more than `match`; None when nothing is missing."""
        if not self.sharing:
            return "off"
        if match.tokens >= len(seq.tokens) - 1:
            return None
        if seq.scoring:
            return "scored"
        if match.known > match.tokens:
            return "checkpoint" if self.windows is None else "evicted"
        return self.tree.miss_reason(seq.hashes, seq.spec.namespace, match.tokens)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for its first `tokens` positions, evicting what is only cached; False if too few."""
        blocks = self.blocks_for(tokens)
        needed = blocks - len(seq.blocks)
        if needed > 0:
            self.tree.evict(needed - self.pool.num_free)
            if needed > self.pool.num_free:
                return False
            seq.blocks.extend(self.pool.take() for _ in range(needed))
            seq.blocks_changed()
        if self.windows is not None:
            return self.windows.cover(seq, blocks)
        seq.ready = len(seq.blocks)
        return True

    def copies(
        self, joined: list[Sequence]
    ) -> tuple[tuple[tuple[BlockId, BlockId], ...], tuple[tuple[WindowId, WindowId], ...]]:
        """What sequences that have just joined take by copy: (source, destination) blocks, and window blocks."""
        blocks = [(seq.copy_source, seq.blocks[seq.shared_blocks]) for seq in joined if seq.copy_source is not None]
        return tuple(blocks), self.windows.copies(blocks) if self.windows is not None else ()

    def advance(self, seq: Sequence) -> None:
        """A sequence has computed more, and the tree knows its full blocks: let go what it sees no longer."""
        if self.windows is not None:
            self.windows.advance(seq)

    def copied(self, seq: Sequence) -> None:
        """The step that copied the shared part of a block is done: let the source go."""
        if seq.copy_source is not None:
            if self.windows is not None:
                self.windows.unneed(seq.copy_source)
            self.tree.release([seq.copy_source])
            seq.copy_source = None

    def index(self, seq: Sequence, *, tail: bool) -> None:
        """Tell the tree of blocks that are full now, and with `tail` of the last one too; share equal full blocks."""
        if not self.sharing:
            return
        full = seq.computed // self.block_size
        end = seq.computed if tail else full * self.block_size
        if end <= seq.indexed * self.block_size:
            return
        blocks = seq.blocks[: self.blocks_for(end)]
        standing = self.tree.insert(
            self.tree_tokens(seq)[:end], blocks, seq.spec.namespace, standing=min(seq.indexed, len(blocks))
        )
        for i in range(seq.indexed, full):
            if standing[i] != seq.blocks[i]:  # somebody computed the same tokens meanwhile: hold theirs, once
                self._swap(seq, i, standing[i])
        seq.indexed = full

    def _swap(self, seq: Sequence, i: int, block: BlockId) -> None:
        self.pool.hold([block])
        old, seq.blocks[i] = seq.blocks[i], block
        seq.blocks_changed()
        if self.windows is not None:
            self.windows.swap(seq, i, old)
        self.tree.release([old])

    def pin(self, seq: Sequence) -> list[BlockId]:
        """Hold what a sequence has beyond its end; returns its blocks."""
        self.pool.hold(seq.blocks)
        if self.windows is not None:
            self.windows.pin(seq)
        return list(seq.blocks)

    def unpin(self, seq_id: SeqId, blocks: list[BlockId]) -> None:
        """Let that go."""
        if self.windows is not None:
            self.windows.unpin(seq_id)
        self.tree.release(blocks)

    def give_back(self, seq: Sequence) -> None:
        """The sequence leaves the batch: its blocks stay cached in the tree as far as that has room."""
        self.index(seq, tail=True)
        self.copied(seq)
        if seq.saving is not None and self.checkpoints is not None:
            self.checkpoints.cancel(seq.saving)
        seq.saving = seq.load = None
        if self.windows is not None:
            self.windows.leave(seq)
        self.tree.release(seq.blocks)
        seq.blocks = []
        seq.blocks_changed()
        seq.ready = seq.indexed = seq.shared_blocks = 0

    def keep_cached(self, keeping: bool) -> None:
        """Keep what nobody holds as far as the settings allow, or not at all."""
        self.tree.max_cached = self._max_cached if keeping else 0
        if not keeping:
            self.drop_cached()

    def drop_cached(self) -> None:
        """Evict everything that nobody holds."""
        self.tree.evict(self.pool.num_cached)

    def invalidate(self, seq: Sequence) -> None:
        """KV this sequence computed itself, or that came back for it, may be wrong: it is forgotten everywhere."""
        if self.tree.planner is not None:
            self.tree.planner.distrust(self.tree_tokens(seq), seq.spec.namespace)
        self.tree.forget(seq.blocks[0 if seq.restored else seq.shared_blocks :])
        seq.computed = 0


def _blocks_in(limit: int, spec: ModelSpec) -> int:
    """How many blocks take at most `limit` bytes, those that can have a window block counted with one."""
    with_window = limit // (spec.block_bytes + spec.window_bytes)
    if with_window <= spec.num_windows:
        return with_window
    return (limit - spec.num_windows * spec.window_bytes) // spec.block_bytes
