"""What one run of one system was, token by token, and every figure that follows from it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.workloads import Job


@dataclass(slots=True)
class TokenTimes:
    """One request: its output and when each token of it was there, in seconds since the run began."""

    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], now: float) -> None:
        """Take tokens that appeared together."""
        self.tokens += tokens
        self.times += [now] * len(tokens)


@dataclass(slots=True)
class RunTimes:
    """One run: a trace per request in the order of the jobs, wall time, and what else the system tells.

    `facts` may hold `computed_tokens`, `cached_tokens`, `steps`, `outside_ms` (time of a decode step outside the
    runner), `valid` (share of outputs that are valid JSON). `peak_bytes` is the most memory of the process, `joules`
    the energy of the machine where it can be read.
    """

    traces: list[TokenTimes]
    wall_s: float
    facts: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    joules: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For the pipe between worker and harness."""
        traces = [[t.arrival_s, t.tokens, t.times] for t in self.traces]
        return {
            "traces": traces,
            "wall_s": self.wall_s,
            "facts": self.facts,
            "peak_bytes": self.peak_bytes,
            "joules": self.joules,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunTimes:
        """The other end of the pipe."""
        traces = [TokenTimes(*trace) for trace in document["traces"]]
        facts, peak, joules = document["facts"], document["peak_bytes"], document["joules"]
        return cls(traces, document["wall_s"], dict(facts), peak, joules)


def metrics(jobs: Sequence[Job], timeline: RunTimes) -> dict[str, float]:
    """Figures of one run, by name; what cannot be said is left out.

    `wall_s`; `tokens_per_s` (all output over wall time); `ttft_p50_s`, `ttft_p95_s`; `itl_p50_s`, `itl_p95_s` and
    `worst_gap_s` between tokens of one request; `decode_tokens_per_s` (from the moment that every request has its first
    token to the last token); `prefill_tokens_per_s` (prompt tokens over the time to the last first token);
    `hit_rate` (share of prompt tokens not computed); `peak_bytes`, `joules`, and the system's own facts.
    """
    counted = [trace for job, trace in zip(jobs, timeline.traces, strict=True) if job.counted and trace.times]
    written = sum(len(trace.times) for trace in timeline.traces)
    found: dict[str, float] = {"wall_s": timeline.wall_s, "tokens_per_s": written / timeline.wall_s}
    if counted:
        ttft = [trace.times[0] - trace.arrival_s for trace in counted]
        found |= {"ttft_p50_s": quantile(ttft, 0.5), "ttft_p95_s": quantile(ttft, 0.95)}
        gaps = [b - a for trace in counted for a, b in zip(trace.times, trace.times[1:], strict=False)]
        if gaps:
            found |= {"itl_p50_s": quantile(gaps, 0.5), "itl_p95_s": quantile(gaps, 0.95), "worst_gap_s": max(gaps)}
        found |= _rates(jobs, counted)
    prompt = sum(len(job.prompt) for job in jobs)
    facts = dict(timeline.facts)
    if "cached_tokens" in facts:
        found["hit_rate"] = facts["cached_tokens"] / prompt
    found |= facts
    if timeline.peak_bytes is not None:
        found["peak_bytes"] = timeline.peak_bytes
    if timeline.joules is not None:
        found["joules"] = timeline.joules
        found["joules_per_answer"] = timeline.joules / len(jobs)
    return found


def _rates(jobs: Sequence[Job], counted: list[TokenTimes]) -> dict[str, float]:
    """Decode and prefill rates, where the run has a phase of each."""
    found = {}
    all_began = max(trace.times[0] for trace in counted)
    last = max(trace.times[-1] for trace in counted)
    tokens = sum(sum(1 for at in trace.times if at > all_began) for trace in counted)
    if last > all_began and tokens >= len(counted):
        found["decode_tokens_per_s"] = tokens / (last - all_began)
    if all(trace.arrival_s == 0 for trace in counted) and len(counted) == len(jobs) and all_began > 0:
        found["prefill_tokens_per_s"] = sum(len(job.prompt) for job in jobs) / all_began
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, of those that occur (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, low, high and n; of five or more values the highest and the lowest are left out first."""
    kept = sorted(values)
    if len(kept) >= 5:
        kept = kept[1:-1]
    return {"median": statistics.median(kept), "low": kept[0], "high": kept[-1], "n": len(values)}


_RESAMPLES = 2000


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The ratio of the medians of two series that were measured in turns, with its interval (95 %) and the pairs.

    The interval is of pairs drawn again with replacement: what disturbed both of a pair at once cancels out.
    """
    rng, count = random.Random(0), len(ours)
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = [rng.randrange(count) for _ in range(count)]
        ratios.append(statistics.median(ours[i] for i in drawn) / statistics.median(theirs[i] for i in drawn))
    ratios.sort()
    low, high = ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40]
    return {"ratio": statistics.median(ours) / statistics.median(theirs), "low": low, "high": high, "pairs": count}


def agreement(ours: Sequence[TokenTimes], theirs: Sequence[TokenTimes]) -> dict[str, float]:
    """How far outputs of two runs of the same jobs agree: equal ones, of how many, mean tokens until they part."""
    common = []
    for a, b in zip(ours, theirs, strict=True):
        same = 0
        for x, y in zip(a.tokens, b.tokens, strict=False):
            if x != y:
                break
            same += 1
        common.append(same)
    equal = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    return {"equal": equal, "of": len(common), "common_tokens": statistics.fmean(common)}
