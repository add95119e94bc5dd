"""What drafts of other lengths would have given: the cost of passes by their rows, and what each draft was worth.

Two marks, both with the tokens that our drafter proposed at each place. *The best lengths*: how much of the end agrees
is all that tells a long draft from a short one, and for each such amount there is one length, the best for these very
texts. *Foresight*: every draft ends before its first wrong token, which no rule can know; it is a bound, not a mark to
reach.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.config import EngineConfig
from shoal.core.draft import BUCKET_OF, BUCKETS, FOR_EVER, Drafter
from shoal.core.pacing import Pacer
from shoal.core.request import RequestSpec
from shoal.core.sequence import Sequence as Tokens
from shoal.engine.engine import Engine
from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want, WindowId, windows_in_turn
from shoal.types import SamplingParams

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the steps that are timed
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 31, 47)  # of drafts, that are held against ours
_MOST_ROWS = 64  # of one pass
_MOST_MS = Pacer(EngineConfig().max_stall_ms).most_ms  # of a pass with drafts
_CONTEXT = 512  # tokens before the rows of a timed step


class WrittenText(NamedTuple):
    """A prompt and what a model wrote behind it, in tokens."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


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
    plans = {}
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
        plans[rows] = plan
    times: dict[int, list[float]] = {rows: [] for rows in plans}
    for _ in range(9):  # in turns: what slows the machine down for a while slows all of them
        for rows, plan in plans.items():
            begin = time.perf_counter()
            runner.execute(plan)
            times[rows].append((time.perf_counter() - begin) * 1e3)
    runner.release(ids)
    return {rows: statistics.median(ms) for rows, ms in times.items()}


class PassCost:
    """Milliseconds of a pass by its rows, of one number of streams: straight lines between those that were measured.

    Fewer rows than streams come when some have ended; they cost as in the table of one stream, to scale. A table that
    falls somewhere was measured on a busy machine: more rows never cost less here.
    """

    def __init__(self, tables: Mapping[str, Mapping[int, float]], streams: int) -> None:
        """`tables` is what `step_costs` gave, by streams and then rows."""
        known = {int(rows): ms for rows, ms in tables[str(streams)].items()}
        least = min(known)
        one = {int(rows): ms for rows, ms in tables.get("1", {}).items()}
        if least > 1 and one:
            scale = known[least] / _between(one, least)
            known.update({rows: ms * scale for rows, ms in one.items() if rows < least})
        most = 0.0
        for rows in sorted(known):
            most = known[rows] = max(most, known[rows])
        self._ms = [0.0, *(_between(known, rows) for rows in range(1, _MOST_ROWS + 1))]

    def __call__(self, rows: int) -> float:
        """What a pass of so many rows takes."""
        return self._ms[rows]


def _between(known: Mapping[int, float], rows: int) -> float:
    """A straight line between the numbers of rows that are known; beyond them each row costs the same."""
    low = max((n for n in known if n <= rows), default=min(known))
    high = min((n for n in known if n >= rows), default=low)
    if high <= low:
        return known[low] * max(rows / low, 1.0)
    return known[low] + (known[high] - known[low]) * (rows - low) / (high - low)


class Proposal(NamedTuple):
    """What could be drafted behind one output token: how many tokens, of them right, and the bucket of agreement."""

    there: int
    right: int
    bucket: int


def proposals(texts: Sequence[WrittenText]) -> list[list[Proposal]]:
    """Of streams side by side, a token each at a time: what could be drafted behind each output token but the last."""
    drafter, found = Drafter(_MOST_ROWS, patience=FOR_EVER), [list[Proposal]() for _ in texts]
    seqs = [
        Tokens(number, RequestSpec(prompt=text.prompt, sampling=SamplingParams(max_tokens=len(text.output) + 1)))
        for number, text in enumerate(texts)
    ]
    for at in range(max(len(text.output) for text in texts)):
        for seq, (_, output), proposed in zip(seqs, texts, found, strict=True):
            if at >= len(output):
                continue
            seq.tokens.append(output[at])
            drafter.follow(seq)
            if at == len(output) - 1:
                drafter.leave(seq)
                continue
            draft, coming = seq.draft, output[at + 1 : -1]  # the last one is written, and never fed
            assert draft is not None
            tokens = draft.source.tokens[draft.at : draft.at + _MOST_ROWS - 1][: len(coming)] if draft.at >= 0 else ()
            right = next((n for n, token in enumerate(tokens) if token != coming[n]), len(tokens))
            proposed.append(Proposal(len(tokens), right, BUCKET_OF[draft.length]))
    return found


Group = list[list[Proposal]]  # of streams side by side, one for each of their passes


def lengths_ms(groups: Iterable[Group], lengths: Sequence[int], cost: PassCost) -> float:
    """Time of all passes when each stream drafts what `lengths` says for its bucket, where its drafter has so much."""
    total = 0.0
    for group in groups:
        places = [0] * len(group)
        while live := [i for i, found in enumerate(group) if places[i] < len(found)]:
            here = [group[i][places[i]] for i in live]
            counts = [min(found.there, lengths[found.bucket]) for found in here]
            rows = len(live) + sum(counts)
            while rows > _MOST_ROWS or (rows > len(live) and cost(rows) > _MOST_MS):
                counts[counts.index(max(counts))] -= 1
                rows -= 1
            total += cost(rows)
            for i, found, count in zip(live, here, counts, strict=True):
                places[i] += 1 + min(count, found.right)
    return total


def best_lengths_ms(groups: Sequence[Group], cost: PassCost) -> tuple[float, float]:
    """Time with the best fixed length, and with the best length for each bucket: chosen afterwards, for these texts."""
    lengths = min(([n] * BUCKETS for n in _LENGTHS), key=lambda tried: lengths_ms(groups, tried, cost))
    fixed = best = lengths_ms(groups, lengths, cost)
    for bucket in (*reversed(range(BUCKETS)), *reversed(range(BUCKETS))):
        for length in _LENGTHS:
            tried = [*lengths[:bucket], length, *lengths[bucket + 1 :]]
            ms = lengths_ms(groups, tried, cost)
            if ms < best:
                best, lengths = ms, tried
    return fixed, best


def foresight_ms(group: Group, cost: PassCost) -> float:
    """Time when no token is drafted wrongly, in passes of so many rows at most as is best: a bound for every rule.

    Of one stream it is the least there is. Of several each pass takes tokens of those that have the most left.
    """
    if len(group) == 1:
        found = group[0]
        best = [0.0] * (len(found) + 1)
        for at in range(len(found) - 1, -1, -1):
            best[at] = min(cost(1 + n) + best[at + 1 + n] for n in range(found[at].right + 1))
        return best[0]
    return min(_right_ms(group, rows, cost) for rows in range(len(group), _MOST_ROWS + 1) if cost(rows) <= _MOST_MS)


def _right_ms(group: Group, most: int, cost: PassCost) -> float:
    places, total = [0] * len(group), 0.0
    while live := [i for i, found in enumerate(group) if places[i] < len(found)]:
        left = {i: len(group[i]) - places[i] - 1 for i in live}
        free = {i: group[i][places[i]].right for i in live}
        rows = len(live)
        while rows < most and (able := [i for i in live if free[i]]):
            i = max(able, key=left.__getitem__)
            left[i] -= 1
            free[i] -= 1
            rows += 1
        total += cost(rows)
        for i in live:
            places[i] = len(group[i]) - left[i]
    return total
