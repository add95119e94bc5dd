"""What drafts of the best lengths would have given: the cost of passes by their rows, and what each draft was worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from shoal.core.draft import Drafter
from shoal.core.request import RequestSpec
from shoal.core.sequence import Sequence as Tokens
from shoal.engine.engine import Engine
from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want, WindowId, windows_in_turn
from shoal.types import SamplingParams

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the steps that are timed
FIXED = (0, 1, 2, 3, 5, 7, 11, 15)  # lengths that are held against ours
_CONTEXT = 512  # tokens before the rows of a timed step


def step_costs(engine: Engine, runner: Runner, streams: Sequence[int]) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass of so many rows, all arg-max, by streams: straight from its runner, the engine at rest."""
    engine.suspend(drop_kv=True)
    try:
        return engine.call(lambda: {str(n): _costs(runner, n) for n in streams})
    finally:
        engine.resume()


def _costs(runner: Runner, streams: int) -> dict[int, float]:
    size = runner.spec.block_size
    each = -(-(_CONTEXT + 64) // size)
    tables = [tuple(range(i * each, (i + 1) * each)) for i in range(streams)]
    ids = [-1 - i for i in range(streams)]

    def windows(i: int, start: int, tokens: int) -> tuple[WindowId, ...]:
        return windows_in_turn(runner.spec, start, tokens, i, streams)

    for i, (table, seq_id) in enumerate(zip(tables, ids, strict=True)):
        seen = windows(i, 0, _CONTEXT)
        context = ScheduledSequence(seq_id, (5,) * _CONTEXT, 0, table, Want.NOTHING, windows=seen)
        runner.execute(StepPlan(0, (context,)))
    found = {}
    for rows in _ROWS:
        if rows < streams:
            continue
        counts = [rows // streams + (i < rows % streams) for i in range(streams)]
        plan = StepPlan(
            0,
            tuple(
                ScheduledSequence(s, (5,) * n, _CONTEXT, t, Want.ARGMAX, n, rows=n, windows=windows(i, _CONTEXT, n))
                for i, (s, n, t) in enumerate(zip(ids, counts, tables, strict=True))
            ),
        )
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            runner.execute(plan)
            times.append((time.perf_counter() - begin) * 1e3)
        found[rows] = statistics.median(times)
    runner.release(ids)
    return found


def _cost_of(costs: Mapping[int, float], rows: int) -> float:
    """A straight line between the measured numbers of rows."""
    known = sorted(costs)
    if rows in costs:
        return costs[rows]
    if rows > known[-1]:
        return costs[known[-1]] * rows / known[-1]
    above = next(i for i, n in enumerate(known) if n > rows)
    low, high = known[above - 1], known[above]
    return costs[low] + (costs[high] - costs[low]) * (rows - low) / (high - low)


def proposals(prompt: Sequence[int], output: Sequence[int]) -> list[tuple[int, int]]:
    """At each output token but the first: how many tokens a draft there could have, and how many of those are right."""
    drafter, found = Drafter(max(FIXED)), []
    spec = RequestSpec(prompt=tuple(prompt), sampling=SamplingParams(max_tokens=len(output) + 1))
    seq = Tokens(1, spec)
    for at, token in enumerate(output[:-1]):
        seq.tokens.append(token)
        drafter.follow(seq)
        draft = seq.draft
        assert draft is not None
        coming = draft.source.tokens[draft.at : draft.at + FIXED[-1]] if draft.at >= 0 else ()
        right = 0
        while right < len(coming) and at + 1 + right < len(output) and coming[right] == output[at + 1 + right]:
            right += 1
        found.append((len(coming), right))
    return found


def fixed_length_ms(each: Sequence[Sequence[tuple[int, int]]], length: int, costs: Mapping[int, float]) -> float:
    """Time of all passes when every stream drafts `length` tokens wherever its drafter has so many."""
    places, total = [0] * len(each), 0.0
    while any(at < len(found) for at, found in zip(places, each, strict=True)):
        rows = 0
        for i, found in enumerate(each):
            if places[i] < len(found):
                there, right = found[places[i]]
                rows += 1 + min(length, there)
                places[i] += 1 + min(length, right)
        total += _cost_of(costs, rows)
    return total


def hindsight_ms(found: Sequence[tuple[int, int]], costs: Mapping[int, float]) -> float:
    """Time of the passes of one stream when each draft is as long as is best for the whole output: no wrong token."""
    best = [0.0] * (len(found) + 1)
    for at in range(len(found) - 1, -1, -1):
        lengths = range(min(found[at][1], len(found) - at - 1) + 1)
        best[at] = min(_cost_of(costs, 1 + n) + best[at + 1 + n] for n in lengths)
    return best[0]
