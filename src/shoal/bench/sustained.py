"""A load that lasts: tokens a second over time, when the machine slowed down, and what was done until then."""

from __future__ import annotations

import statistics
from collections import Counter

from shoal.bench.timeline import RunTimes

_LOOK_S = 5  # seconds that are taken together to tell a slower machine from one slow second
_SLOWER = 0.9  # of the rate of the first seconds: below that for so long it counts as throttled


class SustainedLoad:
    """Bursts one after another, put together into one timeline."""

    def __init__(self) -> None:
        self._at: Counter[int] = Counter()  # tokens by second
        self._ends: list[float] = []  # when each request had its last token
        self._tokens = 0
        self._wall_s = 0.0
        self._joules = 0.0
        self._counted = True
        self._peak: int | None = None

    def add(self, begin_s: float, burst: RunTimes) -> None:
        """A burst that began so many seconds after the first one."""
        for trace in burst.traces:
            self._at.update(int(begin_s + at) for at in trace.times)
            self._tokens += len(trace.times)
            if trace.times:
                self._ends.append(begin_s + trace.times[-1])
        self._wall_s = begin_s + burst.wall_s
        self._counted = self._counted and burst.joules is not None
        self._joules += burst.joules or 0.0
        if burst.peak_bytes is not None:
            self._peak = max(self._peak or 0, burst.peak_bytes)

    def rates(self) -> list[float]:
        """Tokens a second, by whole second; the last, broken one is left out."""
        return [float(self._at[second]) for second in range(int(self._wall_s))]

    def throttled_at(self) -> int | None:
        """The second from which five together fall below nine tenths of the first ones; None when none do."""
        means = [statistics.fmean(self.rates()[i : i + _LOOK_S]) for i in range(len(self.rates()) - _LOOK_S + 1)]
        return next((i for i, mean in enumerate(means) if mean < _SLOWER * means[0]), None)

    def metrics(self) -> dict[str, float]:
        """`requests` answered, `requests_unthrottled` until it slowed down, `throttled_after_s`, rates, energy.

        `kept_rate` is the rate of the last quarter over that of the first seconds: 1 where nothing slowed down.
        """
        rates, slow = self.rates(), self.throttled_at()
        until = self._wall_s if slow is None else slow
        found = {
            "wall_s": self._wall_s,
            "tokens_per_s": self._tokens / self._wall_s,
            "requests": float(len(self._ends)),
            "requests_unthrottled": float(len([at for at in self._ends if at <= until])),
        }
        if slow is not None:
            found["throttled_after_s"] = float(slow)
        if len(rates) >= 2 * _LOOK_S and any(rates[:_LOOK_S]):
            found["kept_rate"] = statistics.fmean(rates[-len(rates) // 4 :]) / statistics.fmean(rates[:_LOOK_S])
        if self._counted and self._ends:
            found |= {"joules": self._joules, "joules_per_answer": self._joules / len(self._ends)}
        if self._peak is not None:
            found["peak_bytes"] = float(self._peak)
        return found
