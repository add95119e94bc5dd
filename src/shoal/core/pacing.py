"""What steps cost, as measured: how many prompt tokens one may take, and what more rows would cost."""

from __future__ import annotations

import math
from itertools import pairwise

_START = 32  # prompt tokens beside decodes while nothing is known of this machine
_LEAST = 8  # a step always moves prompts on by this much, or a bound too small for the machine would stop them
_SHARE = 0.85  # of the stall bound that a step is planned to take
_KNOTS = (*range(1, 33), 40, 48, 56, 64, 80, 96, 128, 256, 512, 1024)  # rows; few rows cost in jumps, each its own
_EAGER = 16  # steps after which numbers of rows other than the last are looked at this seldom


def _shape(rows: int) -> float:
    """What a step of so many rows costs beside one of a single row, before anything was measured.

    Rather too little: what looks cheap is tried once and then known, what looks dear is never tried.
    """
    return 1 + 0.1 * (rows - 1)


def _places() -> list[tuple[int, float]]:
    """Between which of the knots a number of rows is: the lower one, and how far from it towards the next."""
    places = [(0, 0.0)]
    for at, (low, high) in enumerate(pairwise(_KNOTS)):
        places += [(at, (rows - low) / (high - low)) for rows in range(low, high)]
    return [*places, (len(_KNOTS) - 2, 1.0)]


_PLACES = _places()
_SHAPES = [_shape(knot) for knot in _KNOTS]


class StepTimes:
    """The time of a step that only decodes, by its rows, in ms: a level, times what so many rows cost beside others.

    What makes all steps dearer (a longer context, sampling in place of the arg-max) moves the level, so that numbers of
    rows that were measured at different times stay comparable. Numbers of rows not seen are guessed from those that
    were. One that was not seen for long drifts towards such a guess, so that one slow step does not keep its number of
    rows from being tried again for ever.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._costs = list(_SHAPES)
        self._seen = [0] * len(_KNOTS)
        self._steps = 0
        self._most = 1  # rows of the widest step
        self._least: dict[int, tuple[int, float]] = {}  # by rows: `least_chance`, and after how many steps it was so

    def __call__(self, rows: int) -> float:
        """What a step of so many rows takes."""
        at, part = _PLACES[rows] if rows < len(_PLACES) else _PLACES[-1]
        low = self._costs[at]
        return self._level * (low + part * (self._costs[at + 1] - low))

    def rows_within(self, ms: float) -> int:
        """The most rows that cannot take longer: beyond those seen, each may cost as much as one of those."""
        return int(self._most * ms / self(self._most))

    def least_chance(self, rows: int, gain: float) -> float:
        """How likely drafted tokens must be to count so that a step of `rows` with some of them can gain so much.

        A bound, looked at anew every `_EAGER` steps: n tokens, none more likely than this, make `rows` sequences that
        get on in proportion at most 1 + n * chance / rows times as fast. Infinite before a step was measured.
        """
        step, least = self._least.get(rows, (-_EAGER, math.inf))
        if self._steps - step >= min(_EAGER, step + 1) and self._steps:
            plain = self(rows) / self._level
            least = (gain * self(rows + 1) / self(rows) - 1) * rows
            for knot, cost in zip(_KNOTS, self._costs, strict=True):  # between them it only rises or only falls
                if knot > rows:
                    least = min(least, (gain * cost / plain - 1) * rows / (knot - rows))
            self._least[rows] = self._steps, least
        return least

    def observe(self, rows: int, ms: float) -> None:
        """Learn from one step."""
        ms = max(ms, 1e-3)
        at, part = _PLACES[min(rows, len(_PLACES) - 1)]
        at += part >= 0.5
        if not self._steps:
            self._level = ms / self._costs[at]
        off = (
            min(max(ms / (self._level * self._costs[at]), 0.5), 2.0) - 1
        )  # one that was held up is no news of its rows
        seen = self._seen[at]
        self._level *= 1 + 0.3 * seen / (seen + 2) * off
        self._costs[at] *= 1 + max(0.04, 0.7 / (1 + seen)) * off
        self._seen[at] += 1
        self._steps += 1
        self._most = max(self._most, rows)
        if self._steps < _EAGER or self._steps % _EAGER == 0:
            self._guess(at)

    def _guess(self, now: int) -> None:
        """Numbers of rows that were never seen: between those around them, or as much more than the next one below.

        The others come a little nearer to what would be guessed from the one seen `now`.
        """
        costs, seen = self._costs, self._seen
        above = [knot for knot, count in enumerate(seen) if count]  # those seen, from the one at hand on
        below, at = -1, 0
        for knot, shape in enumerate(_SHAPES):
            if seen[knot]:
                below, at = knot, at + 1
                if knot != now:
                    costs[knot] += 0.03 * (costs[now] * shape / _SHAPES[now] - costs[knot])
            elif below >= 0 and at < len(above):
                next_seen = above[at]
                part = (_KNOTS[knot] - _KNOTS[below]) / (_KNOTS[next_seen] - _KNOTS[below])
                costs[knot] = costs[below] + part * (costs[next_seen] - costs[below])
            else:
                near = below if below >= 0 else above[0]
                costs[knot] = costs[near] * shape / _SHAPES[near]


class Pacer:
    """Predicts the time of a mixed step as the time of its decodes plus a price per prompt token.

    Both are running means of measured steps; the price follows rises at once and falls slowly, since a step that
    comes out too long breaks a promise and one that is too short only costs a little throughput.
    """

    def __init__(self, max_stall_ms: float) -> None:
        self.max_stall_ms = max_stall_ms
        self.decode_ms: float | None = None
        self.token_ms: float | None = None
        self._times = StepTimes(), StepTimes()

    def times(self, *, greedy: bool) -> StepTimes:
        """What steps without prompts take: where all rows give their arg-max, or where some are sampled from."""
        return self._times[greedy]

    @property
    def most_ms(self) -> float:
        """The longest that a step is planned to take while streams run."""
        return _SHARE * self.max_stall_ms

    def prompt_budget(self, limit: int) -> int:
        """The most prompt tokens beside running decodes so that the step stays within the stall bound."""
        if self.token_ms is None:
            return min(limit, _START)
        room = self.most_ms - (self.decode_ms or 0.0)
        return max(min(limit, _LEAST), min(limit, int(room / self.token_ms)))

    def observe(self, decodes: int, prompt_tokens: int, ms: float, drafted: int = 0, *, greedy: bool = True) -> None:
        """Learn from one step that fed the last token of `decodes` sequences, and `drafted` tokens behind those."""
        if prompt_tokens == 0:
            if decodes:
                times = self.times(greedy=greedy)
                times.observe(decodes + drafted, ms)
                plain = ms * times(decodes) / times(decodes + drafted)
                self.decode_ms = plain if self.decode_ms is None else 0.8 * self.decode_ms + 0.2 * plain
            return
        if prompt_tokens < _LEAST:
            return
        base = (self.decode_ms or 0.0) if decodes else 0.0
        price = max(ms - base, 0.1 * ms) / prompt_tokens
        if self.token_ms is None:
            self.token_ms = price
        else:
            weight = 0.5 if price > self.token_ms else 0.1
            self.token_ms += weight * (price - self.token_ms)
