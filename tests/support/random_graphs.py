"""Random graphs of agents, an engine whose answers follow from the prompt alone, and kills in the middle of runs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.agents import Agent, Graph, GraphResult, Input, Node, default, fallback, retry, skip
from shoal.agents.build.node import Source
from shoal.agents.run import journal
from shoal.errors import RunnerError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ModelSpec
from shoal.types import Event, FinishReason, Request, Result, SamplingParams

INPUTS: dict[str, Any] = {"question": "Why is the sky {blue}?", "documents": ["one", "two", "three"]}


@dataclass
class Outline:
    sections: list[str]
    good: bool


class Killed(BaseException):
    """The process is gone."""


class HashEngine:
    """Writes a sum of the prompt and the seed; some attempts fail, by their ids. Counts calls by node."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self._pause_s = pause_s

    @property
    def spec(self) -> ModelSpec:
        return FakeRunner().spec

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        name, attempt = (request.id or "").split("/")[1:]
        self.calls[name] += 1
        facts = repr((request.messages, request.sampling.seed if request.sampling.temperature else None))
        found = hashlib.sha256(facts.encode()).hexdigest()
        for _ in range(int(found[0], 16) % 4):
            await asyncio.sleep(self._pause_s)
        if int(hashlib.sha256(f"{name}/{attempt}".encode()).hexdigest()[0], 16) < 3:
            raise RunnerError("bad luck")
        text = found[:12]
        if request.sampling.json_schema is not None:
            text = json.dumps({"sections": list(found[: int(found[1], 16) % 3 + 1]), "good": found[2] < "8"})
        yield Event(request.id or "", (1, 2), text)
        reason = FinishReason.STOP
        yield Event(request.id or "", result=Result(request.id or "", (1, 2), text, reason, 10, 0.1, 0.2, 0))


class RandomGraph:
    """A graph of every kind of node, by a seed; `called` counts calls of its functions that give values."""

    def __init__(self, seed: int) -> None:
        self.called: Counter[str] = Counter()
        self._luck = random.Random(seed)
        self.graph = Graph(shared="Rules for {question}", inputs=("documents",))
        self._plain: list[Node] = []  # of agents that write text
        for number in range(self._luck.randint(3, 9)):
            self._luck.choice([self._agent, self._agent, self._map, self._loop, self._branch, self._call, self._hire])(
                number
            )
        self.graph.add(self._writer("editor"), after=self._some(4))

    def _writer(self, name: str, **fields: Any) -> Agent:
        luck = self._luck
        other = Agent("deputy", task="Stand in.", role="deputy")
        policies = [default("nothing"), skip, fallback(other), retry(2, backoff_s=0, then=default("tried")), skip]
        sampling = SamplingParams(max_tokens=8, temperature=luck.choice([0.0, 1.0]))
        role = luck.choice(["", "critic", "poet"])
        task = luck.choice(["Write.", "Write on {question}.", f"Write as {name}."])
        given = {"role": role, "sampling": sampling, "on_failure": luck.choice(policies), "task": task}
        return Agent(name, **{**given, **fields})

    def _some(self, most: int = 2) -> list[Node]:
        nodes = list(self.graph.nodes.values())
        return self._luck.sample(nodes, min(self._luck.randint(0, most), len(nodes)))

    def _agent(self, number: int) -> None:
        continues = self._luck.choice(self._plain) if self._plain and self._luck.random() < 0.4 else None
        self._plain.append(self.graph.add(self._writer(f"a{number}"), after=self._some(), continues=continues))

    def _map(self, number: int) -> None:
        plan = Agent(f"plan{number}", task="Plan.", schema=Outline, on_failure=default(Outline(["x", "y"], True)))
        sources: list[Source] = [Input("documents"), self.graph.add(plan, after=self._some()).sections]
        over = self._luck.choice(sources)
        parts = self.graph.map(self._writer(f"m{number}", task="Write {item} ({index})."), over=over)
        if self._luck.random() < 0.5:
            self.graph.reduce(self._writer(f"r{number}"), over=parts, width=2)

    def _loop(self, number: int) -> None:
        team = [self._writer(f"w{number}"), self._writer(f"c{number}", on_failure=default("00"))]
        self.graph.loop(*team, until=lambda text: text < "6", at_most=3, after=self._some())

    def _branch(self, number: int) -> None:
        judge = Agent(f"j{number}", task="Judge.", schema=Outline, on_failure=default(Outline([], False)))
        on = self.graph.add(judge, after=self._some()).good
        self.graph.branch(on, {True: self._writer(f"yes{number}")}, otherwise=self._writer(f"no{number}"))

    def _call(self, number: int) -> None:
        async def count(run: Any, *outputs: Any) -> Any:
            self.called[f"f{number}"] += 1
            await asyncio.sleep(0)
            return {"seen": [str(output) for output in outputs]}

        self.graph.call(count, after=self._some(), name=f"f{number}")

    def _hire(self, number: int) -> None:
        first, second = self._writer(f"hired{number}"), self._writer(f"hired{number}", role="helper")
        loop = self._writer(f"looper{number}", on_failure=default("0"))

        async def hire(run: Any, *outputs: Any) -> Any:
            parts = [run.add(first), run.add(second)]
            await asyncio.sleep(0)
            looped = run.loop(loop, until=lambda text: text < "8", at_most=2, after=parts)
            return [*parts, looped, run.map(first, over=[str(o) for o in outputs] or ["a"])]

        self.graph.call(hire, after=self._some(), name=f"h{number}")


