"""Which cached block goes next when room is needed.

The policy: the least recently used leaf that nobody holds; blocks that are expected go last, and of those first the
ones that will be needed in the most distant step. Another policy is another class with this face.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from shoal.core.nodes import TreeNode
from shoal.runners.plan import BlockId

_NEVER = 1 << 62  # the step in which nobody will need a block


class Eviction:
    """Keeps the leaves that may be evicted in order, and what is expected.

    Invariant: every evictable node is in the heap or was handed to `remove`. Entries may be stale, and are checked when
    they come up; there are at most twice as many as nodes, and a few.
    """

    def __init__(self, nodes: Mapping[BlockId, TreeNode], evictable: Callable[[TreeNode], bool]) -> None:
        """`nodes` is the tree's own index. `evictable`: the node is a leaf in the tree and nobody holds its block."""
        self._nodes = nodes
        self._evictable = evictable
        self._candidates: list[tuple[int, int, TreeNode]] = []  # heap by (last_used, insertion)
        self._pushes = 0
        self._announced: dict[int, list[int]] = {}  # path hash -> the steps in which it will be needed, sorted

    def announce(self, hashes: Sequence[int], due: int = 0) -> None:
        """Pending work will need the blocks with these path hashes in step `due`, 0 for now: evict them last."""
        for value in hashes:
            insort(self._announced.setdefault(value, []), due)

    def withdraw(self, hashes: Sequence[int], due: int = 0) -> None:
        """Take an announcement back."""
        for value in hashes:
            steps = self._announced[value]
            steps.remove(due)
            if not steps:
                del self._announced[value]

    def is_announced(self, node: TreeNode) -> bool:
        """True while pending work will need this node."""
        return node.path_hash in self._announced

    def offer(self, node: TreeNode) -> None:
        """A node may have become evictable."""
        if node.queued or not self._evictable(node):
            return
        if len(self._candidates) > 2 * len(self._nodes) + 64:  # most are of nodes that are gone
            self._candidates = [c for c in self._candidates if self._nodes.get(c[2].block) is c[2]]
            heapq.heapify(self._candidates)
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._candidates, (node.last_used, self._pushes, node))

    def evict(self, count: int, remove: Callable[[TreeNode], None]) -> int:
        """Have up to `count` nodes removed, in the order of the policy; returns how many."""
        freed = 0
        spared: list[tuple[int, int, TreeNode]] = []  # a heap by step of need, the most distant first, then by use
        while freed < count:
            node = self._next_candidate()
            if node is None:
                break
            if node.path_hash in self._announced:
                heapq.heappush(spared, self._spared(node))
                continue
            parent = node.parent
            remove(node)
            freed += 1
            if parent is not None:
                self.offer(parent)
        while freed < count and spared:
            node = heapq.heappop(spared)[2]
            parent = node.parent
            remove(node)
            freed += 1
            if parent is not None and self._evictable(parent):
                heapq.heappush(spared, self._spared(parent))
        for _, _, node in spared:
            self.offer(node)
        return freed

    def _spared(self, node: TreeNode) -> tuple[int, int, TreeNode]:
        self._pushes += 1
        return -self._announced.get(node.path_hash, [_NEVER])[0], self._pushes, node

    def _next_candidate(self) -> TreeNode | None:
        while self._candidates:
            last_used, _, node = heapq.heappop(self._candidates)
            node.queued = False
            if self._nodes.get(node.block) is not node or not self._evictable(node):
                continue
            if node.last_used != last_used:
                self.offer(node)
                continue
            return node
        return None
