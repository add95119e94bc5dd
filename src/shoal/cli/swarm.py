"""`shoal swarm`: one question, up to eight specialists, one batch."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import Interrupts, describe, load_engine, pace, print_json

if TYPE_CHECKING:
    from shoal.agents.cards import Card
    from shoal.agents.swarm import Swarm
    from shoal.cli.screen import Screen
    from shoal.engine.engine import Engine

_FRAME_S = 0.15  # seven frames a second: more would take time from the model and show nothing


def swarm(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What all specialists answer.")],
    agents: Annotated[int, typer.Option("--agents", "-n", help="How many specialists, 1 to 8.")] = 8,
    model: options.Model = options.DEFAULT_MODEL,
    max_tokens: options.MaxTokens = 160,
    temperature: options.Temperature = 0.4,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers; another one others.")] = 0,
    serial: Annotated[
        bool, typer.Option("--serial", help="One agent after another, all else equal, to compare with.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")
    ] = False,
    kv_memory: options.KVMemory = options.KV_MEMORY,
    threads: options.Threads = None,
    governor: options.Governor = False,
    joules: options.Joules = None,
    battery: options.Battery = None,
) -> None:
    """Ask one question of up to eight specialists at once; each card streams as its tokens appear."""
    with Interrupts() as interrupts:
        from shoal.agents.swarm import Swarm, specialists, swarm_sampling
        from shoal.cli.screen import make_screen

        sampling = swarm_sampling(max_tokens, temperature, seed)
        work = Swarm(question, specialists(agents), sampling, serial=serial)
        with make_screen(question, model, work, quiet=as_json) as screen:
            settings = {"threads": threads, "max_batch": agents, "power": options.power(governor, joules, battery)}
            with load_engine(model, kv_memory=kv_memory, **settings) as engine:
                interrupts.hold()
                asyncio.run(_follow(work, engine, screen, interrupts))
                paced = engine.governor.describe() if engine.governor is not None else None
            screen.end()
    if as_json:
        print_json({**document(question, model, work), **({} if paced is None else {"power": paced})})
    _exit(work)


async def _follow(work: Swarm, engine: Engine, screen: Screen, interrupts: Interrupts) -> None:
    """Run the agents and show them until all have ended; the first Ctrl-C ends them at the next token."""
    work.start(engine)
    aborted = False
    while not work.finished:
        if interrupts.wanted and not aborted:
            work.abort()
            aborted = True
        ended = await work.pump(_FRAME_S)
        screen.show(ended, pace(engine))


def document(question: str, model: str, work: Swarm) -> dict[str, Any]:
    """What `--json` prints."""
    summary = work.summary()
    return {
        "question": question,
        "model": model,
        "agents": [_agent(card) for card in work.cards],
        "tokens": summary.tokens,
        "wall_s": round(summary.wall_s, 4),
        "tokens_per_s": round(summary.tokens_per_s, 2),
        "prefix_tokens": summary.prefix_tokens,
    }


def _agent(card: Card) -> dict[str, Any]:
    result = card.result
    ttft = None if result is None else result.ttft_s
    return {
        "name": card.name,
        "text": card.text,
        "tokens": card.tokens,
        "finish_reason": "aborted" if result is None else str(result.finish_reason),
        "ttft_s": None if ttft is None else round(ttft, 4),
        "cached_tokens": 0 if result is None else result.cached_tokens,
    }


def _exit(work: Swarm) -> None:
    """End with status 130 when agents were aborted, 2 when one failed. A Ctrl-C that came too late changes nothing."""
    aborted = [card.name for card in work.cards if card.state == "aborted"]
    failures = work.failures()
    if aborted:
        print(f"interrupted; aborted: {', '.join(aborted)}", file=sys.stderr)
        raise typer.Exit(130)
    if failures:
        print(f"{len(failures)} of {len(work.cards)} agents failed\n{describe(failures[0])}", file=sys.stderr)
        raise typer.Exit(2)