def facts_of(result: GraphResult) -> dict[str, Any]:
    """What two runs of one graph must agree in."""
    return {name: (one.state, one.value, one.text, one.cause) for name, one in result.outcomes.items()}


async def whole_run(graph: RandomGraph, engine: HashEngine, **settings: Any) -> GraphResult:
    async with graph.graph.start(engine, **settings) as run:
        return await run.result()


def kill_writing(patch: pytest.MonkeyPatch, at: int, share: float) -> Callable[[], bool]:
    """Let the process die in the write number `at`, of which this share gets to the disk. Gives whether it has."""
    writes = 0

    def write(file: io.FileIO, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes < at:
            file.write(data)
        elif writes == at:
            file.write(data[: int(len(data) * share)])
            raise Killed

    patch.setattr(journal, "_write", write)
    return lambda: writes >= at


def killed_and_resumed(seed: int, path: Path) -> int:
    """One random graph: run whole, and once more with kills until it ends. AssertionError where they differ.

    Gives how often it was killed.
    """
    luck = random.Random(f"kills {seed}")
    expected = facts_of(asyncio.run(whole_run(RandomGraph(seed), HashEngine(), seed=seed, **INPUTS)))
    kills, begun = 0, False
    ended: set[str] = set()
    while True:
        graph, engine = RandomGraph(seed), HashEngine()
        with pytest.MonkeyPatch.context() as patch:
            died = kill_writing(patch, luck.randint(1, 12), luck.choice([0.0, luck.random(), 1.0]))
            settings: dict[str, Any] = {"checkpoint": path, "resumed": True} if begun else {"seed": seed, **INPUTS}
            result: GraphResult | None = None
            try:
                result = asyncio.run(whole_run(graph, engine, **{"checkpoint": path, **settings}))
            except Killed:
                kills += 1
        again = [name for name in ended if engine.calls[name] or graph.called[name]]
        assert not again, f"graph {seed}: {again} ran after their ends were recorded"
        if result is not None and not died():
            assert facts_of(result) == expected, f"graph {seed} differs"
            return kills
        begun = path.exists()
        if begun:
            ended = recorded(path)


def recorded(path: Path) -> set[str]:
    """The agents and functions whose ends are in a checkpoint."""
    opened, records = journal.Journal.resume(path)
    opened.close()
    return {record["id"] for record in records if record["kind"] == "ended"}
