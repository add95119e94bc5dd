"""Greedy decoding one step ahead: the same tokens as step by step, also when sequences end. Needs the extra `cuda`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.cuda.runners import runner, seq  # isort: skip - first, it tells Triton where to run

from shoal.runners.cuda.runner import CUDARunner
from shoal.runners.plan import StepOutput, StepPlan, Want
from tests.cuda.tiny import prompts


def written(made: CUDARunner, ends: dict[int, int]) -> dict[int, list[int]]:
    """What three sequences write of which each ends after so many tokens; the second joins one step later."""
    tokens = {i: list(p) for i, p in enumerate(prompts(3, [5, 9, 3], 70))}
    tables = {i: range(2 * i, 2 * i + 2) for i in tokens}
    out: dict[int, list[int]] = {i: [] for i in tokens}
    for step in range(max(ends.values())):
        live = [i for i in tokens if len(out[i]) < ends[i] and (i != 1 or step)]
        items = []
        for i in live:
            fed = tuple(tokens[i] if not out[i] else tokens[i][-1:])
            items.append(seq(i, fed, len(tokens[i]) - len(fed), tables[i], Want.ARGMAX))
        given = made.execute(StepPlan(step, tuple(items))).argmax
        for i in live:
            tokens[i] += given[i]
            out[i] += given[i]
        made.release([i for i in live if len(out[i]) == ends[i]])
    return out


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
def test_a_step_ahead_counts_for_those_who_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {0: 6, 1: 9, 2: 12}
    _, plain = runner()
    plain._runs_ahead = False
    _, made = runner()
    made._runs_ahead = True
    taken: list[str] = []

    def counted(name: str, call: Callable[..., StepOutput], *given: object) -> StepOutput:
        taken.append(name)
        return call(*given)

    for name in ("_take_ahead", "_take_part", "_execute"):
        monkeypatch.setattr(made, name, partial(counted, name, getattr(made, name)))
    assert written(made, ends) == written(plain, ends)
    assert taken.count("_take_part") == 2, "one sequence ended, then another"
    assert taken.count("_execute") == 3, "the first prompts, the one that joined, and the first step without one"
    for each in (made, plain):
        each.close()


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
def test_a_step_ahead_counts_when_a_full_block_was_given_for_an_equal_one() -> None:
    _, made = runner()
    made._runs_ahead = True
    prompt = prompts(3, [32], 70)[0]
    for i, table in ((1, (0, 1)), (2, (2, 3))):
        out = made.execute(StepPlan(1, (seq(i, prompt, 0, range(table[0], table[1] + 1), Want.ARGMAX),)))
    token = out.argmax[2]
    expected = [made.execute(StepPlan(2, (seq(2, token, 32, range(2, 4), Want.ARGMAX),))).argmax[2]]
    assert made._ahead is not None
    item = seq(2, expected[0], 33, range(2, 4), Want.ARGMAX)
    moved = item._replace(block_table=(0, 3))
    assert made._ahead.is_plan(StepPlan(3, (moved,)))
    assert not made._ahead.is_plan(StepPlan(3, (item._replace(block_table=(2, 1)),))), "its KV would be elsewhere"
    expected.append(made.execute(StepPlan(3, (moved,))).argmax[2])
    expected.append(made.execute(StepPlan(4, (moved._replace(tokens=expected[-1], start=34),))).argmax[2])
    made._runs_ahead = False
    made._ahead = None
    plain = [made.execute(StepPlan(5, (seq(1, token, 32, range(2), Want.ARGMAX),))).argmax[1]]
    for at in (33, 34):
        plain.append(made.execute(StepPlan(6, (seq(1, plain[-1], at, range(2), Want.ARGMAX),))).argmax[1])
    assert plain == expected
    made.close()
