"""Figures of a run, from times that were chosen by hand."""

from __future__ import annotations

import json

import pytest

from shoal.bench.systems.base import drive
from shoal.bench.timeline import RunTimes, TokenTimes, agreement, metrics, paired, summary
from shoal.bench.workloads import Job


def trace(times: list[float], arrival: float = 0.0) -> TokenTimes:
    return TokenTimes(arrival, list(range(len(times))), times)


def test_metrics_of_two_streams() -> None:
    jobs = [Job((1,) * 30, 4), Job((1,) * 10, 3)]
    timeline = RunTimes([trace([1.0, 1.5, 2.0, 4.0]), trace([2.0, 2.5, 3.0])], 4.0, {"cached_tokens": 10}, 77, 5.0)
    found = metrics(jobs, timeline)
    assert found["tokens_per_s"] == pytest.approx(7 / 4)
    assert found["ttft_p50_s"] == 2.0  # of two values the upper one
    assert found["itl_p50_s"] == 0.5
    assert found["worst_gap_s"] == 2.0
    assert found["decode_tokens_per_s"] == pytest.approx(3 / 2)  # those after 2.0: 4.0, 2.5, 3.0
    assert found["prefill_tokens_per_s"] == pytest.approx(40 / 2)
    assert found["hit_rate"] == 0.25
    assert found["peak_bytes"] == 77
    assert found["joules"] == 5.0


def test_a_prompt_that_only_joins_does_not_count_as_a_stream() -> None:
    jobs = [Job((1,), 3), Job((1,) * 9, 1, 0.3, counted=False)]
    found = metrics(jobs, RunTimes([trace([0.1, 0.2, 0.6]), trace([5.0], 0.3)], 5.0))
    assert found["ttft_p95_s"] == pytest.approx(0.1)
    assert found["worst_gap_s"] == pytest.approx(0.4)
    assert "prefill_tokens_per_s" not in found
    assert "hit_rate" not in found


def test_the_extremes_are_left_out_of_five_runs_and_not_of_four() -> None:
    assert summary([9.0, 1.0, 2.0, 3.0, 100.0]) == {"median": 3.0, "low": 2.0, "high": 9.0, "n": 5}
    assert summary([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "low": 1.0, "high": 4.0, "n": 4}


def test_agreement_is_counted_from_the_beginning() -> None:
    ours = [TokenTimes(0.0, [1, 2, 3]), TokenTimes(0.0, [1, 2, 3])]
    theirs = [TokenTimes(0.0, [1, 2, 3]), TokenTimes(0.0, [1, 9, 3])]
    assert agreement(ours, theirs) == {"equal": 1, "of": 2, "common_tokens": 2.0}


def test_a_timeline_survives_the_pipe() -> None:
    timeline = RunTimes([trace([0.5, 0.25])], 1.0, {"steps": 3}, None, 2.0)
    assert RunTimes.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


class Countdown:
    """A stepped system: every request gets its number as a token in each step; the clock moves a second a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.open: dict[int, int] = {5: 1}

    def drop(self) -> None:
        self.open = {}

    def add(self, number: int, job: Job) -> None:
        self.open[number] = job.max_tokens

    def step(self) -> list[tuple[int, list[int]]]:
        self.now += 1.0
        given = [(number, [number]) for number in self.open]
        self.open = {number: left - 1 for number, left in self.open.items() if left > 1}
        return given


def test_a_stepped_system_is_driven_through_arrivals() -> None:
    system = Countdown()
    timeline = drive(system, [Job((1,), 3), Job((1,), 2, arrival_s=1.5)], clock=lambda: system.now)
    assert [t.times for t in timeline.traces] == [[1.0, 2.0, 3.0], [3.0, 4.0]]
    assert timeline.wall_s == 4.0


def test_pairs_cancel_what_disturbed_both() -> None:
    """The second system always takes twice as long; half of the rounds are three times slower for both."""
    ours = [1.0, 3.0, 1.1, 3.3, 0.9, 2.7]
    told = paired(ours, [2 * wall for wall in ours])
    assert told == {"ratio": 0.5, "low": 0.5, "high": 0.5, "pairs": 6}
    apart = paired([1.0, 1.0, 1.0, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0, 2.0])
    assert (apart["ratio"], apart["low"]) == (0.5, 0.5)
    assert apart["high"] >= 0.5
