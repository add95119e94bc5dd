"""Best of n, with branches given up on the way: eight drafts begin, the first three to finish are judged.

The rest is discarded in the middle of a word: each frees its place in the batch and its memory at the next token.

python examples/best_of_n.py "a slogan for a bicycle shop"
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Literal

from shoal import AsyncEngine, SamplingParams
from shoal.agents import Agent, EventKind, Graph, Node, State

LETTERS = ("A", "B", "C", "D", "E", "F", "G", "H")


async def run(wish: str, model: str, drafts: int, keep: int, max_tokens: int, seed: int | None) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, top_p=0.95)  # each draft gets a seed of its own
    graph = Graph(shared="You write short texts.\nWanted: {wish}", name="best-of-n")
    branches = [
        graph.add(Agent(f"draft-{letter}", task="Write it, in one or two sentences.", sampling=sampling))
        for letter in LETTERS[:drafts]
    ]
    finished: list[Node] = []
    judge: Node | None = None
    async with AsyncEngine.load(model) as engine, graph.start(engine, wish=wish, seed=seed) as running:
        async for event in running:
            node, outcome = event.node, event.outcome
            if event.kind is EventKind.ENDED and node in branches:
                print(f"{node.id} ({outcome.state}) {outcome.text or ''}", flush=True)
                if outcome.state is State.DONE:
                    finished.append(node)
                if judge is None and len(finished) == keep:
                    judge = running.add(referee(finished), after=finished)
                    for branch in branches:
                        running.discard(branch)  # nothing happens to those that have ended
            if event.result and judge:
                best = event.result.outputs[judge.id]
                print(f"\nThe judge takes {best}: {event.result.outputs[best]}")


def referee(finished: list[Node]) -> Agent:
    """A judge who can name nothing but one of the drafts."""
    names = tuple(node.id for node in finished)
    return Agent(
        "judge",
        task="Which of these texts is best? Answer with its name.",
        schema=Literal[names],
        sampling=SamplingParams(max_tokens=16),
        priority="high",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Best of n, the slow ones discarded.")
    parser.add_argument("wish", nargs="?", default="a slogan for a bicycle shop")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafts", type=int, default=8, choices=range(1, 9), help="how many begin")
    parser.add_argument("--keep", type=int, default=3, help="how many are judged")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each draft")
    parser.add_argument("--seed", type=int, help="the same seed writes the same drafts")
    options = parser.parse_args(argv)
    keep = min(options.keep, options.drafts)
    asyncio.run(run(options.wish, options.model, options.drafts, keep, options.max_tokens, options.seed))


if __name__ == "__main__":
    main()
