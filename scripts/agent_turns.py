#!/usr/bin/env python
"""A replay of agents' traffic: hits, and what a turn costs as the history grows; llama.cpp's server beside it.

    scripts/agent_turns.py [--model smollm2-135m] [--tokens 7000] [--turns 40] [--server LLAMA_SERVER]

Four agents side by side, each with turns of 60 to 400 new tokens (more where so few turns must come to `--tokens`) and
16 written ones, with pauses between as if tools ran. The first turn of all begins with the same `--shared` tokens, as
agents of one program do. All ask at once, and a turn counts from there. `--server` is the
program `llama-server`: it gets the same turns over HTTP, a slot with its own prompt cache for each agent. Each side
ends after `--seconds`; what both have done is compared. Progress goes to standard error, one JSON document to standard
output:

- `hits`: the share of prompt tokens that were not computed; `seen`: the share that had been computed or written before;
- `median_turn_s`; `ratio` is ours over theirs, over the turns that both have done;
- `growth`: by how much the history makes the last turn longer than the first, as a share of the median turn, from a
  least-squares fit of a round's time over its new tokens and the tokens before them; `growth_per_1000` by how much for
  each 1,000 tokens of history.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.engine.engine import Engine
from shoal.models import Store
from shoal.types import Request, SamplingParams

WRITTEN = 16
LEAST, MOST = 60, 400  # new tokens of a turn
Ask = Callable[[int, list[int]], tuple[list[int], int]]
"""(agent, prompt) to the tokens written and the number of prompt tokens that were not computed."""


@dataclass
class Figures:
    """What one side took: seconds by (round, agent), and for each round its length, new tokens and history."""

    turns: dict[tuple[int, int], float] = field(default_factory=dict)
    rounds: list[tuple[float, int, int]] = field(default_factory=list)
    cached: int = 0
    seen: int = 0
    prompts: int = 0

    def told(self) -> dict[str, Any]:
        """In numbers."""
        median = statistics.median(self.turns.values())
        told = {
            "rounds": len(self.rounds),
            "hits": round(self.cached / self.prompts, 4),
            "seen": round(self.seen / self.prompts, 4),
            "median_turn_s": round(median, 3),
        }
        if len(self.rounds) < 4:
            return told  # too few for a fit of three numbers
        rounds = np.array(self.rounds[1:])  # in the first there is nothing to be reused
        terms = np.stack([np.ones(len(rounds)), rounds[:, 1], rounds[:, 2]], axis=1)
        (_, _, a_token), *_ = np.linalg.lstsq(terms, rounds[:, 0], rcond=None)
        typical = statistics.median(rounds[:, 0])
        grown = rounds[-1, 2] - rounds[0, 2]
        return told | {
            "growth": round(float(a_token * grown / typical), 4),
            "growth_per_1000": round(float(a_token * 1000 / typical), 4),
        }


def news(options: argparse.Namespace, vocab: int) -> list[list[list[int]]]:
    """What each agent is given on each turn: random token ids, so that all of an agent's come to about `tokens`."""
    luck = random.Random(1)
    target = options.tokens - options.shared - options.turns * WRITTEN
    common = [luck.randrange(300, vocab - 300) for _ in range(options.shared)]
    made = []
    for _ in range(options.agents):
        plain = [LEAST * (MOST / LEAST) ** luck.random() for _ in range(options.turns)]  # most turns are short
        factor = target / sum(plain)
        sizes = [round(max(LEAST, size * factor)) for size in plain]
        given = [[luck.randrange(300, vocab - 300) for _ in range(size)] for size in sizes]
        made.append([common + given[0], *given[1:]])
    return made


