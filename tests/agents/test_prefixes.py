"""What the engine is told of prompts to come: what is kept, what is prefetched, and what is freed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from shoal.agents import Agent, EventKind, Graph, GraphResult, Run, default
from shoal.engine.aio import AsyncEngine
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ModelSpec
from shoal.types import Event, Request, SamplingParams
from tests.support.agents import SHORT, ScriptedEngine, go, toy

RULES = "Rules that every agent of this graph has in common, of a good many tokens, so that it is worth to keep them."
ROLE = "A role that is long enough to be worth computing while its inputs are still being written by somebody else."


class Plain:
    """The engine's face without hints."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    def generate(self, request: Request) -> AsyncIterator[Event]:
        return self._engine.generate(request)


def agent(name: str, **fields: Any) -> Agent:
    return Agent(name, task=f"Do {name}", **{"sampling": SHORT, **fields})


def attempts(result: GraphResult) -> dict[str, Any]:
    return {r["agent_id"]: r for r in result.records if r["kind"] == "attempt"}


def test_what_a_pending_node_needs_outlives_a_flood_of_others() -> None:
    """Between two agents of a graph, requests of others go through a small pool several times over."""

    async def flood(run: Run, output: str) -> str:
        engine: Any = getattr(run.engine, "_engine", run.engine)
        for i in range(12):
            await engine.complete(Request(prompt=f"{i:03d}" * 60, sampling=SHORT))
        return "flooded"

    async def main(hints: bool) -> int:
        async with toy(FakeRunner(num_blocks=40, block_size=16)) as engine:
            graph = Graph(RULES)
            first = graph.add(agent("first"))
            noise = graph.call(flood, after=first)
            graph.add(agent("last"), after=noise)
            result = await graph.run(engine if hints else Plain(engine))
            assert engine.engine.stats().evictions > 20
            return int(attempts(result)["last"]["prefix_tokens"])

    assert go(main(hints=True)) >= len(RULES) // 16 * 16
    assert go(main(hints=False)) < 16


def test_a_dependants_static_part_is_computed_while_its_input_is_written() -> None:
    async def main(hints: bool) -> tuple[Any, GraphResult]:
        async with toy(FakeRunner(step_s=0.005), speculation=False) as engine:
            graph = Graph(RULES)
            first = graph.add(agent("first", sampling=SamplingParams(max_tokens=100, ignore_eos=True)))
            parts = graph.map(agent("writer", role=ROLE), over=["a"], after=first)
            graph.add(agent("editor", role=f"Another. {ROLE}"), after=parts)
            result = await graph.run(engine if hints else Plain(engine))
            return attempts(result), result

    with_hints, result = go(main(hints=True))
    prefetched = {r["agent_id"]: r["tokens"] for r in result.records if r["kind"] == "prefetch"}
    assert with_hints["writer[0]"]["prefix_tokens"] >= len(RULES) + 60, "the role was there"
    assert with_hints["editor"]["prefix_tokens"] >= len(RULES) + 60
    assert prefetched["editor"] >= len(RULES) + 60
    without, result = go(main(hints=False))
    assert not [r for r in result.records if r["kind"] == "prefetch"]
    assert without["writer[0]"]["prefix_tokens"] <= len(RULES) + 3


def test_the_shared_part_is_computed_once_by_a_cold_fan_out() -> None:
    async def main() -> None:
        async with toy() as engine:
            graph = Graph(RULES)
            graph.map(Agent("w", task="Write {item}", sampling=SHORT), over=list("abcdef"))
            result = await graph.run(engine)
            cached = sorted(r["prefix_tokens"] for r in attempts(result).values())
            assert cached[0] == 0
            assert cached[1] >= len(RULES)

    go(main())


def test_an_attempt_that_is_out_of_time_holds_nothing_at_the_next_token() -> None:
    async def main() -> None:
        async with toy(FakeRunner(step_s=0.005)) as engine:
            graph = Graph()
            endless = SamplingParams(max_tokens=3000, ignore_eos=True)
            graph.add(agent("slow", sampling=endless, timeout_s=0.1, on_failure=default("-")))
            graph.add(agent("steady", sampling=endless))

            def running() -> int:
                return engine.engine.call(lambda: len(engine.engine._loop.scheduler.running))

            async with graph.start(engine) as run:
                async for event in run:
                    if event.kind is EventKind.ATTEMPT and event.node is not None and event.node.id == "slow":
                        assert await asyncio.to_thread(running) == 1, "only the steady one is in the batch"
                        break

    go(main())


def test_a_cancelled_run_takes_its_announcements_back() -> None:
    async def main() -> None:
        async with toy(FakeRunner(step_s=0.005)) as engine:
            graph = Graph(RULES)
            endless = SamplingParams(max_tokens=3000, ignore_eos=True)
            first = graph.add(agent("first", sampling=endless))
            graph.add(agent("second", role=ROLE), after=first)
            async with graph.start(engine):
                await asyncio.sleep(0.1)

    go(main())


def test_how_far_a_node_is_from_its_inputs_and_from_the_end() -> None:
    """In tokens that may have to be written one after another: what eviction and the queue go by."""

    def writer(name: str, tokens: int) -> Agent:
        return agent(name, sampling=SamplingParams(max_tokens=tokens))

    graph = Graph()
    a = graph.add(writer("a", 10))
    b = graph.add(writer("b", 20), after=a)
    short = graph.add(writer("short", 1))
    parts = graph.map(writer("part", 30), over=[1, 2], after=b)
    end = graph.add(writer("end", 5), after=[parts, short])

    async def main() -> None:
        run = graph.start(ScriptedEngine())
        assert [run.distance(node) for node in (a, b, parts, end)] == [0, 10, 30, 60]
        assert [run.critical_path(node) for node in (a, b, short, parts)] == [65, 55, 6, 35]
        assert run.critical_path(end) == 66, "the final node outranks all"
        async with run:
            await run.result()
        assert run.distance(end) == 0

    go(main())


def test_a_private_agent_shares_with_itself_alone() -> None:
    """Nothing of the rules that all share is taken over by it or from it; the next of its name finds its own."""

    async def main() -> dict[str, Any]:
        async with toy(FakeRunner()) as engine:
            graph = Graph(RULES)
            first = graph.add(agent("first"))
            secret = graph.add(agent("secret", private=True), after=first)
            again = graph.add(agent("secret", private=True), after=secret)
            newer = graph.add(agent("secret", private=True, version=2), after=again)
            graph.add(agent("last"), after=newer)
            return attempts(await graph.run(engine))

    told = {name: attempt["prefix_tokens"] for name, attempt in go(main()).items()}
    assert told["secret"] == told["secret-3"] == 0
    assert told["secret-2"] >= len(RULES)
    assert told["last"] >= len(RULES)
