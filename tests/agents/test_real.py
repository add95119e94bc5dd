"""Graphs on the real model: what they share, and that sharing changes no word."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncEngine, Engine, SamplingParams
from shoal.agents import Agent, Graph, GraphResult, Run, State
from shoal.agents.build.files import load_graph
from shoal.errors import ModelNotFoundError
from shoal.models import Store
from tests.agents.test_prefixes import Plain
from tests.support.agents import nothing_held
from tests.support.brake import Brake

GRAPHS = Path(__file__).parents[2] / "examples" / "graphs"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        Store().resolve("smollm2-135m", pull=False)
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")
    with Engine.load("smollm2-135m", kv_memory="128MiB") as loaded:
        yield loaded


def run(graph: Graph, engine: Any, **settings: Any) -> GraphResult:
    async def main() -> GraphResult:
        async with graph.start(engine, **settings) as work:
            result = await work.result()
        if isinstance(engine, AsyncEngine):
            await asyncio.to_thread(nothing_held, engine)
        return result

    return asyncio.run(main())


def attempts(result: GraphResult) -> dict[str, Any]:
    return {r["agent_id"]: r for r in result.records if r["kind"] == "attempt"}


def report(rules: str) -> Graph:
    def agent(name: str, tokens: int, **fields: Any) -> Agent:
        return Agent(name, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True), **fields)

    graph = Graph(rules)
    plan = graph.add(agent("planner", 12, task="Plan a report about a park."))
    parts = graph.map(agent("writer", 24, role="You write one section.", task="Write about {item}."),
                      over=["benefits", "costs", "advice"], after=plan)  # fmt: skip
    review = graph.add(agent("reviewer", 12, role="You check.", task="Name what is missing."), after=parts)
    graph.add(agent("editor", 16, role="You edit.", task="Merge the sections."), after=[parts, review])
    return graph


def test_a_graph_shares_its_prefixes_and_writes_the_same_as_without(engine: Engine) -> None:
    graph = report("You write a report with others. Write plain English. " * 12)
    engine.suspend(drop_kv=True)
    engine.resume()
    shared = run(graph, AsyncEngine(engine))
    told = attempts(shared)
    rules = told["writer[0]"]["prefix_tokens"]
    assert rules >= 100, "the shared part is computed once"
    assert told["editor"]["prefix_tokens"] >= told["reviewer"]["prompt_tokens"] - 24, "the sections are computed once"
    assert sum(told[f"writer[{i}]"]["prefix_tokens"] > rules for i in range(3)) >= 1
    with Engine.load("smollm2-135m", kv_memory="128MiB", prefix_sharing=False) as alone:
        apart = run(graph, Plain(AsyncEngine(alone)))
    assert not any(r["cache_hit"] for r in attempts(apart).values())
    assert {n: o.text for n, o in shared.outcomes.items()} == {n: o.text for n, o in apart.outcomes.items()}


def test_a_child_goes_on_from_its_parents_kv(engine: Engine) -> None:
    graph = Graph("You are a poet.")
    poem = graph.add(Agent("poem", task="Write two lines about rain.", sampling=SamplingParams(max_tokens=24)))
    graph.add(Agent("title", task="Give it a title.", sampling=SamplingParams(max_tokens=8)), continues=poem)
    told = attempts(run(graph, AsyncEngine(engine)))
    assert told["title"]["prefix_tokens"] >= told["poem"]["prompt_tokens"] + told["poem"]["generated_tokens"] // 2
    assert told["title"]["prompt_tokens"] - told["title"]["prefix_tokens"] < 24


def test_every_policy_shows_in_one_run() -> None:
    """On an engine that takes a token a step, and no more than 400 a second: no machine writes its 2000 in time."""
    brake = Brake(step_s=0.0025)
    with Engine.load("smollm2-135m", kv_memory="128MiB", speculation=False) as paced:
        result = run(load_graph(GRAPHS / "policies.yaml"), AsyncEngine(brake.fitted(paced)), seed=1)
    states = result.states
    assert states == {
        "steady": State.DONE,
        "hasty": State.DEFAULTED,
        "cut": State.SKIPPED,
        "verbose": State.DEFAULTED,
        "broken": State.FAILED,
        "careful": State.DEFAULTED,
        "summary": State.DONE,
    }
    outcomes = [(r["agent_id"], r["attempt"], r["outcome"]) for r in result.records if r["kind"] == "attempt"]
    assert sorted(outcomes) == [
        ("broken", 1, "invalid"), ("cut", 1, "invalid"), ("hasty", 1, "timeout"), ("hasty", 2, "timeout"),
        ("steady", 1, "ok"), ("summary", 1, "ok"), ("verbose", 1, "timeout"), ("verbose", 2, "ok"),
    ]  # fmt: skip


def test_a_node_that_a_function_adds_runs_like_any_other(engine: Engine) -> None:
    graph = Graph("Answer with one word.")
    eight = SamplingParams(max_tokens=8, ignore_eos=True)
    first = graph.add(Agent("first", task="Name a colour.", sampling=eight))

    def more(run: Run, colour: str) -> Any:
        return run.add(Agent("second", task="Name a thing of that colour.", sampling=eight), after=first)

    graph.call(more, after=first)
    result = run(graph, AsyncEngine(engine))
    assert result.ok
    assert result.outputs["second"]
