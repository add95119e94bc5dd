"""A planner and three critics: a plan is drafted, criticised from three sides at once, and revised by who wrote it.

The revision goes on from the planner's own conversation, so it pays only for what the critics wrote.

python examples/critics.py "open a bakery"
"""

from __future__ import annotations

import argparse
import asyncio

from shoal import AsyncEngine, SamplingParams
from shoal.agents import Agent, EventKind, Graph, skip

VIEWS = ("the cost", "the time it takes", "what could go wrong")


def planning(max_tokens: int) -> Graph:
    sampling = SamplingParams(max_tokens=max_tokens)
    graph = Graph(shared="You help to plan. Be brief and concrete.\nGoal: {goal}", name="critics")
    draft = graph.add(Agent("planner", task="Write a plan with three short steps.", sampling=sampling))
    critics = graph.map(
        Agent(
            "critic",
            task="Look only at {item}. In one sentence, name the weakest step of this plan and why.",
            sampling=sampling,
            timeout_s=60,
            on_failure=skip,  # two critics will do
        ),
        over=list(VIEWS),
        after=draft,
    )
    graph.add(
        Agent(
            "revision", task="Rewrite your plan so that it answers these remarks.", sampling=sampling, priority="high"
        ),
        after=critics,
        continues=draft,
    )
    return graph


async def run(goal: str, model: str, max_tokens: int) -> None:
    async with AsyncEngine.load(model) as engine:
        async for event in planning(max_tokens).stream(engine, goal=goal):
            if event.kind is EventKind.ENDED and event.node.agent:  # not the map itself
                print(f"== {event.node.id} ({event.outcome.state})\n{event.outcome.shown}\n", flush=True)
            if event.kind is EventKind.ATTEMPT and event.record["agent"] == "revision":
                cached, prompt = event.record["prefix_tokens"], event.record["prompt_tokens"]
                print(f"(the revision found {cached} of its {prompt} prompt tokens computed)\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A planner with three critics.")
    parser.add_argument("goal", nargs="?", default="open a bakery")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each agent")
    options = parser.parse_args(argv)
    asyncio.run(run(options.goal, options.model, options.max_tokens))


if __name__ == "__main__":
    main()
