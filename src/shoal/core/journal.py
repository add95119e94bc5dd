"""What the prefix tree holds, told to others: hashes of blocks that mean the same in every process, and their changes.

A block's hash is made of its tokens and of the hash before it; the first one's of its namespace. So equal hashes stand
for equal beginnings of prompts, as far as 64 bits tell: a hint where to send a request, no proof that KV may be used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from shoal.core.nodes import TreeNode
    from shoal.core.prefix_tree import PrefixTree
    from shoal.types import Namespace

BlockHash: TypeAlias = int
"""64 bits of a block's content and of all that stands before it."""

_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that came, each the child of the one before; the first is the child of `parent`, None: of a namespace.

    `tokens` has all their tokens in order.
    """

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that went."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is held any more, or what follows is all that is."""


Change: TypeAlias = Stored | Removed | Cleared


def root_hash(namespace: Namespace) -> BlockHash:
    """What stands before the first block of a namespace."""
    salt = repr((namespace.task, namespace.agent, namespace.version)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(salt, digest_size=8).digest(), "little")


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The hash of a full block below another."""
    return _below(parent, array("i", tokens).tobytes())


def _below(parent: BlockHash, tokens: bytes) -> BlockHash:
    return int.from_bytes(blake2b(parent.to_bytes(8, "little") + tokens, digest_size=8).digest(), "little")


def content_hashes(
    tokens: Sequence[int], namespace: Namespace, block_size: int, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """The hashes of all full blocks of a prompt. `known` are those of its first blocks, where they are at hand."""
    hashes = list(known)
    value = hashes[-1] if hashes else root_hash(namespace)
    raw, step = array("i", tokens[len(hashes) * block_size :]).tobytes(), block_size * _TOKEN_BYTES
    for at in range(0, len(raw) - step + 1, step):
        value = _below(value, raw[at : at + step])
        hashes.append(value)
    return hashes


class BlockJournal:
    """Notes which full blocks come into a prefix tree and leave it, from now on, in order.

    A tree has at most one. Without one its blocks have no content hash, and nothing is done for it.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._changes: list[tuple[bool, TreeNode, BlockHash]] = []
        self.blocks = 0  # full blocks in the tree
        for node in tree.walk():
            self.added(node)
        self._changes.clear()
        tree.journal = self

    def close(self) -> None:
        """Note nothing more."""
        self._tree.journal = None

    def added(self, node: TreeNode) -> None:
        """A node came, or has grown; a tail does not count before it is full. Its parent is there."""
        if len(node.key) == self._tree.block_size:
            assert node.parent is not None
            node.content = block_hash(node.parent.content, node.key)
            self.blocks += 1
            self._changes.append((True, node, node.content))

    def removed(self, node: TreeNode) -> None:
        """A node is about to go."""
        if len(node.key) == self._tree.block_size:
            self.blocks -= 1
            self._changes.append((False, node, node.content))

    def take(self) -> list[Change]:
        """What happened since the last call."""
        changes, self._changes = self._changes, []
        return list(_grouped(changes))

    def snapshot(self) -> list[Change]:
        """All that is held now. What was noted before is in it, and is told no more."""
        self._changes.clear()
        full = (node for node in self._tree.walk() if len(node.key) == self._tree.block_size)
        return [Cleared(), *_grouped((True, node, node.content) for node in full)]


def _grouped(changes: Iterable[tuple[bool, TreeNode, BlockHash]]) -> Iterator[Change]:
    """Changes in their order, those that belong together as one."""
    came: list[TreeNode] = []
    went: list[BlockHash] = []
    for added, node, content in changes:
        if went and added:
            yield Removed(tuple(went))
            went.clear()
        if came and not (added and node.parent is came[-1]):
            yield _stored(came)
            came.clear()
        if added:
            came.append(node)
        else:
            went.append(content)
    if came:
        yield _stored(came)
    if went:
        yield Removed(tuple(went))


def _stored(nodes: Sequence[TreeNode]) -> Stored:
    parent = nodes[0].parent
    assert parent is not None
    above = None if parent.parent is None else parent.content
    tokens = tuple(token for node in nodes for token in node.key)
    return Stored(above, tuple(node.content for node in nodes), tokens)
