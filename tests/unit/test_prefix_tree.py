"""Exact blocks and eviction order, without a device. Blocks have 4 tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shoal.core.blocks import BlockPool
from shoal.core.nodes import Match
from shoal.core.prefix_tree import PrefixTree, common_prefix
from shoal.types import Namespace

HOME = Namespace()
A = [1, 2, 3, 4, 5, 6, 7, 8]


class Tree(PrefixTree):
    """With the blocks of `put` held by nobody."""

    def __init__(self, total: int = 16, *, copies_blocks: bool = True, max_cached: int | None = None) -> None:
        super().__init__(BlockPool(total), 4, copies_blocks=copies_blocks, max_cached=max_cached)

    def put(self, tokens: Sequence[int], namespace: Namespace = HOME) -> list[int]:
        blocks = [self.pool.take() for _ in range(-(-len(tokens) // 4))]
        standing = self.insert(tokens, blocks, namespace)
        self.release(blocks)
        self.check_integrity()
        return standing

    def get(self, tokens: Sequence[int], namespace: Namespace = HOME) -> Match:
        return self.match(tokens, namespace, limit=len(tokens))


def test_full_blocks_match_by_reference() -> None:
    tree = Tree()
    assert tree.put(A) == [0, 1]
    assert tree.get([*A, 9]) == Match((0, 1), 8)
    assert tree.get([*A[:4], 0]) == Match((0,), 4)


def test_a_block_that_agrees_in_part_is_copied_up_to_there() -> None:
    tree = Tree()
    tree.put(A)
    assert tree.get([1, 2, 3, 4, 5, 6, 0, 0]) == Match((0,), 4, 1, 2)
    assert tree.get([1, 2, 0]) == Match((), 0, 0, 2)


def test_without_copies_only_whole_blocks_match() -> None:
    tree = Tree(copies_blocks=False)
    tree.put(A)
    assert tree.get([1, 2, 3, 4, 5, 6, 0, 0]) == Match((0,), 4)


def test_the_limit_leaves_the_last_token() -> None:
    tree = Tree()
    tree.put(A)
    assert tree.match(A, HOME, limit=7) == Match((0,), 4, 1, 3)


def test_a_tail_grows_with_its_sequence_into_a_block() -> None:
    tree = Tree()
    block = tree.pool.take()
    tree.insert([1, 2], [block], HOME)
    assert tree.get([1, 2, 3]) == Match((), 0, block, 2)
    tree.insert([1, 2, 3, 4], [block], HOME)
    assert tree.get([1, 2, 3, 4, 5]) == Match((block,), 4)
    assert len(tree) == 1
    tree.check_integrity()


def test_the_best_partial_match_is_found_among_many() -> None:
    rng = random.Random(1)
    tree = Tree(300)
    keys = {tuple(rng.choices(range(3), k=4)) for _ in range(60)}
    for key in sorted(keys):
        tree.put(list(key))
    for _ in range(300):
        wanted = rng.choices(range(3), k=rng.randint(1, 3))
        longest = max(common_prefix(wanted, list(key)) for key in keys)
        assert tree.get(wanted).tokens == longest


def test_equal_tokens_in_another_block_stand_once() -> None:
    tree = Tree()
    tree.put(A)
    assert tree.put(A) == [0, 1]
    assert len(tree) == 2
    assert tree.pool.num_free == 14


def test_a_tail_that_adds_nothing_is_not_kept_and_one_outgrown_goes() -> None:
    tree = Tree()
    tree.put(A[:3])
    tree.put(A[:2])
    assert [node.key for node in tree.walk()] == [(1, 2, 3)]
    tree.put(A[:4])
    assert [node.key for node in tree.walk()] == [(1, 2, 3, 4)]


def test_an_early_change_leaves_nothing_behind_it_and_everything_before() -> None:
    tree = Tree(copies_blocks=False)
    tree.put(list(range(12)))
    changed = [0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11]
    assert tree.get(changed) == Match((0,), 4)


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    tree = Tree()
    tree.put([1, 1, 1, 1, 2, 2, 2, 2])  # blocks 0, 1
    tree.put([3, 3, 3, 3])  # block 2
    tree.put([4, 4, 4, 4])  # block 3
    tree.get([3, 3, 3, 3])
    gone: list[int] = []
    for _ in range(4):
        before = {node.block for node in tree.walk()}
        assert tree.evict(1) == 1
        gone += before - {node.block for node in tree.walk()}
    assert gone == [1, 0, 3, 2]
    assert tree.evict(1) == 0


def test_held_blocks_are_never_evicted() -> None:
    tree = Tree()
    tree.put(A)
    tree.pool.hold([0])
    assert tree.evict(5) == 1
    assert [node.block for node in tree.walk()] == [0]


def test_announced_blocks_go_last() -> None:
    tree = Tree()
    tree.put([1, 1, 1, 1])  # oldest, but somebody will need it
    tree.put([2, 2, 2, 2])
    hashes = tree.path_hashes([1, 1, 1, 1], HOME)
    tree.eviction.announce(hashes)
    tree.evict(1)
    assert [node.key for node in tree.walk()] == [(1, 1, 1, 1)]
    tree.put([2, 2, 2, 2])
    tree.eviction.withdraw(hashes)
    tree.evict(1)
    assert [node.key for node in tree.walk()] == [(2, 2, 2, 2)]


def test_announced_blocks_do_go_when_nothing_else_is_left() -> None:
    tree = Tree()
    tree.put(A)
    tree.eviction.announce(tree.path_hashes(A, HOME))
    assert tree.evict(2) == 2
    assert len(tree) == 0


def test_the_byte_budget_bounds_what_is_kept_for_nobody() -> None:
    tree = Tree(max_cached=2)
    for i in range(8):
        tree.put([i, i, i, i])
        assert tree.pool.num_cached <= 2
    assert tree.evictions == 6


def test_namespaces_never_share() -> None:
    tree = Tree()
    tree.put(A, Namespace(task="x"))
    assert tree.get(A, Namespace(task="y")) == Match()
    assert tree.get(A, Namespace(task="x", agent="a")) == Match()
    assert tree.get(A, Namespace(task="x")).tokens == 8


def test_a_bumped_version_frees_the_old_one_and_the_old_one_finds_nothing() -> None:
    tree = Tree()
    tree.put(A, Namespace(task="x", version=1))
    assert tree.get(A, Namespace(task="x", version=2)) == Match()
    assert tree.pool.num_free == 16
    tree.put(A, Namespace(task="x", version=1))
    assert len(tree) == 0
    assert tree.miss_reason([], Namespace(task="x", version=1), 0) == "stale"


def test_a_miss_says_why() -> None:
    tree = Tree(copies_blocks=False)
    hashes = tree.path_hashes([*A, 9], HOME)
    assert tree.miss_reason(hashes, HOME, 0) == "cold"
    tree.put(A)
    assert tree.miss_reason(tree.path_hashes([1, 2, 3, 4, 0, 0, 0, 0], HOME), HOME, 4) == "diverged"
    tree.evict(1)
    assert tree.miss_reason(hashes, HOME, 4) == "evicted"


def test_what_cannot_be_trusted_goes_with_all_below_it() -> None:
    tree = Tree()
    tree.put([*A, 9, 9, 9, 9])
    tree.put([1, 2, 3, 4, 7, 7, 7, 7])
    tree.forget([1])
    assert sorted(node.block for node in tree.walk()) == [0, 4]
    tree.check_integrity()


def test_distinct_prompts_do_not_grow_the_tree_or_its_heap() -> None:
    tree = Tree(8)
    for i in range(3000):
        while tree.pool.num_free < 2:
            assert tree.evict(1) == 1
        tree.put([i, i, i, i, i, i])
    assert len(tree) <= 8
    assert len(tree.eviction._candidates) < 200
