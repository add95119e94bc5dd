"""The small form of `equality.py`: on the toy model always, on the real one where it is in the store."""

from __future__ import annotations

import random

import pytest

from shoal.core.pacing import Pacer
from shoal.errors import ModelError
from shoal.runners.base import Runner
from shoal.runners.fake import ByteTokenizer, FakeRunner
from tests.parity.equality import run
from tests.support.runners import openvino_runner


@pytest.mark.parametrize("splits", [False, True])
def test_random_schedules_on_the_toy_model(splits: bool) -> None:
    outcome = run(FakeRunner(num_blocks=160, vocab_size=5000, splits_decode=splits), schedules=60, requests=12)
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
    for what in ("hit", "preemption", "cancel", "fork", "brought back", "drafted", "accepted"):
        assert outcome.seen[what] > 20, f"hardly any {what}"
    assert outcome.seen["drafted"] > outcome.seen["accepted"], "no draft was wrong"


@pytest.mark.parametrize(("window", "windows"), [(40, 8), (33, 11)])
def test_random_schedules_with_few_window_blocks(window: int, windows: int) -> None:
    runner = FakeRunner(num_blocks=160, vocab_size=5000, window=window, num_windows=windows)
    outcome = run(runner, schedules=30, requests=12, seed=windows)
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
    for what in ("hit", "preemption", "fork", "brought back", "accepted", "window blocks lost"):
        assert outcome.seen[what] > 10, f"hardly any {what}"


def test_random_schedules_with_grammars_change_nothing() -> None:
    outcome = run(FakeRunner(num_blocks=160), schedules=40, requests=16, seed=5, codec=ByteTokenizer())
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
    assert outcome.seen["accepted"] > 20


def test_random_schedules_with_recurrent_state_and_steps_that_cost_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets jump with what steps cost, so that a follower may come when its leader's chunk is planned already."""
    rng, observe = random.Random(0), Pacer.observe

    def any_cost(
        self: Pacer, decodes: int, prompt_tokens: int, _: float, drafted: int = 0, *, greedy: bool = True
    ) -> None:
        observe(self, decodes, prompt_tokens, rng.choice([0.5, 5.0, 40.0, 300.0]), drafted, greedy=greedy)

    monkeypatch.setattr(Pacer, "observe", any_cost)
    runner = FakeRunner(num_blocks=160, vocab_size=288, checkpoints=16, context_length=512, max_chain=16)
    outcome = run(runner, schedules=60, requests=16, seed=2)
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)


def test_random_schedules_on_the_real_model() -> None:
    try:
        runner: Runner = openvino_runner(kv_memory="48MiB")
    except ModelError as error:
        pytest.skip(f"no model: {error}")
    if not runner.spec.exact:
        runner.close()
        pytest.skip("this CPU's kernels make no such promise")
    outcome = run(runner, schedules=12, requests=8, seed=3)
    runner.close()
    assert outcome.rows > 300
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
