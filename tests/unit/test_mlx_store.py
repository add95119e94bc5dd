"""Blocks of KV beside the rows: what they keep, what they let go, what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.errors import RunnerError

mx = pytest.importorskip("mlx.core")
SIZE = 4


def kv(*rows: Sequence[int]) -> Any:
    """Of rows of values; the shorter are padded on the left."""
    longest = max(map(len, rows))
    array = mx.array([[-1] * (longest - len(row)) + list(row) for row in rows], dtype=mx.float32)[:, None, :, None]
    return [(array, -array)]


def made(table: Sequence[int], *values: int) -> Any:
    from shoal.runners.mlx.store import BlockStore

    store = BlockStore(SIZE)
    write(store, table, 0, *values)
    return store


def write(store: Any, table: Sequence[int], begin: int, *values: int, mine: Sequence[bool] | None = None) -> None:
    from shoal.runners.mlx.store import RowSpan

    store.write(kv(values), [RowSpan(table, begin, len(values), mine or [True] * len(table))])


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
        write(store, (9,), 2, 1)


def test_a_copy_grows_without_its_source() -> None:
    store = made((1,), 0, 1, 2)
    store.copy(1, 6)
    store.truncate(6, 2)
    write(store, (6,), 2, 8, 9)
    assert read(store, (6,), 4) == [0, 1, 8, 9]
    assert read(store, (1,), 3) == [0, 1, 2]


def test_blocks_that_are_another_s_are_left_alone() -> None:
    store = made((1, 2), *range(8))
    write(store, (1, 2, 3), 0, *range(10, 22), mine=[False, True, True])
    assert read(store, (1, 2, 3), 12) == [0, 1, 2, 3, *range(14, 22)]


def test_a_segment_mostly_gone_is_cut_down() -> None:
    store = made(tuple(range(8)), *range(32))
    for block in range(7):
        store.truncate(block, 0)
    assert read(store, (7,), 4) == [28, 29, 30, 31]
    (part,) = store.read((7,), 4)
    (piece,) = store._pieces[7]
    assert part[0][0].shape[2] == piece.segment.count == 4


def test_rows_copied_together_end_together() -> None:
    from shoal.runners.mlx.store import BlockStore, RowSpan

    store = BlockStore(SIZE)
    write(store, (1,), 0, 9, 9)
    parts = [RowSpan((1, 2), 2, 3, [True, True]), RowSpan((3, 4), 0, 5, [True, True])]
    store.write(kv(range(20, 23), range(30, 35)), parts)
    assert read(store, (1, 2), 5) == [9, 9, 20, 21, 22]
    assert read(store, (3, 4), 5) == [30, 31, 32, 33, 34]


def test_what_is_left_of_rows_is_copied_run_by_run() -> None:
    from shoal.runners.mlx.store import BlockStore, RowSpan

    store = BlockStore(SIZE)
    tables = [tuple(range(10 * row, 10 * row + 4)) for row in range(3)]
    store.write(
        kv(*(range(100 * row, 100 * row + 16) for row in range(3))), [RowSpan(t, 0, 16, [True] * 4) for t in tables]
    )
    store.copy(1, 40)  # slots that two blocks have
    for block in (0, *tables[1], *tables[2][:3]):
        store.truncate(block, 0)
    assert read(store, tables[0][1:], 12) == list(range(4, 16))
    assert read(store, (40, 2), 8) == list(range(4, 12))
    assert read(store, tables[2][3:], 4) == list(range(212, 216))
    assert len(store.read(tables[0][1:], 12)) == 1
    segments = {piece.segment for block in (1, 2, 3, 40, tables[2][3]) for piece in store._pieces[block]}
    assert sorted((s.rows, s.count, s.live) for s in segments) == [(1, 4, 4), (1, 12, 16)]
