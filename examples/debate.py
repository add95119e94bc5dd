"""A debate: two sides open at the same time, answer each other for some rounds, and a judge decides.

Each side goes on in its own conversation, so that a round costs only what is new.

python examples/debate.py "Should homework be abolished?"
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from shoal import AsyncEngine, SamplingParams
from shoal.agents import Agent, EventKind, Graph

SIDES = {"for": "You argue for yes.", "against": "You argue for no."}


@dataclass
class Verdict:
    winner: Literal["for", "against"]
    reason: Annotated[str, Meta(min_length=10, max_length=160)]


def debate(rounds: int, max_tokens: int) -> Graph:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=1)
    graph = Graph(shared="This is a debate. Speak in two sentences at most.\nQuestion: {question}", name="debate")
    open_with = "Give your strongest argument."
    said = {side: graph.add(Agent(side, role=role, task=open_with, sampling=sampling)) for side, role in SIDES.items()}
    every = list(said.values())
    for _ in range(rounds):
        before = dict(said)  # both answer what was said last, at the same time
        for side, other in (("for", "against"), ("against", "for")):
            answer = Agent(f"{side}-again", role=SIDES[side], task="Answer your opponent.", sampling=sampling)
            said[side] = graph.add(answer, after=before[other], continues=before[side])
        every += said.values()
    graph.add(
        Agent(
            "judge",
            task="Who argued better?",
            schema=Verdict,
            sampling=SamplingParams(max_tokens=96),
            priority="high",
        ),
        after=every,
    )
    return graph


async def run(question: str, model: str, rounds: int, max_tokens: int) -> None:
    async with AsyncEngine.load(model) as engine:
        async for event in debate(rounds, max_tokens).stream(engine, question=question):
            if event.kind is EventKind.ENDED:
                print(f"== {event.node.id}\n{event.outcome.shown}\n", flush=True)
            if event.result:
                verdict = event.result.output
                print(f"The judge sides with {verdict.winner}.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A debate of two sides before a judge.")
    parser.add_argument("question", nargs="?", default="Should homework be abolished?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2, help="of answers after the opening")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each speech")
    options = parser.parse_args(argv)
    asyncio.run(run(options.question, options.model, options.rounds, options.max_tokens))


if __name__ == "__main__":
    main()
