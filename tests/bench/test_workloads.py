"""Workloads: the same prompts for everybody, new ones in each round."""

from __future__ import annotations

import pytest

from shoal.bench.ceiling import ModelFacts, ceiling
from shoal.bench.workloads import SCENARIOS, Sizes, Workload, make_jobs, select
from shoal.errors import BenchmarkError

TEXT = list(range(100, 1100))
ALL = [workload for levels in SCENARIOS.values() for workload in levels]
FACTS = ModelFacts(weights=100, head=20, weight_bytes=1000, kv_bytes_per_token=10)
MACHINE = {"read_bytes_per_s": 1000.0, "int8_ops_per_s": 10_000.0}


@pytest.mark.parametrize("workload", ALL, ids=lambda w: f"{w.scenario} {w.level}")
def test_jobs_are_what_the_workload_says(workload: Workload) -> None:
    jobs = make_jobs(workload, TEXT, 3)
    assert jobs == make_jobs(workload, TEXT, 3)
    streams = [job for job in jobs if job.counted]
    assert len(streams) == workload.requests
    assert len(jobs) == len(streams) + (workload.joining > 0)
    lengths = [len(job.prompt) - workload.trunk for job in streams]
    assert (min(lengths), max(lengths)) == workload.prompt
    assert all(len(job.prompt) + job.max_tokens <= workload.length for job in jobs)
    assert len(jobs) <= workload.batch or workload.scenario in ("staggered", "agents")
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert (arrivals[-1] > 0) == bool(workload.rate or workload.joining)
    trunks = {job.prompt[: workload.trunk] for job in streams}
    assert len(trunks) == 1


@pytest.mark.parametrize("workload", ALL, ids=lambda w: f"{w.scenario} {w.level}")
def test_no_round_begins_like_another(workload: Workload) -> None:
    seen = [job.prompt[:2] for seed in range(-1, 5) for job in make_jobs(workload, TEXT, seed)[:1]]
    assert len(set(seen)) == len(seen)


def test_scenarios_are_chosen_by_name() -> None:
    assert select("all") == [w for w in ALL if w.scenario not in ("cold", "sustained", "uneven")]
    assert {workload.scenario for workload in select("both")} == {"scaling", "burst"}
    assert [workload.level for workload in select("scaling")] == ["1", "2", "4", "8", "16", "32", "prefill"]
    assert all(a.length < b.length for a, b in zip(select("all", quick=True), select("all"), strict=True))
    with pytest.raises(BenchmarkError, match="scalling") as caught:
        select("scalling")
    assert "burst" in str(caught.value.hint)


def test_the_ceiling_is_arithmetic() -> None:
    """Two rows of 10 + 4 / 2 tokens: 1,240 bytes at 1,000 a second, or 400 operations at 10,000."""
    workload = Workload("x", "2", 2, (10, 10), 4, 2)
    best = ceiling(workload, make_jobs(workload, TEXT, 0), FACTS, MACHINE)
    assert best["decode_tokens_per_s"] == pytest.approx(2 / 1.24)
    assert best["prefill_tokens_per_s"] == pytest.approx(10_000 / 160)
    assert best["wall_s"] == pytest.approx(20 * 160 / 10_000 + 3 * 1.24)


def test_the_ceiling_counts_a_trunk_once() -> None:
    workload = Workload("x", "8", 8, (10, 10), 2, 8, trunk=100)
    best = ceiling(workload, make_jobs(workload, TEXT, 0), FACTS, MACHINE)
    assert best["decode_tokens_per_s"] == pytest.approx(8 / ((1000 + (100 + 8 * 11) * 10) / 1000))
    assert "prefill_tokens_per_s" not in best
    assert best["wall_s"] == pytest.approx(180 * 160 / 10_000 + 2.88)


def test_many_rows_are_bound_by_operations() -> None:
    workload = Workload("x", "80", 80, (1, 1), 2, 80)
    best = ceiling(workload, make_jobs(workload, TEXT, 0), FACTS, {**MACHINE, "read_bytes_per_s": 1e9})
    assert best["decode_tokens_per_s"] == pytest.approx(10_000 / 200)


def test_a_burst_in_other_sizes_has_a_name_that_tells_them() -> None:
    [burst] = select("burst", Sizes(n=8, batch=4, prompt=500, output=32))
    assert (burst.level, burst.requests, burst.batch) == ("8 of 500 + 32, 4 at a time", 8, 4)
    assert {len(job.prompt) for job in make_jobs(burst, list(range(2000)), 0)} == {500}
    [staggered] = select("staggered", Sizes(n=4))
    assert (staggered.level, staggered.batch, staggered.rate) == ("4 of 200 to 400 + 64", 4, 4.0)
    assert select("burst", Sizes()) == select("burst")
    with pytest.raises(BenchmarkError, match="no scenario 'brust'"):
        select("brust", Sizes(n=8))
    with pytest.raises(BenchmarkError, match="scaling takes no other sizes"):
        select("scaling", Sizes(n=3))


def test_the_hint_after_an_unknown_scenario_has_all_that_the_command_takes() -> None:
    with pytest.raises(BenchmarkError) as caught:
        select("speculaton")
    assert caught.value.limit == ["all", "both", *SCENARIOS, "speculation"]
