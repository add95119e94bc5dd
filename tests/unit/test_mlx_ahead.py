"""What the MLX runner starts ahead is used whenever it is what the next step wants, whoever else comes or goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from tests.support.mlx_tiny import tiny_runner

pytest.importorskip("mlx.core")

from shoal.runners.mlx.rows import Rows

PROMPTS = {1: (5, 6, 7, 8), 2: tuple(range(20, 31)), 3: (9, 8, 7), 4: (40, 41, 42, 43)}


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """Four sequences have four blocks each."""
    made = tiny_runner(tmp_path / "m", "llama")
    yield made
    made.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass over single tokens had, from now on."""
    seen: list[int] = []
    step = Rows.step

    def counted(self: Rows, model: Any, fed: Any) -> Any:
        seen.append(len(self))
        return step(self, model, fed)

    monkeypatch.setattr(Rows, "step", counted)
    return seen


class Run:
    """Feeds sequences and keeps what each has written."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.texts = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
        self.done = dict.fromkeys(PROMPTS, 0)
        self.number = 0

    def feed(
        self, *seq_ids: int, chunk: tuple[int, int] | None = None, chain: int = 1, want: Want = Want.ARGMAX
    ) -> Any:
        """A step: the rest of what these have, for output; of `chunk` (sequence, tokens) only some of its prompt."""
        self.number += 1
        items = [self._item(seq_id, len(self.texts[seq_id]), want) for seq_id in seq_ids]
        if chunk is not None:
            items.append(self._item(chunk[0], self.done[chunk[0]] + chunk[1], Want.NOTHING))
        output = self.runner.execute(StepPlan(self.number, tuple(items), (), chain))
        for item in items:
            self.done[item.seq_id] = item.start + len(item.tokens)
        for seq_id, written in output.argmax.items():
            self.texts[seq_id] += written
            self.done[seq_id] += chain - 1
        return output

    def _item(self, seq_id: int, end: int, want: Want) -> ScheduledSequence:
        begin = self.done[seq_id]
        table = tuple(range(4 * seq_id, 4 * seq_id + 4))
        return ScheduledSequence(seq_id, tuple(self.texts[seq_id][begin:end]), begin, table, want)

    def written(self) -> dict[int, list[int]]:
        return {seq_id: text[len(PROMPTS[seq_id]) :] for seq_id, text in self.texts.items()}


def alone(runner: Runner, counts: Sequence[int]) -> dict[int, list[int]]:
    """What each sequence writes by itself, so many tokens."""
    run = Run(runner)
    for seq_id, count in zip(PROMPTS, counts, strict=True):
        for _ in range(count):
            run.feed(seq_id)
        runner.release([seq_id])
    return run.written()


def test_a_prompt_that_is_computed_beside_it_leaves_the_step_ahead_as_it_is(runner: Runner, steps: list[int]) -> None:
    run = Run(runner)
    run.feed(1)
    assert steps == [1, 1]
    for _ in range(3):
        run.feed(1, chunk=(2, 3))
    assert steps == [1] * 5, "one a step, started ahead"
    run.feed(1, 2)
    assert steps == [1] * 6 + [2], "who joins takes a step alone, then one with all"
    runner.release([1, 2, 3, 4])
    assert run.written() == alone(runner, (5, 1, 0, 0))


@pytest.mark.parametrize("chain", [1, 3])
def test_whoever_joins_the_step_ahead_is_used(runner: Runner, steps: list[int], chain: int) -> None:
    """Rows of one length and of others, several at once, and one that leaves in the same step."""
    run = Run(runner)
    run.feed(1)
    run.feed(1, chain=chain)
    run.feed(1, 4)
    run.feed(4, 1, chain=chain)
    runner.release([4])
    run.feed(1, 2, 3)
    run.feed(1, 2, 3, chain=chain)
    ran = [1, 1, *[1] * chain, 1, 2, *[2] * chain, 2, 3, *[3] * chain]
    assert steps == ran
    runner.release([1, 2, 3])
    assert run.written() == alone(runner, (3 + 3 * chain, 1 + chain, 1 + chain, 1 + chain))


@pytest.mark.parametrize("change", ["logits", "another token", "one waits"])
def test_what_is_not_wanted_is_taken_back(runner: Runner, steps: list[int], change: str) -> None:
    run = Run(runner)
    run.feed(1, 2)
    changes: dict[str, Callable[[], Any]] = {
        "logits": lambda: run.feed(1, 2, want=Want.LOGITS),
        "another token": lambda: run.texts[1].__setitem__(-1, 99),
        "one waits": lambda: run.feed(2),
    }
    changes[change]()
    if change != "logits":
        run.feed(1, 2)
        expected = Run(runner)
        expected.texts = {seq_id: run.texts[seq_id][: run.done[seq_id]] for seq_id in (1, 2)}
        runner.release([1, 2])
        expected.feed(1, 2)
        assert expected.texts == {seq_id: run.texts[seq_id] for seq_id in (1, 2)}
    assert steps[2] == (1 if change == "one waits" else 2), "not the step ahead, but a new one"
