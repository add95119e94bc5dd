"""Map-reduce over a corpus: one reader per document fills in a form, then the forms are merged, four at a time.

python examples/map_reduce.py                     16 generated documents of about 1,000 tokens
python examples/map_reduce.py notes/*.txt         your own files
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shoal import AsyncEngine, SamplingParams
from shoal.agents import Agent, EventKind, Graph, Input, skip

PLACES = ("Brno", "Porto", "Leeds", "Graz", "Turku", "Ghent", "Cork", "Lyon")
THINGS = ("a bridge", "a library", "a tram line", "a swimming pool", "a market hall", "a hospital wing")
NEWS = (
    "The council of {place} met on Tuesday to talk about {thing}.",
    "Most of the {cost} million needed will come from the region, the rest from a loan.",
    "Work on {thing} is to begin in {year} and to take about eighteen months.",
    "Residents of {place} asked how much traffic the building site will bring.",
    "An engineer showed drawings and said that the ground near the river is soft.",
    "Shop owners fear for their customers while the street is closed.",
    "The mayor of {place} promised a report every month until {thing} is open.",
    "Two members voted against, because they would rather repair the old school first.",
    "Similar plans failed nine years ago when prices rose faster than anybody had thought.",
    "A local paper counted four hundred letters about {thing}, most of them in favour.",
)


@dataclass
class Form:
    """What is to be known of each document. The bounds keep it below 128 tokens."""

    place: Annotated[str, Meta(max_length=20)]
    project: Annotated[str, Meta(max_length=30)]
    year: Annotated[int, Meta(ge=1900, le=2100)]
    summary: Annotated[str, Meta(min_length=150, max_length=240)]
    risk: Annotated[str, Meta(max_length=50)]


def corpus(count: int, tokens: int, seed: int = 0) -> list[str]:
    """Made-up local news: `count` documents of about `tokens` tokens."""
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        facts = {"place": PLACES[number % len(PLACES)], "thing": rng.choice(THINGS)}
        facts |= {"year": str(2026 + rng.randrange(5)), "cost": str(rng.randrange(3, 60))}
        sentences: list[str] = []
        while len(" ".join(sentences).split()) < tokens * 0.8:  # a word is about 1.25 tokens
            sentences += [sentence.format(**facts) for sentence in rng.sample(NEWS, len(NEWS))]
        documents.append(" ".join(sentences))
    return documents


def reading(max_tokens: int) -> Graph:
    graph = Graph(shared="You read local news and answer briefly.", name="map-reduce")
    forms = graph.map(
        Agent(
            "reader",
            task="Fill in the form for this article:\n\n{item}",
            schema=Form,
            sampling=SamplingParams(max_tokens=max_tokens),
            on_failure=skip,  # one unreadable document does not stop the others
        ),
        over=Input("documents"),
    )
    graph.reduce(
        Agent("merger", task="Sum up in two sentences.", sampling=SamplingParams(max_tokens=64), priority="high"),
        over=forms,
        width=4,
    )
    return graph


async def run(documents: list[str], model: str, max_tokens: int, max_batch: int) -> None:
    async with AsyncEngine.load(model, max_batch=max_batch) as engine:
        async for event in reading(max_tokens).stream(engine, documents=documents):
            if event.kind is EventKind.ENDED and event.node.agent and event.node.agent.name == "reader":
                form, cause = event.outcome.value, event.outcome.cause
                print(f"{event.node.id}: {json.dumps(asdict(form)) if form else cause}", flush=True)
            if event.result:
                attempts = [r for r in event.result.records if r["kind"] == "attempt" and r["agent"] == "reader"]
                read, written = (sum(r[f"{kind}_tokens"] for r in attempts) for kind in ("prompt", "generated"))
                print(f"\n{event.result.text}\n")
                print(f"{len(attempts)} documents, {read} tokens read, {written} written, {event.result.wall_s:.1f} s")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Structured extraction from many documents at once.")
    parser.add_argument("files", nargs="*", type=Path, help="text files; generated documents without any")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=16, help="how many to generate")
    parser.add_argument("--tokens", type=int, default=1000, help="of each generated document, about")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each form")
    parser.add_argument("--max-batch", type=int, default=16, help="documents read at a time")
    options = parser.parse_args(argv)
    documents = [file.read_text() for file in options.files] or corpus(options.documents, options.tokens)
    asyncio.run(run(documents, options.model, options.max_tokens, options.max_batch))


if __name__ == "__main__":
    main()
