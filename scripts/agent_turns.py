#!/usr/bin/env python
"""A replay of agents' traffic: hits, and what a turn costs as the history grows; llama.cpp beside it if asked for.

    scripts/agent_turns.py [--model smollm2-135m] [--tokens 7000] [--turns 40] [--peer PYTHON]

Four agents side by side, each with turns of 60 to 400 new tokens and 16 written ones, with pauses between, until each
has at least so many tokens. `--peer` is a Python with llama-cpp-python: there each agent has a context of its own in
one process, whose KV is kept between turns (a server's slots, without the HTTP and without batching). All four ask at
once, and a turn counts from there, as it does here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from shoal.engine.engine import Engine
from shoal.models import Store
from shoal.types import Request, SamplingParams

AGENTS, WRITTEN = 4, 16
PEER = """
import json, sys, time
from llama_cpp import Llama
job = json.load(sys.stdin)
models = [Llama(job["path"], n_ctx=job["context"], n_threads=job["threads"], verbose=False) for _ in job["agents"]]
times = []
for turn in range(len(job["agents"][0])):
    begun = time.perf_counter()
    for model, new in zip(models, job["agents"]):
        model.eval(new[turn])  # behind what the context holds already
        for _ in range(job["written"]):
            model.eval([model.sample(temp=0.0)])
        times.append([turn, time.perf_counter() - begun])
print(json.dumps(times))
"""


def news(turns: int, tokens: int, vocab: int) -> list[list[list[int]]]:
    """What each agent is given on each turn: random token ids, 60 to 400 a turn, so that all come to `tokens`."""
    luck, least = random.Random(1), 60
    made = []
    for _ in range(AGENTS):
        sizes = [luck.randint(least, 400) for _ in range(turns)]
        while sum(sizes) + turns * WRITTEN < tokens and min(sizes) < 400:
            at = luck.randrange(turns)
            sizes[at] = min(400, sizes[at] + 50)
        if sum(sizes) + turns * WRITTEN < tokens:  # more than 400 a turn are needed
            sizes = [tokens // turns] * turns
        made.append([[luck.randrange(300, vocab - 300) for _ in range(size)] for size in sizes])
    return made


def slope(times: list[tuple[int, float]]) -> float:
    """By how much a turn costs more at the end of the history than at its beginning, as a share of the median."""
    first = [seconds for turn, seconds in times if 0 < turn <= 8]
    last = [seconds for turn, seconds in times if turn > max(turn for turn, _ in times) - 8]
    middle = statistics.median(seconds for _, seconds in times)
    return (statistics.median(last) - statistics.median(first)) / middle


def ours(engine: Engine, agents: list[list[list[int]]]) -> tuple[list[tuple[int, float]], float]:
    """Times of turns, and the share of prompt tokens that were there."""

    def live(given: list[list[int]]) -> tuple[list[tuple[int, float]], int, int]:
        tokens: list[int] = []
        times, cached, prompts = [], 0, 0
        for turn, new in enumerate(given):
            tokens += new
            begun = time.perf_counter()
            result = engine.complete(
                Request(
                    prompt_tokens=tokens,
                    sampling=SamplingParams(max_tokens=WRITTEN, temperature=0.0, ignore_eos=True),
                    keep_s=300,
                )
            )
            times.append((turn, time.perf_counter() - begun))
            cached += result.cached_tokens
            prompts += len(tokens)
            tokens += result.tokens
            time.sleep(random.Random(turn).random() * 0.05)  # a tool
        return times, cached, prompts

    with ThreadPoolExecutor(AGENTS) as pool:
        done = list(pool.map(live, agents))
    return [one for times, _, _ in done for one in times], sum(d[1] for d in done) / sum(d[2] for d in done)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name in the store, or a GGUF file")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", default="2GiB")
    parser.add_argument("--peer", help="a Python that has llama-cpp-python")
    options = parser.parse_args()
    with Engine.load(options.model, threads=options.threads, kv_memory=options.kv_memory) as engine:
        agents = news(options.turns, options.tokens, engine.spec.vocab_size)
        times, hits = ours(engine, agents)
    middle = statistics.median(seconds for _, seconds in times)
    reached = [sum(map(len, given)) + WRITTEN * len(given) for given in agents]
    told = f"hits {hits:.1%}, median turn {middle:.3f} s, growth {slope(times):+.1%}"
    print(f"shoal: {min(reached)} tokens an agent, {told}", flush=True)
    if options.peer:
        path = str(Store().resolve(options.model, pull=False).path)
        job = {"path": path, "context": max(reached) + 64, "threads": options.threads, "agents": agents}
        text = json.dumps({**job, "written": WRITTEN})
        out = subprocess.run([options.peer, "-c", PEER], input=text, capture_output=True, text=True, check=True).stdout
        theirs = [(turn, seconds) for turn, seconds in json.loads(out)]
        median = statistics.median(seconds for _, seconds in theirs)
        told = f"median turn {median:.3f} s, growth {slope(theirs):+.1%}"
        print(f"llama.cpp: {told}; ours / theirs {middle / median:.2f}")


if __name__ == "__main__":
    main()
