"""Thirty turns with memory for five only, again and again: what comes back from the tiers, and what grows.

`kv_turns.py [--model M] [--times 10] [--new 200] [--threads N] [--kv-host 24MiB]`: six chats of five turns each, in
turns, on a device that holds the five turns of one of them; the rest comes from host memory and from disk. Each time
there are six new chats. Prints a line for each time to standard error and one of JSON: shares of prompt tokens that
were found (`hits`), that had been there before (`seen`), that came from host memory and from disk, resident memory in
10**6 bytes after each time, and `rss_growth_mb` from the median of the first half (without the first time, in which
buffers are made) to that of the second. The books of the KV are recounted after each turn; an AssertionError
names those that do not balance. Exit status 1 when KV is held at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys

from kv_restart import own_home

from shoal import Engine, Request, SamplingParams
from shoal.core.audit import check_integrity
from shoal.processes import process_mb
from shoal.types import Result

CHATS, TURNS, WRITTEN = 6, 5, 16


def thirty(engine: Engine, new: int, luck: random.Random) -> list[Result]:
    """Six new chats of five turns, in turns."""
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    results = []
    for _ in range(TURNS):
        for chat in chats:
            chat += [luck.randrange(1000, 40000) for _ in range(new)]
            sampling = SamplingParams(max_tokens=WRITTEN, temperature=0.0, ignore_eos=True)
            results.append(engine.complete(Request(prompt_tokens=chat, sampling=sampling)))
            chat += results[-1].tokens
            engine.call(lambda: check_integrity(engine._loop.scheduler))
    return results


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--new", type=int, default=200, help="tokens that a turn begins with")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-host", default="24MiB")
    options = parser.parse_args()
    settings = {"threads": options.threads, "max_batch": 1}
    with own_home():
        with Engine.load(options.model, kv_memory="64MiB", **settings) as probe:
            spec = probe.spec
        tokens = TURNS * (options.new + WRITTEN) + 2 * spec.block_size
        kept = {"kv_memory": tokens * spec.kv_bytes_per_token, "kv_host": options.kv_host, "kv_cache": "16GiB"}
        with Engine.load(options.model, **kept, **settings) as engine:
            return measure(engine, options, tokens)


def measure(engine: Engine, options: argparse.Namespace, room: int) -> int:
    """Ask, and print."""
    luck, sizes, results = random.Random(5), [], []
    for number in range(options.times):
        results += thirty(engine, options.new, luck)
        sizes.append(process_mb())
        print(f"{30 * (number + 1)} turns: {sizes[-1]} MB resident, books balanced", file=sys.stderr, flush=True)
    stats = engine.stats()
    later = sizes[1:] or sizes
    halves = later[: (len(later) + 1) // 2], later[len(later) // 2 :]
    prompts = sum(result.prompt_tokens for result in results)
    tiers = stats.tiers
    told = {
        "turns": len(results),
        "room_tokens": room,
        "hits": round(sum(result.cached_tokens for result in results) / prompts, 4),
        "seen": round(1 - options.new * len(results) / prompts, 4),
        "from_host": round(sum(result.receipt.host_tokens for result in results) / prompts, 4),
        "from_disk": round(sum(result.receipt.disk_tokens for result in results) / prompts, 4),
        "held_bytes": stats.kv_held_bytes,
        "disk_written_mb": 0 if tiers is None else round(tiers.disk_written_bytes / 1e6),
        "rss_mb": sizes,
        "rss_growth_mb": round(statistics.median(halves[1]) - statistics.median(halves[0]), 1),
    }
    print(json.dumps(told))
    return int(stats.kv_held_bytes != 0)


if __name__ == "__main__":
    sys.exit(main())
