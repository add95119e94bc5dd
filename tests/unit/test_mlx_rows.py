"""Rows side by side on MLX: what joining and a step cost, counted in operations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.support.mlx_tiny import tiny_runner, write_tiny

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


def test_a_row_leaves_without_waiting_for_the_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far rows are padded is known on the host; to read it from the device is to wait for the step under way."""
    lengths = [9, 12, 10, 15]
    kept = [0, 2]
    alone = [rows for i, rows in enumerate(fed(model, lengths)) if i in kept]
    batch, *others = fed(model, lengths)
    batch.join(others)
    tolist, reads = mx.array.tolist, [0]

    def counted(self: Any) -> Any:
        reads[0] += 1
        return tolist(self)

    monkeypatch.setattr(mx.array, "tolist", counted)
    each = mx.concatenate([rows.step(model, mx.array([3])) for rows in alone])
    together = batch.step(model, mx.array([3] * 4))[mx.array(kept)]
    batch.ahead = 1
    batch.keep(kept)
    assert max(leaf.size() for leaf in batch.caches) == 10 + 1  # the padding of those that left went with them
    assert mx.allclose(together, each, atol=1e-4)
    each = mx.concatenate([rows.step(model, mx.array([4])) for rows in alone])
    assert mx.allclose(batch.step(model, mx.array([4] * 2)), each, atol=1e-4)
    batch.take_back()
    batch.ahead, batch.lengths = 0, [length + 1 for length in batch.lengths]
    single = batch.alone(1)
    assert (single.ids, single.lengths, single.padded) == ([2], [11], False)
    assert reads == [0]


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


@pytest.mark.parametrize("lengths", [[9] * 8, [9, 12, 10, 15, 11, 9, 14, 13]], ids=["even", "uneven"])
def test_kv_of_several_rows_is_copied_in_one_go(model: Any, lengths: list[int]) -> None:
    first, *others = fed(model, lengths)
    first.join(others)
    for rows in (range(8), [3, 1, 7, 0, 2, 6, 5, 4], [5, 2, 7], [4]):
        found = first.kv(list(rows), 7)
        assert operations("Contiguous", *(array for pair in found for array in pair)) == 2 * LAYERS
        for i, row in enumerate(rows):
            for (keys, values), (k, v) in zip(found, first.kv([row], 7), strict=True):
                assert mx.array_equal(keys[i : i + 1], k)
                assert mx.array_equal(values[i : i + 1], v)


@pytest.mark.parametrize(
    ("lengths", "copies"), [((40, 9, 12, 100, 10), [1, 1, 3]), ((14, 9, 12, 15, 10), [5]), ((9,) * 5, [5])], ids=str
)
def test_what_leaves_together_is_stored_together(
    lengths: tuple[int, ...], copies: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences leave at once, those of like length in one copy; others go on from their blocks as if alone."""
    runner = tiny_runner(tmp_path / "m", "llama")
    prompts = [tuple((7 * i + 3 * at) % 250 for at in range(length)) for i, length in enumerate(lengths)]
    tables = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(lengths))]
    copied: list[list[int]] = []
    kv = Rows.kv

    def counted(self: Rows, rows: Sequence[int], count: int) -> Any:
        copied.append(sorted(rows))
        return kv(self, rows, count)

    monkeypatch.setattr(Rows, "kv", counted)

    def step(number: int, first: int, feeds: list[tuple[int, ...]], starts: tuple[int, ...]) -> Any:
        items = zip(feeds, starts, tables, strict=True)
        wanted = Want.ARGMAX if first == 0 else Want.LOGITS
        return runner.execute(
            StepPlan(number, tuple(ScheduledSequence(first + i, *item, wanted) for i, item in enumerate(items)))
        )

    best = step(1, 0, prompts, (0,) * 5).argmax
    runner.release(range(5))
    assert sorted(map(len, copied)) == copies
    together = step(2, 10, [best[i] for i in range(5)], lengths).logits
    runner.release(range(10, 15))
    for i, prompt in enumerate(prompts):
        item = ScheduledSequence(20 + i, (*prompt, *best[i]), 0, (50, 51, 52, 53), Want.LOGITS)
        alone = runner.execute(StepPlan(3 + i, (item,))).logits
        runner.release([20 + i])
        assert alone is not None
        assert abs(alone[0] - together[i]).max() < 1e-4
    runner.close()
