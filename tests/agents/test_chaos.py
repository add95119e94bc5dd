"""Random graphs with random failures, timeouts and cancels on the toy model. `GRAPHS=1000 pytest` runs that many."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import pytest

from shoal.agents import Agent, Graph, Node, Run, State, default, fail, fallback, retry, skip
from shoal.agents.build.policy import Last, Policy
from shoal.engine.aio import AsyncEngine
from shoal.runners.fake import FakeRunner
from shoal.types import SamplingParams
from tests.support.agents import FlakyEngine, go, nothing_held, toy

GRAPHS = int(os.environ.get("GRAPHS", "60"))
TRUNK = "Rules that all agents of this graph have in common, longer than one block of KV. "


class Maker:
    """Draws one graph."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = 0

    def last(self) -> Last:
        every: list[Last] = [fail, skip, default("stand-in"), fallback(self.agent(plain=True))]
        return self.rng.choice(every)

    def policy(self) -> Policy:
        last = self.last()
        return retry(self.rng.randint(1, 2), backoff_s=0.001, then=last) if self.rng.random() < 0.4 else last

    def agent(self, *, plain: bool = False, task: str = "") -> Agent:
        rng = self.rng
        self.names += 1
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 12), temperature=rng.choice([0.0, 0.9]), ignore_eos=rng.random() < 0.8
        )
        return Agent(
            f"a{self.names}",
            task=task or rng.choice(["The same", f"Task {self.names}"]),
            role=rng.choice(["", "A role that some have, as long as a block of KV or so", "Another one"]),
            sampling=sampling,
            priority=rng.choice(["low", "normal", "high"]),
            timeout_s=rng.choice([None, 0.02, 0.2]),
            deadline_s=0.3,
            on_failure=skip if plain else self.policy(),
        )

    def graph(self) -> Graph:
        rng = self.rng
        graph = Graph(rng.choice(["", TRUNK]), deadline_s=rng.choice([None, 0.5]))
        nodes: list[Node] = []
        for _ in range(rng.randint(1, 9)):
            after = rng.sample(nodes, min(len(nodes), rng.randint(0, 3)))
            nodes.append(self.node(graph, nodes, after))
        return graph

    def node(self, graph: Graph, nodes: list[Node], after: list[Node]) -> Node:
        rng = self.rng
        kind = rng.choice(["agent", "agent", "agent", "map", "reduce", "loop", "branch", "call", "continues"])
        maps = [node for node in nodes if node.rule is not None]
        singles = [node for node in nodes if node.agent is not None]
        if kind == "map":
            return graph.map(self.agent(task="Write {item}"), over=list(range(rng.randint(0, 5))), after=after)
        if kind == "reduce" and maps:
            return graph.reduce(self.agent(), over=rng.choice(maps), width=rng.randint(2, 3))
        if kind == "loop":
            enough = rng.random()
            until = lambda output: len(str(output)) > 12 * enough  # noqa: E731
            return graph.loop(self.agent(), self.agent(), until=until, at_most=rng.randint(1, 3), after=after)
        if kind == "branch" and nodes:
            otherwise = self.agent() if rng.random() < 0.5 else None
            return graph.branch(rng.choice(nodes), {"stand-in": self.agent()}, otherwise=otherwise)
        if kind == "call":
            hired = [self.agent(plain=True) for _ in range(rng.randint(0, 3))]
            return graph.call(lambda run, *outputs: [run.add(one) for one in hired] or "none", after=after)
        if kind == "continues" and singles:
            return graph.add(self.agent(), after=after, continues=rng.choice(singles))
        return graph.add(self.agent(), after=after)


async def meddle(run: Run, rng: random.Random) -> None:
    """Cancel or discard a node now and then."""
    while True:
        await asyncio.sleep(rng.random() * 0.02)
        node = rng.choice(list(run.nodes.values()))
        if rng.random() < 0.5:
            run.cancel(node)
        else:
            run.discard(node)


async def live(engine: AsyncEngine, seed: int, tally: Counter[str]) -> None:
    """One graph from end to end: every node ends once, in one final state, and the trace says the same."""
    rng = random.Random(-seed)
    graph = Maker(seed).graph()
    async with graph.start(FlakyEngine(engine, seed), seed=seed) as run:
        meddler = asyncio.create_task(meddle(run, rng)) if rng.random() < 0.4 else None
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.03)  # and leave without waiting
        else:
            result = await run.result()
        if meddler is not None:
            meddler.cancel()
            await asyncio.gather(meddler, return_exceptions=True)
    result = await run.result()
    assert set(result.outcomes) == set(run.nodes)
    assert all(state.final for state in result.states.values())
    ended = Counter(r["agent_id"] for r in result.records if r["kind"] == "node")
    assert ended == Counter(dict.fromkeys(run.nodes, 1)), "every node ends exactly once"
    told = {r["agent_id"]: r["state"] for r in result.records if r["kind"] == "node"}
    assert told == result.states
    for name, outcome in result.outcomes.items():
        assert outcome.state is State.DONE or outcome.cause, f"{name} is {outcome.state} and nobody knows why"
    begun = [r for r in result.records if r["kind"] == "attempt"]
    assert len({r["request_id"] for r in begun}) == len(begun)
    tally.update(result.states.values())
    tally.update(f"attempt {r['outcome']}" for r in begun)


@pytest.mark.timeout(1200)
def test_random_graphs_end_well() -> None:
    tally: Counter[str] = Counter()

    async def main() -> None:
        runner = FakeRunner(num_blocks=48, block_size=16, step_s=0.0005)
        async with toy(runner, max_batch=4, max_step_tokens=128) as engine:
            for first in range(0, GRAPHS, 4):  # four at a time, so that they are in each other's way
                await asyncio.gather(*(live(engine, seed, tally) for seed in range(first, min(first + 4, GRAPHS))))
                await asyncio.to_thread(nothing_held, engine)

    go(main(), timeout_s=1200)
    print(dict(sorted(tally.items())))
    wanted: list[Any] = [*State, "attempt ok", "attempt failed", "attempt timeout", "attempt cancelled"]
    missing = {str(one) for one in wanted} - {str(one) for one in tally} - {"waiting", "running"}
    assert not missing, f"these never happened: {missing}"
