"""What steps cost, as measured: how many prompt tokens one may take, and what more rows would cost."""

from __future__ import annotations

from bisect import bisect_right

_START = 32  # prompt tokens beside decodes while nothing is known of this machine
_LEAST = 8  # a step always moves prompts on by this much, or a bound too small for the machine would stop them
_SHARE = 0.85  # of the stall bound that a step is planned to take
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)  # rows


def _shape(rows: int) -> float:
    """What a step of so many rows costs beside one of a single row, before anything was measured."""
    return 1 + 0.1 * min(rows - 1, 7) + 0.25 * max(rows - 8, 0)


class StepTimes:
    """The time of a step that only decodes, by its rows, in ms: between measured numbers of rows a straight line.

    A number of rows that was not seen is guessed from those that were. One that was not seen for long drifts towards
    that guess, so that one slow step does not keep its number of rows from being tried again for ever.
    """

    def __init__(self) -> None:
        self._ms = [0.0] * len(_KNOTS)
        self._seen = [0.0] * len(_KNOTS)

    @property
    def known(self) -> bool:
        """True when a step was measured."""
        return self._ms[0] > 0

    def __call__(self, rows: int) -> float:
        """What a step of so many rows takes."""
        at, part = self._place(rows)
        return self._ms[at] + part * (self._ms[at + 1] - self._ms[at])

    @staticmethod
    def _place(rows: int) -> tuple[int, float]:
        at = min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1) - 1
        return at, min((rows - _KNOTS[at]) / (_KNOTS[at + 1] - _KNOTS[at]), 1.0)

    def observe(self, rows: int, ms: float) -> None:
        """Learn from one step."""
        ms = max(ms, 1e-3)
        if not self.known:
            self._ms = [ms * _shape(knot) / _shape(rows) for knot in _KNOTS]
        at, part = self._place(rows)
        off = min(max(ms / self(rows), 0.5), 2.0) - 1  # a step that was held up is no news of its rows
        shares = {at: 1 - part, at + 1: part}
        rate = max(0.15, 0.7 / (1 + sum(share * self._seen[k] for k, share in shares.items())))
        for k, knot in enumerate(_KNOTS):
            share = shares.get(k, 0.0)
            if share:
                self._ms[k] *= 1 + rate * share * off
                self._seen[k] += share
            elif not self._seen[k]:
                self._ms[k] *= 1 + rate * off
            else:
                guess = ms * _shape(knot) / _shape(rows)
                self._ms[k] *= 1 + 0.03 * off
                self._ms[k] += 0.002 * (guess - self._ms[k])


class Pacer:
    """Predicts the time of a mixed step as the time of its decodes plus a price per prompt token.

    Both are running means of measured steps; the price follows rises at once and falls slowly, since a step that
    comes out too long breaks a promise and one that is too short only costs a little throughput. `times` is what
    steps without prompts take.
    """

    def __init__(self, max_stall_ms: float) -> None:
        self.max_stall_ms = max_stall_ms
        self.decode_ms: float | None = None
        self.token_ms: float | None = None
        self.times = StepTimes()

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

    def observe(self, decodes: int, prompt_tokens: int, ms: float, drafted: int = 0) -> None:
        """Learn from one step that fed the last token of `decodes` sequences, and `drafted` tokens behind those."""
        if prompt_tokens == 0:
            if decodes:
                self.times.observe(decodes + drafted, ms)
                plain = ms * self.times(decodes) / self.times(decodes + drafted)
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
