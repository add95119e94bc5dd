"""What moved between two results beyond noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.bench.results import Figure, Results

_LEAST = 0.03  # medians closer than this are the same
_RUNS = 2  # one run has no range
_MORE_IS_BETTER = (
    "tokens_per_s",
    "hit_rate",
    "valid",
    "per_minute",
    "requests",
    "unthrottled",
    "throttled_after_s",
    "kept_rate",
)
_NEITHER = ("cached_tokens", "computed_tokens", "steps")


@dataclass(frozen=True, slots=True)
class Move:
    """One figure that moved: by what share of its old median, and whether that is for the better (None: neither)."""

    scenario: str
    level: str
    contender: str
    metric: str
    before: Figure
    after: Figure

    @property
    def change(self) -> float:
        """Change of the median over the old one."""
        return self.after.median / self.before.median - 1 if self.before.median else float("inf")

    @property
    def better(self) -> bool | None:
        """Whether it is an improvement; None for counts, where neither way is better."""
        if self.metric in _NEITHER:
            return None
        return (self.change > 0) == self.metric.endswith(_MORE_IS_BETTER)


def moves(before: Results, after: Results) -> Iterator[Move]:
    """Figures of both whose ranges do not overlap and whose medians differ by more than 3 %, in the order of `before`.

    The range is that of the runs that count, the extremes dropped where there were five; figures of one run are left
    out.
    """
    new = dict(after.figures())
    for place, old in before.figures():
        now = new.get(place)
        if now is None or min(old.n, now.n) < _RUNS:
            continue
        apart = now.low > old.high or now.high < old.low
        moved = Move(*place, old, now)
        if apart and abs(moved.change) > _LEAST:
            yield moved


def same_machine(before: Results, after: Results) -> list[str]:
    """What differs between the machines, models or threads of two results: then only ratios can be compared."""
    a, b = before.document, after.document
    facts = [("machine", "cpu"), ("machine", "cores"), ("machine", "threads"), ("model", "sha256")]
    return [f"{part} {name}" for part, name in facts if a[part].get(name) != b[part].get(name)]
