"""Failures, timeouts, deadlines: what policies do, what dependants get, what it costs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from shoal.agents import Agent, Graph, GraphResult, State, default, fail, fallback, retry, skip
from shoal.agents.build.policy import Policy
from shoal.errors import (
    EngineClosedError,
    GraphError,
    GraphFailedError,
    InvalidRequestError,
    QueueFullError,
    RunnerError,
)
from shoal.runners.fake import FakeRunner
from shoal.types import Priority, Request, SamplingParams
from tests.support.agents import SHORT, FlakyEngine, ScriptedEngine, agent_of, go, toy

ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
BROKEN = RunnerError("the pass failed")


def agent(name: str, task: str = "", **fields: Any) -> Agent:
    return Agent(name, task=task or f"Do {name}", **{"sampling": SHORT, **fields})


def attempts(result: GraphResult, node: str) -> list[Any]:
    return [r for r in result.records if r["kind"] == "attempt" and r["agent_id"] == node]


def run_pair(policy: Policy, answers: dict[str, list[Any]], **fields: Any) -> tuple[GraphResult, ScriptedEngine]:
    """A node with this policy, one that succeeds, and one that depends on both."""
    graph = Graph()
    a = graph.add(agent("a", on_failure=policy, **fields))
    b = graph.add(agent("b"))
    graph.add(agent("end", on_failure=default("gave up")), after=[a, b])
    engine = ScriptedEngine(answers)
    return go(graph.run(engine)), engine


def test_failure_goes_down_to_whoever_has_a_policy_for_it() -> None:
    result, _ = run_pair(fail, {"a": [BROKEN]})
    assert result.states == {"a": State.FAILED, "b": State.DONE, "end": State.DEFAULTED}
    assert result.output == "gave up"
    assert result.outcomes["end"].cause == "a failed"
    assert attempts(result, "a")[0]["outcome"] == "failed"
    assert attempts(result, "a")[0]["cause"] == "the pass failed"


def test_a_default_stands_in_for_the_output() -> None:
    result, engine = run_pair(default("nothing"), {"a": [BROKEN]})
    assert result.states["a"] is State.DEFAULTED
    assert engine.prompts("end") == ["## a\nnothing\n\n## b\n<b>\n\nDo end"]


def test_a_skip_leaves_it_out() -> None:
    result, engine = run_pair(skip, {"a": [BROKEN]})
    assert result.states["a"] is State.SKIPPED
    assert engine.prompts("end") == ["## b\n<b>\n\nDo end"]


def test_a_fallback_writes_instead() -> None:
    result, engine = run_pair(fallback(agent("cheap", "In short")), {"a": [BROKEN, "short"]})
    assert result.states["a"] is State.DEFAULTED
    assert result.outputs["a"] == "short"
    assert engine.prompts("a") == ["Do a", "In short"]
    assert [r["agent"] for r in attempts(result, "a")] == ["a", "cheap"]
    result, _ = run_pair(fallback(agent("cheap", "In short", on_failure=default("last"))), {"a": [BROKEN, BROKEN]})
    assert result.outputs["a"] == "last"


def test_retries_have_new_seeds_and_grow_their_pauses() -> None:
    begin = time.perf_counter()
    result, engine = run_pair(retry(2, backoff_s=0.05, factor=2), {"a": [BROKEN, BROKEN, "well"]})
    assert time.perf_counter() - begin >= 0.15
    assert result.outputs["a"] == "well"
    assert [r["attempt"] for r in attempts(result, "a")] == [1, 2, 3]
    seeds = [r.sampling.seed for r in engine.requests if agent_of(r) == "a"]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("no", param="prompt"), EngineClosedError("closed"), GraphError("odd")],
    ids=lambda e: type(e).__name__,
)
def test_what_will_not_go_away_is_not_tried_again(error: Any) -> None:
    result, _ = run_pair(retry(3, backoff_s=0), {"a": [error]})
    assert result.states["a"] is State.FAILED
    assert len(attempts(result, "a")) == 1


def test_a_full_queue_is_waited_for() -> None:
    full = QueueFullError("full", value=1, limit=1, retry_after_s=0.1)
    begin = time.perf_counter()
    result, _ = run_pair(retry(1, backoff_s=0), {"a": [full, "well"]})
    assert result.outputs["a"] == "well"
    assert time.perf_counter() - begin >= 0.1


def test_output_that_does_not_fit_is_tried_again_only_when_it_was_sampled() -> None:
    @dataclasses.dataclass
    class Number:
        number: int

    for temperature, count in ((0.0, 1), (0.9, 2)):
        sampling = SamplingParams(temperature=temperature)
        answers: dict[str, list[Any]] = {"a": ['{"number": "x"}', '{"number": 7}']}
        result, _ = run_pair(retry(2, backoff_s=0), answers, schema=Number, sampling=sampling)
        tried = attempts(result, "a")
        assert len(tried) == count
        assert tried[0]["outcome"] == "invalid"
        assert "does not fit the schema" in tried[0]["cause"]
        assert (result.outputs.get("a") == Number(7)) == (count == 2)


def test_a_timeout_ends_the_attempt_frees_its_kv_and_may_be_tried_again() -> None:
    async def main() -> None:
        async with toy(FakeRunner(step_s=0.002)) as engine:
            graph = Graph()
            graph.add(
                agent("slow", sampling=ENDLESS, timeout_s=0.3, on_failure=retry(1, backoff_s=0, then=default("-")))
            )
            result = await graph.run(engine)
            assert result.output == "-"
            assert [r["outcome"] for r in attempts(result, "slow")] == ["timeout", "timeout"]
            assert all(r["generated_tokens"] > 3 for r in attempts(result, "slow"))
            assert all(r["latency_ms"] >= 280 for r in attempts(result, "slow"))

    go(main())


def test_waiting_for_a_place_in_the_batch_is_not_time_of_the_attempt() -> None:
    async def main() -> None:
        async with toy(FakeRunner(step_s=0.01), max_batch=1, speculation=False) as engine:
            graph = Graph()
            twenty = SamplingParams(max_tokens=20, ignore_eos=True)
            graph.map(agent("w", "Write {item}", timeout_s=1.0, sampling=twenty), over=list(range(8)))
            result = await graph.run(engine)
            queued = [r["queue_ms"] for r in result.records if r["kind"] == "attempt"]
            assert max(queued) > 1000
            assert [r["outcome"] for r in result.records if r["kind"] == "attempt"] == ["ok"] * 8

    go(main())


def test_a_hung_node_costs_its_own_deadline_and_no_more() -> None:
    graph = Graph()
    parts = graph.map(agent("w", "Write {item}", deadline_s=0.4, on_failure=skip), over=list(range(6)))
    graph.add(agent("end"), after=parts)
    engine = ScriptedEngine(lambda r: 3600.0 if agent_of(r) == "w[2]" else f"<{agent_of(r)}>")
    result = go(graph.run(engine))
    assert result.states["w[2]"] is State.SKIPPED
    assert result.outputs["w"] == [f"<w[{i}]>" for i in (0, 1, 3, 4, 5)]
    assert result.output == "<end>"
    assert 0.4 <= result.wall_s < 20


def test_an_engine_without_hints_counts_the_timeout_from_submission() -> None:
    result, engine = run_pair(default("late"), {"a": [3600.0]}, timeout_s=0.2)
    assert result.outputs["a"] == "late"
    assert 0.2 <= result.wall_s < 20
    asked = next(r for r in engine.requests if agent_of(r) == "a")
    assert asked.timeout_s is None
    assert asked.deadline_s == pytest.approx(0.2)


def test_of_the_nodes_deadline_the_fallbacks_share_is_kept_back() -> None:
    policy = fallback(agent("cheap", "In short"), reserve_s=2.7)
    result, _ = run_pair(policy, {"a": [3600.0, "short"]}, deadline_s=3.0)
    assert result.outputs["a"] == "short"
    assert attempts(result, "a")[0]["outcome"] == "timeout"
    assert 0.3 <= attempts(result, "a")[1]["submitted_at_ms"] / 1e3 < 3.0


def test_no_retry_begins_that_has_no_time() -> None:
    result, _ = run_pair(retry(5, backoff_s=10, then=default("-")), {"a": [BROKEN]}, deadline_s=5.0)
    assert result.wall_s < 5.0
    assert result.outputs["a"] == "-"
    assert "no time is left" in str(result.outcomes["a"].cause)


def test_of_the_graphs_deadline_the_final_nodes_share_is_kept_back() -> None:
    graph = Graph(deadline_s=3.0, reserve_s=2.6)
    parts = graph.map(agent("w", "Write {item}", on_failure=skip), over=list(range(3)))
    graph.add(agent("summary"), after=parts)
    engine = ScriptedEngine(lambda r: 3600.0 if agent_of(r) == "w[0]" else f"<{agent_of(r)}>")
    result = go(graph.run(engine))
    assert result.output == "<summary>"
    assert 0.4 <= result.wall_s < 3.0
    stuck = Graph(deadline_s=0.3)
    stuck.add(agent("summary"))
    with pytest.raises(GraphFailedError, match="deadline"):
        go(stuck.run(ScriptedEngine({"summary": [3600.0]})))


def test_twenty_four_agents_on_a_batch_of_four_finish() -> None:
    async def main() -> None:
        async with toy(max_batch=4) as engine:
            graph = Graph(shared="What all of the twenty-four have in common. " * 2)
            parts = graph.map(agent("w", "Write {item}"), over=list(range(24)))
            graph.add(agent("end"), after=parts)
            result = await graph.run(engine)
            assert set(result.states.values()) == {State.DONE}
            assert len(result.outputs["w"]) == 24

    go(main())


def test_the_longest_path_goes_first_and_the_summary_before_stragglers() -> None:
    """One place in the batch: the first of a long chain is asked before single ones that came earlier."""

    async def main() -> None:
        async with toy(FakeRunner(step_s=0.002), max_batch=1) as engine:
            graph = Graph()
            graph.add(agent("first"))
            singles = [graph.add(agent(f"single{i}")) for i in range(4)]
            chain = graph.add(agent("chain0"))
            for i in range(1, 4):
                chain = graph.add(agent(f"chain{i}"), after=chain)
            result = await graph.run(engine)
            joined = {r["agent_id"]: r["joined_at_ms"] for r in result.records if r["kind"] == "attempt"}
            order = sorted(joined, key=lambda name: joined[name])
            assert order.index("chain0") <= 1, order
            assert order.index("chain3") < order.index(singles[-1].id), "the end of the chain outranks stragglers"

    go(main())


def test_runs_are_served_equally() -> None:
    """One place in the batch: a small run does not wait for a large one that came first."""

    async def main() -> None:
        async with toy(FakeRunner(step_s=0.001), max_batch=1) as engine:
            large, small = Graph(), Graph()
            large.map(agent("w", "Write {item} of many"), over=list(range(16)))
            small.map(agent("w", "Write {item} of few"), over=[1, 2])
            async with large.start(engine) as first, small.start(engine) as second:
                await second.result()
                waiting = [node for node in first.open if node.agent is not None]
                assert len(waiting) >= 10, "the large run was not even half through"
                assert (await first.result()).ok

    go(main())


def test_hints_reach_the_request() -> None:
    graph = Graph()
    a = graph.add(agent("a", priority="low", sampling=SamplingParams(max_tokens=100)))
    b = graph.add(agent("b", sampling=SamplingParams(max_tokens=50)), after=a)
    graph.add(agent("c", priority="high", sampling=SamplingParams(max_tokens=7)), after=b)
    engine = ScriptedEngine()
    go(graph.run(engine, task_id="g"))
    asked = {agent_of(r): r for r in engine.requests}
    assert asked["a"].priority is Priority.LOW
    assert asked["c"].priority is Priority.HIGH
    assert [asked[n].critical_path for n in "ab"] == [157, 57]
    assert asked["c"].critical_path > 157
    assert asked["a"].id == "g/a/1"


def test_a_lost_or_failing_engine_ends_every_node() -> None:
    async def main() -> None:
        async with toy() as engine:
            flaky = FlakyEngine(engine, 1, failing=1.0, hanging=0.0)
            graph = Graph()
            parts = graph.map(agent("w", "Write {item}", on_failure=retry(1, backoff_s=0)), over=[1, 2])
            graph.add(agent("end"), after=parts)
            async with graph.start(flaky) as run:
                result = await run.result()
            assert set(result.states.values()) == {State.FAILED}
        closed = toy()
        async with closed as engine:
            pass
        async with graph.start(engine) as run:
            result = await run.result()
        assert set(result.states.values()) == {State.FAILED}
        assert "closed" in str(result.outcomes["w[0]"].cause)

    go(main())


def test_policies_are_checked_when_they_are_built() -> None:
    with pytest.raises(GraphError, match="times is 0"):
        retry(0)
    with pytest.raises(GraphError, match="backoff_s is -1"):
        retry(1, backoff_s=-1)
    with pytest.raises(GraphError, match="then is another retry"):
        retry(1, then=retry(1))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="reserve_s is 0"):
        fallback(agent("x"), reserve_s=0)
    with pytest.raises(GraphError, match="on_failure"):
        agent("x", on_failure="skip")
    with pytest.raises(GraphError, match="reserve_s is 2"):
        Graph(deadline_s=1, reserve_s=2)


def test_an_agent_that_asks_what_no_request_may_fails_alone() -> None:
    def ask(request: Request) -> Any:
        return InvalidRequestError("unknown", param="x") if agent_of(request) == "odd" else "fine"

    graph = Graph()
    odd = graph.add(agent("odd", on_failure=skip))
    graph.add(agent("end"), after=[odd, graph.add(agent("even"))])
    assert go(graph.run(ScriptedEngine(ask))).output == "fine"