def replay(name: str, agents: list[list[list[int]]], shared: int, ask: Ask, seconds: float) -> Figures:
    """Let all agents live their turns, all of a round at once, until the time is up."""
    took, begun = Figures(), time.perf_counter()
    chats: list[list[int]] = [[] for _ in agents]

    def turn(agent: int, number: int) -> tuple[float, int, int]:
        time.sleep(random.Random(number * 97 + agent).random() * 0.05)  # a tool
        chats[agent] += agents[agent][number]
        prompt, at = chats[agent][:], time.perf_counter()
        written, cached = ask(agent, prompt)
        chats[agent] += written
        return time.perf_counter() - at, cached, len(prompt)

    with ThreadPoolExecutor(len(agents)) as pool:
        for number in range(len(agents[0])):
            history = sum(map(len, chats)) // len(chats)
            done = list(pool.map(turn, range(len(agents)), [number] * len(agents)))
            took.turns |= {(number, agent): one[0] for agent, one in enumerate(done)}
            took.rounds.append((max(one[0] for one in done), sum(len(given[number]) for given in agents), history))
            took.cached += sum(one[1] for one in done)
            took.seen += sum(one[2] - len(given[number]) for one, given in zip(done, agents, strict=True))
            took.seen += 0 if number else shared * (len(agents) - 1)
            took.prompts += sum(one[2] for one in done)
            spent = time.perf_counter() - begun
            said = (
                f"{name}: turn {number + 1}, {history} tokens before: {took.rounds[-1][0]:.2f} s, {spent:.0f} s so far"
            )
            print(said, file=sys.stderr, flush=True)
            if spent > seconds:
                break
    return took


def ours(options: argparse.Namespace) -> tuple[Figures, list[list[list[int]]]]:
    """Our engine, in this process, with memory for all agents."""
    with Engine.load(options.model, threads=options.threads, kv_memory="64MiB") as probe:
        spec = probe.spec
    agents = news(options, spec.vocab_size)
    room = sum(sum(map(len, given)) + WRITTEN * len(given) + 2 * spec.block_size for given in agents)
    memory = options.kv_memory or spec.kv_bytes_per_token * (room + 1024)
    sampling = SamplingParams(max_tokens=WRITTEN, temperature=0.0, ignore_eos=True)
    with Engine.load(options.model, threads=options.threads, kv_memory=memory) as engine:

        def ask(_: int, prompt: list[int]) -> tuple[list[int], int]:
            result = engine.complete(Request(prompt_tokens=prompt, sampling=sampling, keep_s=300))
            return list(result.tokens), result.cached_tokens

        return replay("shoal", agents, options.shared, ask, options.seconds), agents


@contextlib.contextmanager
def llama(options: argparse.Namespace, longest: int) -> Iterator[str]:
    """`llama-server` with a slot for each agent; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(Store().resolve(options.model, pull=False).path)
    command = [options.server, "-m", path, "--port", str(port), "-np", str(options.agents), "-t", str(options.threads)]
    command += ["-c", str(options.agents * longest), "--no-webui"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{options.server} did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.kill()


def theirs(url: str, agents: list[list[list[int]]], options: argparse.Namespace) -> Figures:
    """The same turns, each agent's in its own slot."""

    def ask(agent: int, prompt: list[int]) -> tuple[list[int], int]:
        body = {"prompt": prompt, "n_predict": WRITTEN, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        data = json.dumps({**body, "id_slot": agent, "cache_prompt": True}).encode()
        request = urllib.request.Request(f"{url}/completion", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1800) as answer:
            told = json.load(answer)
        assert len(told["tokens"]) == WRITTEN, told
        return told["tokens"], len(prompt) - told["timings"]["prompt_n"]

    return replay("llama-server", agents, options.shared, ask, options.seconds)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name in the store, or a GGUF file")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=7000, help="of each agent at the end, at least")
    parser.add_argument("--shared", type=int, default=1000, help="of these, what all agents begin with")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", help="room for all agents unless given")
    parser.add_argument("--seconds", type=float, default=900, help="after which each side ends with the turn it is at")
    parser.add_argument("--server", help="the program llama-server, to be measured beside")
    options = parser.parse_args()
    mine, agents = ours(options)
    reached = [sum(map(len, given)) + WRITTEN * len(given) for given in agents]
    told: dict[str, Any] = {"model": options.model, "agents": options.agents, "tokens_planned": min(reached)}
    told |= {"tokens": mine.rounds[-1][2], "shoal": mine.told()}
    if options.server:
        with llama(options, max(reached) + 64) as url:
            peer = theirs(url, agents, options)
        both = sorted(mine.turns.keys() & peer.turns.keys())
        medians = [statistics.median(side.turns[one] for one in both) for side in (mine, peer)]
        told |= {"llama_server": peer.told(), "turns_of_both": len(both), "ratio": round(medians[0] / medians[1], 3)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
