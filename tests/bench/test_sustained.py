"""A load that lasts, from bursts that were made by hand."""

from __future__ import annotations

import pytest

from shoal.bench.sustained import SustainedLoad
from shoal.bench.timeline import RunTimes, TokenTimes


def burst(tokens: int, wall_s: float, joules: float | None = None) -> RunTimes:
    """Two requests that write evenly until the end."""
    times = [wall_s * (i + 1) / tokens - 1e-6 for i in range(tokens)]
    return RunTimes([TokenTimes(0.0, [1] * tokens, times) for _ in range(2)], wall_s, joules=joules, peak_bytes=7)


def test_a_machine_that_slows_down_and_what_was_done_until_then() -> None:
    load = SustainedLoad()
    for second in range(20):
        load.add(float(second), burst(10 if second < 10 else 5, 1.0, 2.0))
    assert load.rates() == [20.0] * 10 + [10.0] * 10
    assert load.throttled_at() == 7, "five seconds together are below nine tenths"
    told = load.metrics()
    assert (told["requests"], told["requests_unthrottled"], told["throttled_after_s"]) == (40, 14, 7)
    assert told["kept_rate"] == pytest.approx(0.5)
    assert (told["joules"], told["joules_per_answer"], told["peak_bytes"]) == (40, 1, 7)


def test_a_machine_that_keeps_its_rate() -> None:
    load = SustainedLoad()
    for second in range(12):
        load.add(float(second), burst(10, 1.0))
    assert load.throttled_at() is None
    told = load.metrics()
    assert told["requests"] == told["requests_unthrottled"] == 24
    assert told["kept_rate"] == pytest.approx(1.0)
    assert not {"throttled_after_s", "joules"} & set(told), "not said where it is not so, or cannot be read"
