"""Two engines side by side: latency, success and agreement, and whether one is worse by more than it may be."""

from __future__ import annotations

import difflib
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.agents.rollout.plan import RolloutPlan
from shoal.types import Result

_WINDOW = 500  # the latest requests that count
_WORDS = 400  # of an answer that are compared

Judge = Callable[[Result, Result], float]
"""How far two answers to one request agree: 0 (not at all) to 1 (the same), the stable engine's first."""


def similarity(stable: Result, candidate: Result) -> float:
    """The share of words that both answers have in the same order; 1.0 for equal ones."""
    return same_words(stable.text, candidate.text)


def same_words(first: str, second: str) -> float:
    """The share of words that two texts have in the same order; 1.0 for equal ones."""
    words = first.split()[:_WORDS], second.split()[:_WORDS]
    if words[0] == words[1]:
        return 1.0
    return difflib.SequenceMatcher(None, *words, autojunk=False).ratio()


class Tally:
    """What one engine has shown lately: seconds of requests that went well, and how many did."""

    def __init__(self) -> None:
        self.requests = 0
        self._ended: deque[bool] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, ok: bool, seconds: float) -> None:
        """One request has ended."""
        self.requests += 1
        self._ended.append(ok)
        if ok:
            self._seconds.append(seconds)

    @property
    def ended(self) -> int:
        """How many requests count."""
        return len(self._ended)

    @property
    def timed(self) -> int:
        """How many latencies count."""
        return len(self._seconds)

    @property
    def success(self) -> float | None:
        """The share that went well; None before the first."""
        return sum(self._ended) / len(self._ended) if self._ended else None

    @property
    def median_s(self) -> float | None:
        """The median latency in seconds; None before the first success."""
        return statistics.median(self._seconds) if self._seconds else None

    def describe(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        median = self.median_s
        median_ms = None if median is None else round(median * 1e3, 3)
        return {"requests": self.requests, "success": self.success, "median_ms": median_ms}


class TrialComparison:
    """The tallies of a stable engine and a candidate, and what the plan says to them."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan = plan
        self.stable = Tally()
        self.candidate = Tally()
        self.agreements: deque[float] = deque(maxlen=_WINDOW)

    @property
    def agreement(self) -> float | None:
        """How far answers agreed on average; None before the first comparison."""
        return statistics.fmean(self.agreements) if self.agreements else None

    def worse(self) -> str | None:
        """Why the candidate is worse by more than the plan's margin, or None while it is not or too little is known."""
        plan, least = self.plan, self.plan.min_samples
        if min(self.stable.ended, self.candidate.ended) >= least:
            ours, theirs = self.stable.success or 0.0, self.candidate.success or 0.0
            if theirs < ours - plan.max_failures:
                return f"{theirs:.1%} succeed, of the stable engine's {ours:.1%}; margin {plan.max_failures:.1%}"
        if min(self.stable.timed, self.candidate.timed) >= least:
            before, now = self.stable.median_s or 0.0, self.candidate.median_s or 0.0
            if now > before * (1.0 + plan.max_slowdown):
                return f"median {now * 1e3:.1f} ms, stable {before * 1e3:.1f} ms; margin {plan.max_slowdown:.0%}"
        agreement = self.agreement
        if plan.min_agreement is None or agreement is None or len(self.agreements) < least:
            return None
        low = agreement < plan.min_agreement
        return f"answers agree by {agreement:.2f}; at least {plan.min_agreement:.2f} is asked" if low else None

    def describe(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        agreement = self.agreement
        return {
            "stable": self.stable.describe(),
            "candidate": self.candidate.describe(),
            "agreement": None if agreement is None else round(agreement, 4),
            "compared": len(self.agreements),
        }
