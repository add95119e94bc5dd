"""What the prefix tree consists of, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.runners.plan import BlockId


class TreeNode:
    """One block in the tree. `key` are its tokens, fewer than a block in a tail; a tail has no children."""

    __slots__ = (
        "block", "checkpoint", "children", "content", "digest", "key", "keys", "last_used", "parent", "path_hash",
        "queued",
    )  # fmt: skip

    def __init__(self, key: tuple[int, ...], block: BlockId, parent: TreeNode | None, path_hash: int) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.path_hash = path_hash
        self.children: dict[tuple[int, ...], TreeNode] = {}
        self.keys: list[tuple[int, ...]] = []  # the children's keys, sorted: the best partial match is a neighbour
        self.last_used = 0
        self.content = 0  # the hash of a root and of full blocks that others know, where there is a `BlockJournal`
        self.checkpoint: int | None = None  # the recurrent state after its last token
        self.digest: bytes | None = None  # of a full block's path, once `core/tiers.py` has needed it
        self.queued = False  # is in the heap of candidates for eviction


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a prompt: whole blocks by reference, then `tail_tokens` slots of block `tail` by copy.

    `known` is how many tokens agree with what is there: more than can be taken up where there is no checkpoint.
    """

    blocks: tuple[BlockId, ...] = ()
    block_tokens: int = 0
    tail: BlockId | None = None
    tail_tokens: int = 0
    known: int = field(default=0, compare=False)
    checkpoint: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.block_tokens + self.tail_tokens

    @property
    def held(self) -> list[BlockId]:
        """The blocks that must stay while they are taken up."""
        return [*self.blocks, self.tail] if self.tail is not None else list(self.blocks)
