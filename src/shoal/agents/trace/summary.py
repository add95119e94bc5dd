"""A trace in numbers: what was shared, how long calls took and waited, what they held; of all and of each agent."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.agents.trace.timeline import Record
from shoal.checks import is_number


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and maximum of some milliseconds; zeros of none."""

    mean: float = 0.0
    median: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these values."""
        return cls(statistics.fmean(values), statistics.median(values), max(values)) if values else cls()


@dataclass(frozen=True, slots=True)
class CallSummary:
    """Some calls of a trace.

    hit_rate: share of their prompt tokens that were not computed. kv_peak_mb: the most KV that calls had added at the
    same time; process_mb: the most the process held. ok: how many went well, invalid: how many wrote what does not fit
    their schema. per_minute: of the time from the first one's start to the last one's end.
    """

    calls: int
    ok: int
    invalid: int
    hit_rate: float
    generated_tokens: int
    latency_ms: Spread
    queue_ms: Spread
    ttft_ms: Spread
    kv_peak_mb: float
    process_mb: float
    per_minute: float

    @classmethod
    def of(cls, attempts: Sequence[Record]) -> CallSummary:
        """Of the attempts of one trace."""
        prompt, cached = _sum(attempts, "prompt_tokens"), _sum(attempts, "prefix_tokens")
        spans = [(end - _number(a, "latency_ms") / 1e3, end) for a in attempts if (end := _number(a, "time"))]
        seconds = max(e for _, e in spans) - min(b for b, _ in spans) if spans else 0.0
        outcomes = [a.get("outcome") for a in attempts]
        return cls(
            calls=len(attempts),
            ok=outcomes.count("ok"),
            invalid=outcomes.count("invalid"),
            hit_rate=cached / prompt if prompt else 0.0,
            generated_tokens=int(_sum(attempts, "generated_tokens")),
            latency_ms=Spread.of(_values(attempts, "latency_ms")),
            queue_ms=Spread.of(_values(attempts, "queue_ms")),
            ttft_ms=Spread.of(_values(attempts, "ttft_ms")),
            kv_peak_mb=_peak([(b, e, _number(a, "kv_mb")) for (b, e), a in zip(spans, attempts, strict=False)]),
            process_mb=max(_values(attempts, "process_mb"), default=0.0),
            per_minute=60 * len(attempts) / seconds if seconds > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A whole trace: its calls, those of each agent, and its graphs (whole ones a minute, median seconds of one)."""

    calls: CallSummary
    agents: dict[str, CallSummary]
    graphs: int
    graphs_per_minute: float
    graph_s: float


def summarise(records: Iterable[Record]) -> TraceSummary:
    """The numbers of a trace; of one without calls zeros."""
    all_records = list(records)
    attempts = [record for record in all_records if record.get("kind") == "attempt"]
    names = list(dict.fromkeys(str(attempt.get("agent")) for attempt in attempts))
    by_agent = {name: [a for a in attempts if str(a.get("agent")) == name] for name in names}
    ended = [r for r in all_records if r.get("kind") == "graph" and is_number(r.get("wall_s"))]
    walls = [_number(record, "wall_s") for record in ended]
    times = [(_number(r, "time") - wall, _number(r, "time")) for r, wall in zip(ended, walls, strict=True)]
    seconds = max(e for _, e in times) - min(b for b, _ in times) if times else 0.0
    return TraceSummary(
        CallSummary.of(attempts),
        {name: CallSummary.of(some) for name, some in by_agent.items()},
        len(ended),
        60 * len(ended) / seconds if seconds > 0 else 0.0,
        statistics.median(walls) if walls else 0.0,
    )


def _number(record: Record, name: str) -> float:
    value: Any = record.get(name)
    return float(value) if is_number(value) else 0.0


def _values(records: Sequence[Record], name: str) -> list[float]:
    """The numbers that are known; a remote engine does not tell all."""
    return [_number(record, name) for record in records if is_number(record.get(name))]


def _sum(records: Sequence[Record], name: str) -> float:
    return sum(_values(records, name))


def _peak(held: Sequence[tuple[float, float, float]]) -> float:
    """The most that is held at once of (from, until, amount)."""
    changes = sorted([(begin, amount) for begin, _, amount in held] + [(end, -amount) for _, end, amount in held])
    most = now = 0.0
    for _, change in changes:
        now += change
        most = max(most, now)
    return round(most, 6)
