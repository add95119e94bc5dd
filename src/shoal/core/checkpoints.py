"""Places for recurrent state: which prefix of the tree has its state kept, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.core.blocks import BlockPool
    from shoal.core.nodes import TreeNode


class Checkpoints:
    """Gives out the `total` checkpoint ids of a runner.

    Invariant: each id is free, reserved by a running sequence that is about to save to it, or that of one node of the
    prefix tree; a node's `checkpoint` is the state after its last token. When none is free the least recently used
    node gives its own up, one that nobody holds first, never one that several sequences hold: it is worth more.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._reserved: set[int] = set()
        self._nodes: dict[int, TreeNode] = {}

    def reserve(self, pool: BlockPool) -> int | None:
        """An id to save to; None when there is none to spare. It ends in `attach` or `cancel`."""
        if not self._free:
            spare = [node for node in self._nodes.values() if pool.refs(node.block) < 2]
            if spare:
                self.detach(min(spare, key=lambda node: (pool.refs(node.block), node.last_used)))
        if not self._free:
            return None
        checkpoint = self._free.pop()
        self._reserved.add(checkpoint)
        return checkpoint

    def attach(self, node: TreeNode, checkpoint: int) -> None:
        """The state was saved: it is the one after this node. A second one of the same prefix is given back."""
        if node.checkpoint is not None:
            self.cancel(checkpoint)
            return
        self._reserved.remove(checkpoint)
        node.checkpoint = checkpoint
        self._nodes[checkpoint] = node

    def cancel(self, checkpoint: int) -> None:
        """Nothing was saved after all, or nobody can use it."""
        self._reserved.remove(checkpoint)
        self._free.append(checkpoint)

    def detach(self, node: TreeNode) -> None:
        """The node goes, or grows past its checkpoint."""
        if node.checkpoint is not None:
            del self._nodes[node.checkpoint]
            self._free.append(node.checkpoint)
            node.checkpoint = None

    def check_integrity(self) -> None:
        """AssertionError when an id is lost or has two places."""
        places = [*self._free, *self._reserved, *self._nodes]
        assert sorted(places) == list(range(self.total)), f"checkpoints: {sorted(places)} of {self.total}"
        for checkpoint, node in self._nodes.items():
            assert node.checkpoint == checkpoint, f"checkpoint {checkpoint} is not its node's"
