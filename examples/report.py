"""A short report by a team: a planner, three writers at once, a reviewer, and an editor who merges it all.

python examples/report.py "How can a small town use less water?"
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from shoal import AsyncEngine, SamplingParams
from shoal.agents import Agent, EventKind, Graph, Trace, default, retry

Title = Annotated[str, Meta(min_length=4, max_length=40)]


@dataclass
class Outline:
    sections: Annotated[list[Title], Meta(min_length=3, max_length=3)]


def report(max_tokens: int) -> Graph:
    """The team, and who waits for whom."""
    sampling = SamplingParams(max_tokens=max_tokens)
    graph = Graph(shared="You are one of a team that answers a question together.\nQuestion: {question}", name="report")
    plan = graph.add(
        Agent(
            "planner",
            task="Give the titles of three sections of a short answer.",
            schema=Outline,
            sampling=SamplingParams(max_tokens=80, temperature=0.3),
            on_failure=retry(2),  # sampled, so that a second attempt writes something else
        )
    )
    parts = graph.map(
        Agent("writer", task="Write two sentences for the section: {item}", sampling=sampling, timeout_s=60),
        over=plan.sections,
    )
    review = graph.add(
        Agent(
            "reviewer",
            task="In one sentence, say what these sections leave out.",
            sampling=sampling,
            on_failure=default("no remarks"),  # a report without a review is better than none
        ),
        after=parts,
    )
    graph.add(
        Agent("editor", task="Merge the sections into one short answer.", sampling=sampling, priority="high"),
        after=[parts, review],
    )
    return graph


async def run(question: str, model: str, max_tokens: int, seed: int | None, trace: str | None) -> None:
    with Trace(trace) as records:
        async with AsyncEngine.load(model) as engine:
            async for event in report(max_tokens).stream(engine, question=question, seed=seed, trace=records):
                if event.kind is EventKind.ENDED and event.node.agent:  # not the map itself
                    print(f"== {event.node.id} ({event.outcome.state})\n{event.outcome.shown}\n", flush=True)
                if event.result:
                    shared = sum(r["prefix_tokens"] for r in event.result.records if r["kind"] == "attempt")
                    print(f"{event.result.wall_s:.1f} s, {shared} prompt tokens were there already")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A planner, three writers, a reviewer and an editor.")
    parser.add_argument("question", nargs="?", default="How can a small town use less water?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each agent")
    parser.add_argument("--seed", type=int, help="the same seed writes the same report")
    parser.add_argument("--trace", help="write every attempt to this file; `shoal trace FILE` draws it")
    options = parser.parse_args(argv)
    asyncio.run(run(options.question, options.model, options.max_tokens, options.seed, options.trace))


if __name__ == "__main__":
    main()
