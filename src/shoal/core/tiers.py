"""KV outside the device: which blocks are to be copied out, and which are wanted back for a request that waits.

Device blocks are the first tier, host memory and disk the next. A block is known there by the digest of its path: of
everything that its bits depend on, and all tokens up to its end. Only whole blocks leave the device. Of a model with
recurrent state, the state after a block has a digest of its own.

Integers and hashes only: who copies and stores is the engine's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shoal.runners.plan import BlockId, WindowId
from shoal.types import Namespace

if TYPE_CHECKING:
    from shoal.core.nodes import TreeNode
    from shoal.core.prefix_tree import PrefixTree

Digest: TypeAlias = bytes
"""The name of a block outside the device: 20 bytes."""

Known: TypeAlias = Callable[[Digest], bool]
"""Whether a tier has what has this digest, or is about to have it."""


class Tier(StrEnum):
    """Where KV came from that was not on the device."""

    HOST = "host"
    DISK = "disk"


class Paths:
    """Makes digests. `secret` keys them: who sees the name of a block cannot find out which tokens it is of."""

    def __init__(self, identity: str, secret: bytes) -> None:
        """`identity` is everything beside namespace and tokens that the bits of KV depend on."""
        self._identity = identity
        self._secret = secret

    def root(self, namespace: Namespace) -> Digest:
        """Where the paths of a namespace begin."""
        facts = repr((self._identity, namespace.task, namespace.agent, namespace.version))
        return self._digest(facts.encode())

    def below(self, parent: Digest, tokens: Sequence[int]) -> Digest:
        """A block of these tokens after the path of `parent`."""
        return self._digest(parent + array("q", tokens).tobytes())

    def state(self, block: Digest) -> Digest:
        """The recurrent state after a block."""
        return self._digest(block + b"state")

    def _digest(self, data: bytes) -> Digest:
        return hashlib.blake2b(data, digest_size=20, key=self._secret).digest()


class Outgoing(NamedTuple):
    """A block to be copied out: its digest, its checkpoint where the state after it was kept, and its window block."""

    digest: Digest
    block: BlockId
    checkpoint: int | None
    window: WindowId | None


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """What would bring a waiting request further: `blocks` from block `first` of its tokens on.

    With `state`, the recurrent state after the last of them too (after block `first` - 1 where there are none).
    """

    first: int
    blocks: tuple[Digest, ...]
    state: Digest | None = None

    @property
    def digests(self) -> tuple[Digest, ...]:
        """All of it, in the order in which it is needed."""
        return self.blocks if self.state is None else (*self.blocks, self.state)


class TierPlanner:
    """Tells what of a prefix tree should go out and what should come back.

    The tree tells it of every full block. Invariant: a node that waits to go out is full; it may have left the tree
    since, and is dropped when its turn comes, so there are at most as many as blocks.
    """

    def __init__(self, tree: PrefixTree, paths: Paths) -> None:
        self.paths = paths
        self._distrusted: list[Digest] = []
        self.lost = 0  # blocks that were evicted before their turn came
        self._tree = tree
        self._waiting: dict[BlockId, TreeNode] = {}  # in the order they became full
        assert not len(tree), "paths begin at roots that were made with their digests"
        tree.planner = self

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, node: TreeNode) -> None:
        """A node became full, or the state after it was kept."""
        if len(node.key) == self._tree.block_size:
            self._waiting[node.block] = node

    def distrust(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """KV of these tokens may be wrong: no tier is to keep it."""
        size, digest = self._tree.block_size, self.paths.root(namespace)
        for at in range(0, len(tokens) - size + 1, size):
            digest = self.paths.below(digest, tokens[at : at + size])
            self._distrusted += (digest, self.paths.state(digest))

    def take_distrusted(self) -> list[Digest]:
        """What tiers must forget, since the last call."""
        taken, self._distrusted = self._distrusted, []
        return taken

    def clear(self) -> None:
        """Nothing that is in the tree now is to go out."""
        self._waiting.clear()

    def take(self, known: Known) -> Outgoing | None:
        """The next block that should go out and that no tier has; None when there is none. Only a whole one does."""
        windows = self._tree.windows
        while self._waiting:
            block = next(iter(self._waiting))
            node = self._waiting.pop(block)
            if not self._tree.has(node):
                self.lost += 1
                continue
            window = windows.of(block) if windows is not None else None
            if windows is not None and window is None:
                self.lost += 1
                continue
            digest = self.digest(node)
            state = node.checkpoint is not None and not known(self.paths.state(digest))
            if state or not known(digest):
                return Outgoing(digest, block, node.checkpoint if state else None, window)
        return None

    def digest(self, node: TreeNode) -> Digest:
        """The digest of a full node's path, made when first asked for."""
        missing = []
        at: TreeNode | None = node
        while at is not None and at.digest is None:
            missing.append(at)
            at = at.parent
        value = at.digest if at is not None else None
        for each in reversed(missing):
            value = each.digest = self.paths.below(value or b"", each.key)
        assert value is not None
        return value

    def held(self, tokens: Sequence[int], namespace: Namespace, *, limit: int) -> list[Digest]:
        """Digests of the whole blocks that the tree has of the first `limit` of `tokens`."""
        return [self.digest(node) for node in self._tree.path(tokens, namespace, limit=limit)]

    def wanted(self, tokens: Sequence[int], namespace: Namespace, *, limit: int, known: Known) -> WantedBlocks | None:
        """What the tiers have of the first `limit` of `tokens` beyond what the tree has; None: nothing."""
        if self._tree.is_stale(namespace):
            return None
        size = self._tree.block_size
        path = self._tree.path(tokens, namespace, limit=limit)
        if self._tree.windows is not None:  # what lies behind lost window blocks is wanted again, for theirs
            path = path[: self._tree.windows.reach(path)]
        digest = self.digest(path[-1]) if path else self.paths.root(namespace)
        digests: list[Digest] = []
        for at in range(len(path) * size, limit - size + 1, size):
            digest = self.paths.below(digest, tokens[at : at + size])
            if not known(digest):
                break
            digests.append(digest)
        if self._tree.checkpoints is None:
            return WantedBlocks(len(path), tuple(digests)) if digests else None
        return self._up_to_a_state(path, digests, known)

    def _up_to_a_state(self, path: list[TreeNode], digests: list[Digest], known: Known) -> WantedBlocks | None:
        """The longest part after whose end the recurrent state was kept, if it is longer than what the tree offers."""
        for count in range(len(digests), 0, -1):
            state = self.paths.state(digests[count - 1])
            if known(state):
                return WantedBlocks(len(path), tuple(digests[:count]), state)
        for depth in range(len(path), 0, -1):
            if path[depth - 1].checkpoint is not None:
                return None
            state = self.paths.state(self.digest(path[depth - 1]))
            if known(state):
                return WantedBlocks(depth, (), state)
        return None
