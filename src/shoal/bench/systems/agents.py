"""A graph of agents on this engine: a planner, three writers, a reviewer, an editor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from shoal.agents import Agent, Graph
from shoal.bench.systems.base import Measured, Setup
from shoal.bench.systems.ours import Shoal
from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job
from shoal.engine.aio import AsyncEngine
from shoal.errors import BenchmarkError
from shoal.models import Store, load_tokenizer
from shoal.runners.plan import ModelSpec
from shoal.types import Event, Request, Result, SamplingParams

PAGES = 4  # a section is so many times as long as what the others write
SECTIONS = ("what is known", "what is disputed", "what follows")
CALLS = len(SECTIONS) + 3


class Agents(Shoal):
    """The jobs' shared beginning is what all agents are told; each writes as many tokens as a job says, the
    writers four times as many.

    `independent` runs the same graph without hints on an engine without sharing, as separate requests to any batching
    engine would; `serial` runs it there one request at a time.
    """

    VARIANTS: ClassVar[dict[str, str]] = {
        "graph": "as a graph in the engine",
        "independent": "as independent requests, no sharing",
        "serial": "one call after another, no sharing",
    }

    def __init__(self, source: Measured) -> None:
        super().__init__(source)
        self._tokenizer = load_tokenizer(Store().resolve(source.model))
        self._way = "graph"

    def prepare(self, setup: Setup) -> None:
        """Load the engine in the form that the variant wants."""
        self._way = setup.variant
        streams = 1 if self._way == "serial" else setup.streams
        shared = "" if self._way == "graph" else "unshared"
        super().prepare(Setup(streams, setup.length, setup.trunk, setup.kv_bytes, shared))

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Run the level's graphs at once; a trace for each call, in the order of their names."""
        self.engine.suspend(drop_kv=True)
        self.engine.resume()
        rules = self._tokenizer.decode(jobs[0].prompt[: len(jobs[0].prompt) * 9 // 10])
        heard = (_Hinted if self._way == "graph" else _Heard)(AsyncEngine(self.engine))
        begin = time.perf_counter()
        graphs = max(1, len(jobs) // CALLS)
        asyncio.run(_all(rules, jobs[0].max_tokens, heard, graphs))
        wall_s = time.perf_counter() - begin
        calls = [heard.calls[name] for name in sorted(heard.calls)]
        if len(calls) != graphs * CALLS:
            raise BenchmarkError("the graphs made another number of calls", value=len(calls), limit=graphs * CALLS)
        traces = [TokenTimes(t.arrival_s - begin, t.tokens, [at - begin for at in t.times]) for t, _ in calls]
        results = [result for _, result in calls]
        cached = sum(result.receipt.cached_tokens for result in results)
        computed = sum(result.receipt.computed_tokens for result in results)
        share = cached / max(sum(result.prompt_tokens for result in results), 1)
        facts = {"hit_rate": share, "computed_tokens": computed, **per_minute(graphs, wall_s)}
        return RunTimes(traces, wall_s, facts)


async def _all(rules: str, count: int, engine: _Heard, graphs: int) -> None:
    """As many reports at once, each a run of its own."""
    runs = (_report(rules, count).run(engine, task_id=f"bench-{i}", question="the harbour") for i in range(graphs))
    await asyncio.gather(*runs)


def per_minute(graphs: int, wall_s: float) -> dict[str, float]:
    """Whole graphs and agents' calls a minute."""
    return {"graphs_per_minute": 60 * graphs / wall_s, "calls_per_minute": 60 * graphs * CALLS / wall_s}


def _report(rules: str, count: int) -> Graph:
    """The graph; lengths are fixed, so that all ways compute the same."""
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    long = SamplingParams(max_tokens=PAGES * count, ignore_eos=True)
    graph = Graph(shared=rules, name="report")
    plan = graph.add(Agent("planner", task="Outline a short report about {question}.", sampling=sampling))
    writer = Agent("writer", role="You write plainly.", task="Write the section on {item}.", sampling=long)
    parts = graph.map(writer, over=list(SECTIONS), after=plan)
    review = graph.add(Agent("reviewer", task="Say what is inconsistent.", sampling=sampling), after=parts)
    graph.add(Agent("editor", task="Merge the sections.", sampling=sampling, priority="high"), after=[parts, review])
    return graph


class _Heard:
    """An engine that writes down when each call began and when its tokens came. It takes no hints."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.calls: dict[str, tuple[TokenTimes, Result]] = {}

    @property
    def spec(self) -> ModelSpec:
        """As the engine's."""
        return self.engine.spec

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """As the engine's."""
        trace = TokenTimes(time.perf_counter())
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                trace.add(event.tokens, time.perf_counter())
                if event.result is not None:
                    self.calls[event.request_id] = (trace, event.result)
                yield event


class _Hinted(_Heard):
    """The same, and hints go through."""

    async def expect(self, prompts: Sequence[Any], **hints: Any) -> Any:
        """As the engine's."""
        return await self.engine.expect(prompts, **hints)
