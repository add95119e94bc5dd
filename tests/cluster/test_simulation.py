"""The simulated cluster, small: the order of the policies, and that nothing is lost. No real clock is read."""

from __future__ import annotations

from functools import cache

import pytest

from shoal.cluster.simulate import Machine, SimulatedRun, Simulation
from shoal.cluster.traffic import AgentTurns, TenantCalls

SMALL = Machine(kv_tokens=16_000, block_size=32, max_batch=8, max_step_tokens=512)


def tenants(replicas: int, calls: int = 800) -> TenantCalls:
    return TenantCalls(calls, 22.0 * replicas, 32, tenants=32, prefix=1200, question=200, output=20)


@cache
def run(policy: str, late_s: float = 0.0, replicas: int = 4) -> SimulatedRun:
    return Simulation(SMALL, replicas, policy, late_s).run(tenants(replicas))


def test_knowing_what_is_held_beats_remembering_beats_chance() -> None:
    rates = {policy: run(policy).summary() for policy in ("precise", "affinity", "random")}
    assert rates["precise"]["calls_per_s"] > 1.1 * rates["affinity"]["calls_per_s"]
    assert rates["precise"]["calls_per_s"] > 1.5 * rates["random"]["calls_per_s"]
    assert rates["precise"]["hit_rate"] > rates["affinity"]["hit_rate"] > rates["random"]["hit_rate"]


def test_late_events_cost_little_and_every_call_ends() -> None:
    late, affinity = run("precise", 5.0), run("affinity")
    assert len(late.done) == len(affinity.done) == 800
    assert late.summary()["calls_per_s"] >= affinity.summary()["calls_per_s"]


def test_a_run_can_be_repeated() -> None:
    agents = (AgentTurns(6, 1.0, 32, tenants=2, prefix=300, turns=3, result=50, output=10) for _ in range(2))
    first, second = (Simulation(SMALL, 2, "precise", 0.0).run(each).done for each in agents)
    assert first == second


@pytest.mark.parametrize("policy", ["precise", "random"])
def test_turns_of_agents_follow_each_other(policy: str) -> None:
    agents = AgentTurns(12, 2.0, 32, tenants=4, prefix=600, turns=6, result=50, output=10, pause_s=0.5)
    outcome = Simulation(SMALL, 3, policy, 0.0).run(agents)
    assert len(outcome.done) == 72
    longest = max(call.prompt for call in outcome.done)
    assert longest == 600 + 6 * 50 + 5 * 10
    if policy == "precise":
        assert outcome.summary()["hit_rate"] > 0.9
