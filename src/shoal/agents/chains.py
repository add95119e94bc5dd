"""Two models on the same chain of agents: where their outputs part, what fits its schema, how long, how much.

In a chain an error feeds the next agent: what two precisions agree on alone they may not agree on at its end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.agents.build.graph import Graph
from shoal.agents.rollout.compare import same_words
from shoal.agents.run.events import GraphResult, Outcome
from shoal.agents.trace.summary import TraceSummary, summarise
from shoal.agents.trace.trace import Trace
from shoal.engine.aio import AsyncEngine
from shoal.engine.engine import Engine
from shoal.errors import GraphError

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChainSide:
    """One model's runs: the numbers of its trace, seconds of a run (median), memory and energy.

    memory_bytes is what its memory budget counts; joules are of all runs, None where no sensor counts them.
    """

    model: str
    precision: str
    trace: TraceSummary
    run_s: float
    memory_bytes: int
    joules: float | None
    results: tuple[GraphResult, ...]


@dataclass(frozen=True, slots=True)
class NodeAgreement:
    """One node over all runs: words that both models have in the same order (a share, mean), and equal outputs."""

    words: float
    equal: float
    runs: int


@dataclass(frozen=True, slots=True)
class ChainComparison:
    """Both sides, and each node that both ran, in the order of the graph."""

    first: ChainSide
    second: ChainSide
    nodes: dict[str, NodeAgreement]


async def compare_chains(
    load: Callable[[str], Engine],
    first: str,
    second: str,
    graph: Graph,
    inputs: Sequence[Inputs],
    *,
    seed: int = 0,
    joules: Callable[[], float | None] = lambda: None,
) -> ChainComparison:
    """Run a graph with each of `inputs` on two models, one loaded at a time. Raises as loading and `Graph.run` do."""
    if not inputs:
        raise GraphError("there are no inputs to run the graph with", hint="give one JSON object a line")
    sides = [await _side(load, name, graph, inputs, seed, joules) for name in (first, second)]
    theirs, own = sides
    nodes: dict[str, list[tuple[str, str]]] = {}
    for a, b in zip(theirs.results, own.results, strict=True):
        for name, outcome in a.outcomes.items():
            if name in b.outcomes:
                nodes.setdefault(name, []).append((_shown(outcome), _shown(b.outcomes[name])))
    return ChainComparison(theirs, own, {name: _agreement(pairs) for name, pairs in nodes.items()})


async def _side(
    load: Callable[[str], Engine],
    name: str,
    graph: Graph,
    inputs: Sequence[Inputs],
    seed: int,
    joules: Callable[[], float | None],
) -> ChainSide:
    trace = Trace()
    async with AsyncEngine(load(name)) as engine:
        before = joules()
        results = []
        for number, given in enumerate(inputs):
            task = f"{graph.name}-{number}"  # the same on both sides: so are all seeds
            results.append(await graph.run(engine, trace=trace, task_id=task, seed=seed + number, **given))
        after = joules()
        return ChainSide(
            name,
            engine.spec.precision,
            summarise(trace.records),
            statistics.median(result.wall_s for result in results),
            engine.stats().memory_bytes,
            None if before is None or after is None else after - before,
            tuple(results),
        )


def _shown(outcome: Outcome) -> str:
    """What a node gave, as text; its state where it gave nothing."""
    return str(outcome.shown) if outcome.value is not None else str(outcome.state)


def _agreement(pairs: Sequence[tuple[str, str]]) -> NodeAgreement:
    words = statistics.fmean(same_words(a, b) for a, b in pairs)
    return NodeAgreement(words, sum(a == b for a, b in pairs) / len(pairs), len(pairs))
