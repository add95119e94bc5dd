"""Rows side by side on MLX: what joining and a step cost, counted in operations."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlx_tiny import write_tiny

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import BatchKVCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from shoal.runners.mlx.rows import Rows, arrays, leaves  # noqa: E402

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A llama of four layers."""
    path = tmp_path_factory.mktemp("llama")
    write_tiny(path, "llama", num_hidden_layers=LAYERS)
    return load_model(path)[0]


def fed(model: Any, lengths: list[int]) -> list[Rows]:
    """A sequence of each length by itself, evaluated."""
    found = []
    for number, length in enumerate(lengths):
        rows = Rows(make_prompt_cache(model), [number], [0])
        if length:
            rows.feed(model, [range(5, 5 + length)])
        mx.eval(arrays(rows.caches))
        found.append(rows)
    return found


def operations(kind: str, *outputs: Any) -> int:
    """How many operations of a kind the outputs still wait for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        return path.read_text().count(f'label ="{kind}"')


@pytest.mark.parametrize("lengths", [[9] * 8, [9, 12, 10, 15, 11, 9, 14, 13]], ids=["even", "uneven"])
def test_each_array_is_copied_once_however_many_rows_join(model: Any, lengths: list[int]) -> None:
    first, *others = fed(model, lengths)
    first.join(others)
    uneven = len(set(lengths)) > 1
    found = arrays(first.caches)
    assert operations("Concatenate", *found) == (0 if uneven else 2 * LAYERS)
    assert operations("SliceUpdate", *found) == (2 * LAYERS * 8 if uneven else 0)  # each row's K and V to its place
    assert (first.ids, first.lengths, first.padded) == (list(range(8)), lengths, uneven)


def test_rows_that_join_a_running_batch_copy_it_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, *running = fed(model, [9, 12])
    batch.join(running)
    mx.eval(arrays(batch.caches))
    extended: list[int] = []
    extend = BatchKVCache.extend

    def counted(self: Any, other: Any) -> None:
        extended.append(len(other.left_padding))
        extend(self, other)

    monkeypatch.setattr(BatchKVCache, "extend", counted)
    batch.join(fed(model, [7, 10, 8]))
    assert extended == [3] * LAYERS
    assert batch.lengths == [9, 12, 7, 10, 8]


def test_prompts_of_one_length_are_never_padded(model: Any) -> None:
    first, *others = fed(model, [0, 0, 0])
    first.join(others)
    first.feed(model, [range(5, 15)] * 3)
    assert not first.padded
    assert not any(isinstance(leaf, BatchKVCache) for leaf in leaves(first.caches))


def test_a_step_of_padded_rows_counts_positions_once_for_all_layers(model: Any) -> None:
    token = mx.array([3, 4])
    additions = {}
    for lengths in ([9, 9], [9, 12]):
        first, *others = fed(model, lengths)
        first.join(others)
        mx.eval(first.step(model, token))
        additions[first.padded] = operations("Add", first.step(model, token))
    assert additions[True] == additions[False] + 1


def test_steps_after_joining_are_those_of_each_row_alone(model: Any) -> None:
    lengths = [9, 12, 10]
    alone = fed(model, lengths)
    first, *others = fed(model, lengths)
    first.join(others)
    for token in (3, 4, 5):
        together = first.step(model, mx.array([token] * 3))
        each = mx.concatenate([rows.step(model, mx.array([token])) for rows in alone])
        assert mx.allclose(together, each, atol=1e-4)
