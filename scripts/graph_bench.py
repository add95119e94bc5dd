"""What a graph of agents costs and saves: `python -m scripts.graph_bench [wall|overhead] [--runs N]`.

wall: planner, three writers, reviewer and editor over 1,000 shared tokens on the real model, greedy and of fixed
lengths, so that every variant computes the same tokens. Each run is cold.
overhead: what a node costs beside its engine, on an engine that answers at once, with and without hints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from scripts.measure.common import forget, load, median, spread

from shoal import AsyncEngine, Engine, Request, Result, SamplingParams
from shoal.agents import Agent, Graph
from shoal.config import EngineConfig
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ModelSpec
from shoal.types import Event, FinishReason

RULES = "You write a report for a town of twelve thousand people together with others; keep to plain words. "
LENGTHS = {"planner": 32, "writer": 640, "reviewer": 32, "editor": 64}
"""Tokens written: three sections of a page each, and little around them."""


class Plain:
    """Only the face of an engine: no hints. Keeps the requests, to do the same calls again."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        return self._engine.generate(request)


def report(words: int) -> Graph:
    """The graph: about 1.3 tokens a word are shared."""

    def agent(name: str, role: str, task: str) -> Agent:
        return Agent(name, role=role, task=task, sampling=SamplingParams(max_tokens=LENGTHS[name], ignore_eos=True))

    shared = " ".join(f"{RULES}Fact {i}: the budget has {7 * i + 3} posts." for i in range(words // 24))
    graph = Graph(shared)
    plan = graph.add(agent("planner", "You plan.", "Outline the report."))
    parts = graph.map(
        agent("writer", "You write one section.", "Write about {item}."),
        over=["benefits", "costs", "advice"],
        after=plan,
    )
    review = graph.add(agent("reviewer", "You check.", "Name what is missing."), after=parts)
    graph.add(agent("editor", "You edit.", "Merge the sections."), after=[parts, review])
    return graph


def wall(runs: int) -> dict[str, Any]:
    """Seconds of the graph, of its calls one after another, and of the graph without sharing, in turns."""
    graph = report(760)
    with load() as on, load(prefix_sharing=False) as off:
        sharing, alone = AsyncEngine(on), AsyncEngine(off)
        recorder = Plain(alone)
        first = asyncio.run(graph.run(recorder))
        calls = recorder.requests

        async def serially(engine: AsyncEngine) -> None:
            for call in calls:
                await engine.complete(call)

        measures: dict[str, tuple[Engine, Callable[[], Awaitable[Any]]]] = {
            "graph": (on, lambda: graph.run(sharing)),
            "one after another, no sharing": (off, lambda: serially(alone)),
            "one after another, sharing": (on, lambda: serially(sharing)),
            "concurrent, no sharing": (off, lambda: graph.run(Plain(alone))),
        }
        seconds: dict[str, list[float]] = {name: [] for name in measures}
        outputs = set()
        for number in range(runs + 1):
            for name, (engine, measure) in measures.items():
                forget(engine)
                time.sleep(0.3)
                begin = time.perf_counter()
                result = asyncio.run(_to_end(measure))
                if number:
                    seconds[name].append(time.perf_counter() - begin)
                if name == "graph":
                    outputs.add(result.text == first.text)
                    attempts = [r for r in result.records if r["kind"] == "attempt"]
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "wall_s": {name: spread(values) for name, values in seconds.items()},
        "ratio_of_medians": {n: round(median(seconds["graph"]) / median(v), 3) for n, v in seconds.items()},
        "ratio_of_best": {n: round(best["graph"] / v, 3) for n, v in best.items()},
        "same_text_as_without_sharing": outputs == {True},
        "prompt_tokens": {r["agent_id"]: f"{r['prefix_tokens']} of {r['prompt_tokens']} cached" for r in attempts},
    }


async def _to_end(measure: Callable[[], Awaitable[Any]]) -> Any:
    return await measure()


class Instant:
    """Answers at once, on the event loop: all that is left is the graph's own work."""

    spec = FakeRunner().spec

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        name = request.id or ""
        yield Event(name, (1,), "text")
        yield Event(name, result=Result(name, (1,), "text", FinishReason.STOP, 9, 0.0, 0.0, 0))


def overhead(runs: int) -> dict[str, Any]:
    """Milliseconds a node: chains and fans of 200 on an instant engine; a chain against bare calls on the toy model."""
    figures: dict[str, list[float]] = {"chain": [], "fan": [], "toy graph": [], "toy calls": []}
    one = SamplingParams(max_tokens=1, ignore_eos=True)

    def chain(count: int) -> Graph:
        graph = Graph("Rules that all have in common, and that are longer than a block of the toy model's KV. ")
        last = graph.add(Agent("a", task="Begin", sampling=one))
        for i in range(count - 1):
            last = graph.add(Agent("a", task=f"Go on {i}", sampling=one), after=last)
        return graph

    def fan(count: int) -> Graph:
        graph = Graph("Rules that all have in common, and that are longer than a block of the toy model's KV. ")
        parts = graph.map(Agent("w", task="Write {item}", sampling=one), over=list(range(count - 2)))
        graph.add(Agent("end", task="Sum up", sampling=one), after=parts)
        return graph

    count = 200
    for _ in range(runs):
        for name, graph in (("chain", chain(count)), ("fan", fan(count))):
            begin = time.perf_counter()
            asyncio.run(graph.run(Instant()))
            figures[name].append((time.perf_counter() - begin) * 1e3 / count)
        with Engine(lambda: FakeRunner(num_blocks=4096), ByteTokenizer(), EngineConfig()) as engine:
            face = AsyncEngine(engine)
            recorder = Plain(face)
            asyncio.run(chain(count).run(recorder))
            forget(engine)
            begin = time.perf_counter()
            asyncio.run(chain(count).run(face))
            figures["toy graph"].append((time.perf_counter() - begin) * 1e3 / count)
            forget(engine)
            begin = time.perf_counter()
            asyncio.run(_calls(face, recorder.requests))
            figures["toy calls"].append((time.perf_counter() - begin) * 1e3 / count)
    added = median(figures["toy graph"]) - median(figures["toy calls"])
    return {"ms_per_node": {name: spread(values) for name, values in figures.items()}, "added_ms": round(added, 3)}


async def _calls(engine: AsyncEngine, requests: list[Request]) -> None:
    for request in requests:
        await engine.complete(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["wall", "overhead"])
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    measure = {"wall": wall, "overhead": overhead}[given.what]
    print(json.dumps({given.what: measure(given.runs)}, indent=1))


if __name__ == "__main__":
    main()
