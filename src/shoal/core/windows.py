"""Window blocks: where KV of layers with a sliding window lies, for as long as somebody may see it.

A block of the pool holds KV of the layers without a window. What layers with one keep of the same positions lies in a
*window block*, of which there are fewer: a sequence needs those of its last `window` positions only::

    blocks          | 7 | 9 | 4 | 12 | 13 | 15 | 20 |      one for every part of the sequence
    window blocks                    |  3 |  0 |  5 |      needed: what position `computed` and later ones still see
                    |   |   | 8 |                          spare: nobody's, kept for hits until somebody needs the room
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from shoal.runners.plan import BlockId, ModelSpec, SeqId, WindowId

if TYPE_CHECKING:
    from shoal.core.nodes import Match, TreeNode
    from shoal.core.prefix_tree import PrefixTree
    from shoal.core.sequence import Sequence

_NONE = -1


class WindowBlocks:
    """Gives window blocks to blocks.

    Invariant: each of `total` window blocks is free or that of one block; such a one is needed while a running
    sequence, a pin or a copy counts on it, and spare otherwise. A block with a spare one is in the prefix tree. A
    sequence's `windows` are those of its blocks `window_from` .. `ready` - 1, each needed by it.
    """

    def __init__(self, spec: ModelSpec, tree: PrefixTree) -> None:
        self.total = spec.num_windows
        self._spec = spec
        self._tree = tree
        self._of = [_NONE] * spec.num_blocks
        self._needs = [0] * spec.num_blocks
        self._free = list(range(spec.num_windows - 1, -1, -1))
        self._spare: OrderedDict[BlockId, None] = OrderedDict()  # the next to lose theirs first
        self.lost = 0  # were given to other blocks while they could still have served hits
        self._pins: dict[SeqId, list[BlockId]] = {}
        # That one sequence needs to feed a token, wherever it stands: for what it sees, writes and copies.
        self.most = -(-spec.window // spec.block_size) + 3
        tree.windows = self

    @property
    def available(self) -> int:
        """Window blocks that nobody needs."""
        return len(self._free) + len(self._spare)

    @property
    def num_needed(self) -> int:
        """Window blocks that somebody needs."""
        return self.total - self.available

    @property
    def num_spare(self) -> int:
        """Window blocks that are kept for hits only."""
        return len(self._spare)

    @property
    def free(self) -> list[WindowId]:
        """Those of no block."""
        return list(self._free)

    def of(self, block: BlockId) -> WindowId | None:
        """The window block of a block, if it has one."""
        window = self._of[block]
        return None if window == _NONE else window

    def copies(self, blocks: Seq[tuple[BlockId, BlockId]]) -> tuple[tuple[WindowId, WindowId], ...]:
        """What copies of blocks are of window blocks; source and destination have theirs."""
        return tuple((self._of[source], self._of[destination]) for source, destination in blocks)

    # -- hits -----------------------------------------------------------------------------------------------------

    def reach(self, path: Seq[TreeNode]) -> int:
        """How many of the blocks of a path can be taken up: up to the last place whose window is all there."""
        at = depth = len(path)
        while at > self._spec.first_block(depth * self._spec.block_size):
            at -= 1
            if self._of[path[at].block] == _NONE:
                depth = at
        return depth

    def covers(self, path: Seq[TreeNode], position: int) -> bool:
        """True when all that position `position` sees of a path lies in window blocks."""
        return all(self._of[node.block] != _NONE for node in path[self._spec.first_block(position) :])

    def fits(self, match: Match, blocks: int, spare: int) -> bool:
        """True when a sequence of that many blocks could take up `match` and leave `spare` window blocks available."""
        seen = match.held[self._spec.first_block(match.tokens) :]
        taken = sum(self._needs[block] == 0 for block in seen)  # they would be available no longer
        return max(taken + 1, min(self.most, blocks)) + spare <= self.available

    # -- sequences that run ---------------------------------------------------------------------------------------

    def join(self, seq: Sequence, match: Match) -> None:
        """A sequence takes up a match: it needs what its first position to compute sees."""
        seq.window_from = self._spec.first_block(match.tokens)
        seq.ready = len(match.blocks)
        seen = match.blocks[seq.window_from :]
        for block in seen:
            self._need(block)
        if match.tail is not None:
            self._need(match.tail)
        seq.windows = [self._of[block] for block in seen]
        seq.windows_changed()

    def room(self, seq: Sequence) -> int:
        """Tokens that a sequence could have computed in all with the window blocks that are available."""
        return (seq.ready + self.available) * self._spec.block_size

    def cover(self, seq: Sequence, blocks: int) -> bool:
        """Give the first `blocks` blocks of a sequence what they lack; False, with nothing given, if too much."""
        if blocks - seq.ready > self.available:
            return False
        for block in seq.blocks[seq.ready : blocks]:
            seq.windows.append(self._give(block))
            self._needs[block] = 1
            seq.windows_changed()
        seq.ready = max(seq.ready, blocks)
        return True

    def advance(self, seq: Sequence) -> None:
        """A sequence has computed more, and its full blocks are in the tree: it lets go what no later position sees."""
        first = min(self._spec.first_block(seq.computed), seq.ready)
        while seq.window_from < first:
            self.unneed(seq.blocks[seq.window_from])
            del seq.windows[0]
            seq.window_from += 1
            seq.windows_changed()

    def leave(self, seq: Sequence) -> None:
        """A sequence leaves the batch. Its last block is the first to go: hits then end a block earlier each time."""
        for block in reversed(seq.blocks[seq.window_from : seq.ready]):
            self.unneed(block)
        seq.windows = []
        seq.window_from = seq.ready = 0
        seq.windows_changed()

    def swap(self, seq: Sequence, i: int, old: BlockId) -> None:
        """A sequence refers to another block in place of `old`, with the same tokens: that one gets what it lacks."""
        if not seq.window_from <= i < seq.ready:
            return
        block = seq.blocks[i]
        if self._of[block] != _NONE:
            self._need(block)
            self.unneed(old)
        else:  # its own was given away: these tokens were computed again
            assert self._needs[old] == 1, f"block {old} is needed by others"
            self._of[block], self._of[old] = self._of[old], _NONE
            self._needs[block], self._needs[old] = 1, 0
            self._tree.lost_window(old)
            self._tree.recomputed += self._spec.block_size
        seq.windows[i - seq.window_from] = self._of[block]
        seq.windows_changed()

    def pin(self, seq: Sequence) -> None:
        """What a sequence needs now stays needed, for those who go on from its end."""
        held = self._pins[seq.seq_id] = seq.blocks[seq.window_from : seq.ready]
        for block in held:
            self._need(block)

    def unpin(self, seq_id: SeqId) -> None:
        """Take that back."""
        for block in reversed(self._pins.pop(seq_id, [])):
            self.unneed(block)

    def unneed(self, block: BlockId) -> None:
        """Somebody counts on a block's window block no longer."""
        self._needs[block] -= 1
        if self._needs[block]:
            return
        if self._tree.knows(block):
            self._spare[block] = None
        else:
            self._drop(block)

    # -- the tree -------------------------------------------------------------------------------------------------

    def restore(self, path: Seq[BlockId], first: int, there: int) -> tuple[int, tuple[WindowId | None, ...]]:
        """Give window blocks to what is seen from the end of a path whose blocks from `first` on are back from a tier.

        So many of its blocks were `there` before. Returns from which block on they are to be written, the first that
        is new or gets a window block, and their window blocks: what is seen no more gets none.
        """
        seen = max(self._spec.first_block(len(path) * self._spec.block_size), first)
        lacking = (i for i in range(seen, there) if self._of[path[i]] == _NONE)
        begin = next(lacking, there)
        for block in path[max(begin, seen) :]:
            if self._of[block] == _NONE and self.available:
                self._give(block)
                self._spare[block] = None
        return begin, tuple(self.of(block) for block in path[begin:])

    def left(self, block: BlockId) -> None:
        """A block left the prefix tree."""
        if block in self._spare:
            del self._spare[block]
            self._drop(block)

    def _need(self, block: BlockId) -> None:
        assert self._of[block] != _NONE, f"block {block} has no window block"
        self._needs[block] += 1
        self._spare.pop(block, None)

    def _drop(self, block: BlockId) -> None:
        self._free.append(self._of[block])
        self._of[block] = _NONE

    def _give(self, block: BlockId) -> WindowId:
        """A window block for a block that has none: a free one, or the spare one that has been so for longest.

        Blocks that are expected (`Eviction.announce`) keep theirs until no other is left.
        """
        assert self._of[block] == _NONE, f"block {block} has a window block"
        if not self._free:
            expected = self._tree.is_expected
            for _ in range(len(self._spare)):
                victim = next(iter(self._spare))
                if not expected(victim):
                    break
                self._spare.move_to_end(victim)
            victim, _ = self._spare.popitem(last=False)
            self._drop(victim)
            self.lost += 1
            self._tree.lost_window(victim)
        window = self._free.pop()
        self._of[block] = window
        return window

    # -- audit ----------------------------------------------------------------------------------------------------

    def check_integrity(self, running: Seq[Sequence]) -> None:
        """Recount everything; AssertionError names the first book that does not balance."""
        needs = [0] * len(self._needs)
        for seq in running:
            seen = seq.blocks[seq.window_from : seq.ready]
            assert seq.windows == [self._of[b] for b in seen], f"sequence {seq.seq_id} has other window blocks"
            assert seq.window_from <= self._spec.first_block(seq.computed), f"sequence {seq.seq_id} needs more"
            assert seq.ready * self._spec.block_size >= seq.computed, f"sequence {seq.seq_id} lacks window blocks"
            for block in (*seen, *([seq.copy_source] if seq.copy_source is not None else [])):
                needs[block] += 1
        for blocks in self._pins.values():
            for block in blocks:
                needs[block] += 1
        assert needs == self._needs, "somebody's need of a window block is not in the books"
        given = [window for window in self._of if window != _NONE]
        assert sorted([*given, *self._free]) == list(range(self.total)), "a window block is lost or has two places"
        for block, window in enumerate(self._of):
            spare = window != _NONE and not needs[block]
            assert (block in self._spare) == spare, f"block {block}: window block {window}, {needs[block]} needs"
            assert not needs[block] or window != _NONE, f"block {block} is needed and has no window block"
            assert not spare or self._tree.knows(block), f"block {block} has a window block that nobody can find"
