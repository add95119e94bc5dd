"""Blocks of KV beside the rows: what they keep, what they let go, what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.errors import RunnerError

mx = pytest.importorskip("mlx.core")
SIZE = 4


def kv(*values: int) -> Any:
    array = mx.array(values, dtype=mx.float32).reshape(1, 1, -1, 1)
    return [(array, -array)]


def made(table: Sequence[int], *values: int) -> Any:
    from shoal.runners.mlx.store import BlockStore

    store = BlockStore(SIZE)
    store.write(table, 0, kv(*values), [True] * len(table))
    return store


def read(store: Any, table: Sequence[int], end: int) -> list[int]:
    parts = store.read(table, end)
    for part in parts:
        assert (part[0][0] == -part[0][1]).all()
    return [int(value) for part in parts for value in part[0][0].reshape(-1).tolist()]


def test_positions_come_back_along_any_table() -> None:
    store = made((5, 2, 7), *range(10))
    assert read(store, (5, 2, 7), 10) == list(range(10))
    assert read(store, (5, 2), 6) == list(range(6))
    assert read(store, (2, 5), 8) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_what_nothing_wrote_is_refused() -> None:
    store = made((5, 2), *range(6))
    for table, end in (((5, 2), 7), ((5, 9), 5)):
        with pytest.raises(RunnerError, match="nothing wrote"):
            store.read(table, end)
    with pytest.raises(RunnerError, match="slots before are empty"):
        store.write((9,), 2, kv(1), [True])


def test_a_copy_grows_without_its_source() -> None:
    store = made((1,), 0, 1, 2)
    store.copy(1, 6)
    store.truncate(6, 2)
    store.write((6,), 2, kv(8, 9), [True])
    assert read(store, (6,), 4) == [0, 1, 8, 9]
    assert read(store, (1,), 3) == [0, 1, 2]


def test_blocks_that_are_another_s_are_left_alone() -> None:
    store = made((1, 2), *range(8))
    store.write((1, 2, 3), 0, kv(*range(10, 22)), [False, True, True])
    assert read(store, (1, 2, 3), 12) == [0, 1, 2, 3, *range(14, 22)]


def test_a_segment_mostly_gone_is_cut_down() -> None:
    store = made(tuple(range(8)), *range(32))
    for block in range(7):
        store.truncate(block, 0)
    assert read(store, (7,), 4) == [28, 29, 30, 31]
    (part,) = store.read((7,), 4)
    (piece,) = store._pieces[7]
    assert part[0][0].shape[2] == piece.segment.count == 4
