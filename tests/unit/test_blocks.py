from __future__ import annotations

import pytest

from shoal.core.blocks import BlockPool


def test_blocks_go_from_free_to_held_to_cached_and_back() -> None:
    pool = BlockPool(4)
    block = pool.take()
    assert (pool.num_free, pool.num_held, pool.num_cached) == (3, 1, 0)
    pool.adopt(block)
    assert pool.drop([block]) == [block]
    assert (pool.num_free, pool.num_held, pool.num_cached) == (3, 0, 1)
    pool.hold([block])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (3, 1, 0)
    pool.disown(block)
    assert pool.drop([block]) == []
    assert (pool.num_free, pool.num_held, pool.num_cached) == (4, 0, 0)
    pool.check_integrity()


def test_low_blocks_are_used_first_and_a_freed_one_is_used_next() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.drop([1])
    assert pool.take() == 1


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="free and cannot be held"):
        pool.hold([0])
    with pytest.raises(ValueError, match="more often than held"):
        pool.drop([0])
    with pytest.raises(ValueError, match="not in the tree"):
        pool.disown(0)
    with pytest.raises(ValueError, match="not held"):
        pool.adopt(0)


def test_the_audit_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.take()
    pool._held = 0
    with pytest.raises(AssertionError, match="held is 0, counted 1"):
        pool.check_integrity()
