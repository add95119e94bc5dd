"""The prefix tree: token blocks to KV blocks, shared by reference.

A node stands for one block of KV and is keyed by the tokens in it, below the node of the block before::

    root --[t0 .. t31]--> block 7 --[t32 .. t63]--> block 9 --[t64 .. t70]   (a tail: fewer tokens than a block)
                                                \\--[t32' .. t63']--> block 4

Full blocks are shared as they are. From a block whose tokens agree only in part (or from a tail) a newcomer
gets the agreeing slots by one block copy, so that a prefix can be cut at any token where the runner copies blocks.
Of a model with recurrent state it can be cut at checkpoints only, that is after nodes whose state was kept. Of one
with sliding windows it can be cut where the nodes of the last window have their window blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from shoal.core.blocks import BlockPool
from shoal.core.checkpoints import Checkpoints
from shoal.core.eviction import Eviction
from shoal.core.journal import BlockJournal, root_hash
from shoal.core.nodes import Match, TreeNode
from shoal.core.tiers import TierPlanner
from shoal.core.windows import WindowBlocks
from shoal.runners.plan import BlockId
from shoal.types import Namespace

_GHOSTS = 4096  # evicted paths remembered, so that a receipt can tell "evicted" from "never seen"
_EMPTY_ROOTS = 4096  # namespaces remembered though nothing of theirs is cached, so that old versions are known as such


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences of one type."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixTree:
    """Maps token prefixes to blocks of a pool.

    Invariant: a block is in the tree exactly once, and a held block's ancestors are held by whoever holds it, so only
    leaves that nobody holds are ever evicted. The tree never writes KV and never waits: it is told of blocks when
    their KV is there. `max_cached` bounds the blocks kept for nobody; None leaves that to the pool's size.
    `checkpoints` is given for models with recurrent state.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        copies_blocks: bool = True,
        max_cached: int | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.copies_blocks = copies_blocks
        self.max_cached = max_cached
        self.checkpoints = checkpoints
        self.windows: WindowBlocks | None = None  # where KV of layers with a window lies apart
        self.planner: TierPlanner | None = None  # is told of full blocks, where there are further tiers
        self.evictions = 0
        self.recomputed = 0  # tokens that came back after their eviction
        self.journal: BlockJournal | None = None  # somebody wants to know what comes and goes
        self._roots: OrderedDict[tuple[str, str], tuple[int, TreeNode]] = OrderedDict()  # least recently used first
        self._nodes: dict[BlockId, TreeNode] = {}
        self._clock = 0
        self.eviction = Eviction(self._nodes, self._evictable)
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    # -- reading ------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], namespace: Namespace, *, limit: int) -> Match:
        """The longest prefix of `tokens` whose KV is there, at most `limit` tokens long. Marks it as used now."""
        node = self._root(namespace)
        if node is None:  # nothing was ever cached there, or for a newer version only
            return Match()
        self._clock += 1
        size, at = self.block_size, 0
        path: list[TreeNode] = []
        while at + size <= limit:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                break
            child.last_used = self._clock
            path.append(child)
            node = child
            at += size
        rest = tuple(tokens[at : min(at + size, limit)])
        tail, agreeing = self._best_tail(node, rest)
        blocks = tuple(node.block for node in path)
        if self.checkpoints is not None:
            return self._cut_at_checkpoint(path, node, rest, at + agreeing)
        if self.windows is not None:
            if tail is not None and (
                self.windows.of(tail.block) is None or not self.windows.covers(path, at + agreeing)
            ):
                tail = None
            if tail is None:
                depth = self.windows.reach(path)
                return Match(blocks[:depth], depth * size, known=at + agreeing)
        if tail is None:
            return Match(blocks, at, known=at)
        tail.last_used = self._clock
        return Match(blocks, at, tail.block, agreeing, known=at + agreeing)

    def _cut_at_checkpoint(self, path: list[TreeNode], end: TreeNode, rest: tuple[int, ...], known: int) -> Match:
        """The longest part of a matched path (and of a tail below its end) after which the state was kept."""
        blocks = tuple(node.block for node in path)
        if self.copies_blocks:
            for length in range(len(rest), 0, -1):
                tail = end.children.get(rest[:length])
                if tail is not None and tail.checkpoint is not None:
                    tail.last_used = self._clock
                    at = len(path) * self.block_size
                    return Match(blocks, at, tail.block, length, known=known, checkpoint=tail.checkpoint)
        for depth in range(len(path), 0, -1):
            checkpoint = path[depth - 1].checkpoint
            if checkpoint is not None:
                return Match(blocks[:depth], depth * self.block_size, known=known, checkpoint=checkpoint)
        return Match(known=known)

    def keep_state(self, block: BlockId, tokens: int, checkpoint: int) -> None:
        """The recurrent state after the first `tokens` slots of a block was saved; no use when no node ends there."""
        assert self.checkpoints is not None
        node = self._nodes.get(block)
        if node is None or len(node.key) != tokens:
            self.checkpoints.cancel(checkpoint)
        else:
            self.checkpoints.attach(node, checkpoint)
            if self.planner is not None:
                self.planner.note(node)

    def lost_window(self, block: BlockId) -> None:
        """The window block of a block went to another: no hit can end here now, so what nothing follows is dropped."""
        node = self._nodes.get(block)
        if node is not None and self._evictable(node):
            parent = node.parent
            assert parent is not None
            self._evict(node)
            self.eviction.offer(parent)
        elif node is not None and len(node.key) < self.block_size:  # another block has all of this tail, and more
            self._remove(node)

    def is_expected(self, block: BlockId) -> bool:
        """True when pending work was announced that needs a block of the tree."""
        return self.eviction.is_announced(self._nodes[block])

    def knows(self, block: BlockId) -> bool:
        """True while a block is in the tree."""
        return block in self._nodes

    def has(self, node: TreeNode) -> bool:
        """True while a node is in the tree."""
        return self._nodes.get(node.block) is node

    def path(self, tokens: Sequence[int], namespace: Namespace, *, limit: int) -> list[TreeNode]:
        """The nodes of whole blocks that hold the first of `tokens`, at most `limit` of them. Marks nothing as used."""
        place = self._roots.get((namespace.task, namespace.agent))
        found: list[TreeNode] = []
        if place is None or place[0] != namespace.version:
            return found
        node, size = place[1], self.block_size
        for at in range(0, limit - size + 1, size):
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _best_tail(self, node: TreeNode, rest: tuple[int, ...]) -> tuple[TreeNode | None, int]:
        """The child that agrees longest with `rest`: in sorted order it is one of the two neighbours of `rest`."""
        if not self.copies_blocks or not rest or not node.keys:
            return None, 0
        at = bisect_left(node.keys, rest)
        best, longest = None, 0
        for key in node.keys[max(at - 1, 0) : at + 1]:
            agreeing = common_prefix(key, rest)
            if agreeing > longest:
                best, longest = node.children[key], agreeing
        return best, longest

    def miss_reason(self, hashes: Sequence[int], namespace: Namespace, matched: int) -> str:
        """Why no more than `matched` tokens were found: evicted, diverged, stale or cold. Hashes as `path_hashes`."""
        if self.is_stale(namespace):
            return "stale"
        at = matched // self.block_size
        if at < len(hashes) and hashes[at] in self._ghosts:
            return "evicted"
        return "diverged" if matched else "cold"

    def is_stale(self, namespace: Namespace) -> bool:
        """True when a newer version of this namespace is known: nothing is found or left there any more."""
        current = self._roots.get((namespace.task, namespace.agent))
        return current is not None and current[0] > namespace.version

    def path_hashes(self, tokens: Sequence[int], namespace: Namespace) -> list[int]:
        """One hash per full block of `tokens`, of it and all before it: a hint, never proof of equality."""
        size, value, hashes = self.block_size, hash(namespace), []
        for at in range(0, len(tokens) - size + 1, size):
            value = hash((value, tuple(tokens[at : at + size])))
            hashes.append(value)
        return hashes

    # -- writing ------------------------------------------------------------------------------------------------

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[BlockId], namespace: Namespace, *, standing: int = 0
    ) -> list[BlockId]:
        """Take note that the first len(tokens) slots of `blocks` hold KV of `tokens`; the blocks must be held.

        So many of the first blocks are `standing` in the tree already, unless they were forgotten since.
        Returns the blocks as they stand in the tree: where another block already held the same tokens after the same
        prefix, that one, which the caller should refer to instead of its own (see `Scheduler`).
        """
        node = self._root(namespace, create=True)
        if node is None:
            return list(blocks)
        self._clock += 1
        size, placed = self.block_size, list(blocks)
        known = self._standing(node, blocks[:standing])
        node, standing = (node, 0) if known is None else (known, standing)
        for i, at in enumerate(range(standing * size, len(tokens), size), standing):
            key = tuple(tokens[at : at + size])
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, blocks[i])
                if child is None:
                    break
            placed[i] = child.block
            child.last_used = self._clock
            node = child
        return placed

    def _standing(self, node: TreeNode, blocks: Sequence[BlockId]) -> TreeNode | None:
        """The last node of a path of blocks below `node`, all marked as used now; None when it is no such path.

        Looking them up by their tokens costs several times as much, for every block of a long prompt in every step.
        """
        for block in blocks:
            child = self._nodes.get(block)
            if child is None or child.parent is not node:
                return None
            child.last_used = self._clock
            node = child
        return node

    def _add(self, parent: TreeNode, key: tuple[int, ...], block: BlockId) -> TreeNode | None:
        """Add or extend the node of `block` under `parent`; None when a tail would add nothing."""
        full = len(key) == self.block_size
        path_hash = hash((parent.path_hash, key))
        known = self._nodes.get(block)
        if known is not None:  # this block's tail has grown
            if known.parent is not parent or key[: len(known.key)] != known.key:
                return None
            if self.checkpoints is not None and len(key) > len(known.key):
                self.checkpoints.detach(known)
            self._unlink(known)
            known.key, known.path_hash = key, path_hash
            self._link(parent, known)
            if full and self.planner is not None:
                self.planner.note(known)
            if self.journal is not None:
                self.journal.added(known)
            return known
        before, agreeing = self._best_tail(parent, key)
        if before is not None and not full and agreeing == len(key):
            return None  # a longer block already has all of it
        if before is not None and agreeing == len(before.key) < len(key) and self._useless(before):
            self._remove(before)  # the newcomer has all of this tail, and more
        node = TreeNode(key, block, parent, path_hash)
        self.pool.adopt(block)
        self._nodes[block] = node
        self._link(parent, node)
        if full and self.planner is not None:
            self.planner.note(node)
        if path_hash in self._ghosts:
            del self._ghosts[path_hash]
            self.recomputed += len(key)
        if self.journal is not None:
            self.journal.added(node)
        return node

    def _useless(self, tail: TreeNode) -> bool:
        """Nobody would miss a tail of which another block has everything."""
        return self.pool.refs(tail.block) == 0 and tail.checkpoint is None

    def _link(self, parent: TreeNode, node: TreeNode) -> None:
        parent.children[node.key] = node
        insort(parent.keys, node.key)

    def _unlink(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]

    def _remove(self, node: TreeNode) -> None:
        if self.journal is not None:
            self.journal.removed(node)
        if self.checkpoints is not None:
            self.checkpoints.detach(node)
        self._unlink(node)
        del self._nodes[node.block]
        if self.windows is not None:
            self.windows.left(node.block)
        self.pool.disown(node.block)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take one reference off each block; what nobody holds any more stays cached, within `max_cached`."""
        for block in self.pool.drop(blocks):
            self.eviction.offer(self._nodes[block])
        if self.max_cached is not None:
            self.evict(self.pool.num_cached - self.max_cached)

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Drop these blocks and all below them from the tree: their KV cannot be trusted."""
        for block in blocks:
            node = self._nodes.get(block)
            if node is not None:
                self._remove_subtree(node)

    def _remove_subtree(self, top: TreeNode) -> None:
        order, stack = [], [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            self._remove(node)

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free up to `count` cached blocks, in the order that `eviction` says; returns how many."""
        return self.eviction.evict(count, self._evict) if count > 0 else 0

    def _evictable(self, node: TreeNode) -> bool:
        return node.parent is not None and not node.children and self.pool.refs(node.block) == 0

    def _evict(self, node: TreeNode) -> None:
        self._ghosts[node.path_hash] = None
        if len(self._ghosts) > _GHOSTS:
            self._ghosts.popitem(last=False)
        self._remove(node)
        self.evictions += 1

    # -- namespaces ---------------------------------------------------------------------------------------------

    def _root(self, namespace: Namespace, *, create: bool = False) -> TreeNode | None:
        """The root of a namespace, emptied first when its version was bumped.

        None for an older version than the one it has, and without `create` where it has no root yet.
        """
        place = (namespace.task, namespace.agent)
        known = self._roots.get(place)
        if known is not None:
            version, root = known
            if version > namespace.version:
                return None
            self._roots.move_to_end(place)
            if version == namespace.version:
                return root
            for child in list(root.children.values()):
                self._remove_subtree(child)
        elif not create:
            return None
        root = TreeNode((), -1, None, hash(namespace))
        root.digest = self.planner.paths.root(namespace) if self.planner is not None else None
        root.content = root_hash(namespace)
        self._roots[place] = (namespace.version, root)
        if len(self._roots) > self.pool.total + _EMPTY_ROOTS:  # at most `total` of them have blocks
            self._drop_empty_roots()
        return root

    def _drop_empty_roots(self) -> None:
        """Forget the least recently used half of the roots that have no blocks: all that is lost is their version."""
        empty = [place for place, (_, root) in self._roots.items() if not root.children]
        for place in empty[: len(empty) // 2]:
            del self._roots[place]

    # -- audit --------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[TreeNode]:
        """All nodes below all roots, parents before children."""
        for _, root in self._roots.values():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Walk the whole tree; AssertionError names the first thing that does not hold."""
        self.pool.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        seen = 0
        for node in self.walk():
            seen += 1
            assert self._nodes.get(node.block) is node, f"block {node.block} is not indexed under its node"
            assert node.keys == sorted(node.children), f"keys of block {node.block} are out of order"
            assert 0 < len(node.key) <= self.block_size, f"block {node.block} has {len(node.key)} tokens"
            assert len(node.key) == self.block_size or not node.children, f"tail {node.block} has children"
            parent = node.parent
            if parent is not None and parent.parent is not None and self.pool.refs(node.block):
                assert self.pool.refs(parent.block), f"block {node.block} is held, its parent {parent.block} is not"
        assert seen == len(self._nodes), f"{len(self._nodes)} blocks indexed, {seen} in the tree"
        assert self.pool.num_cached <= seen, "a block is cached, but not in the tree"
