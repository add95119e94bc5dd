"""What a restart costs: prompts computed, then brought back from disk by an engine loaded anew.

`kv_restart.py [--model M] [--tokens 7000] [--prompts 2] [--threads N] [--kv-precision u8]` prints one line of JSON:
seconds until the first token of each prompt when computed and when brought back, their ratio, the share of hits, and
whether tokens and log-probabilities are those of an engine that never stopped. A second turn follows each. Exit status
1 when they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal import Engine, Request, SamplingParams
from shoal.models.store import default_root
from shoal.types import Result

_SAMPLING = SamplingParams(max_tokens=16, logprobs=4, ignore_eos=True)


def turns(engine: Engine, prompts: list[list[int]], history: list[list[int]]) -> list[Result]:
    """One turn for each prompt, after what `history` has of it; what it writes is put there."""
    results = []
    for prompt, past in zip(prompts, history, strict=True):
        past += prompt
        results.append(engine.complete(Request(prompt_tokens=past, sampling=_SAMPLING)))
        past += results[-1].tokens
    return results


@contextlib.contextmanager
def own_home() -> Iterator[None]:
    """A SHOAL_HOME that has no KV yet, and the models of the one that was; deleted at the end."""
    home = tempfile.mkdtemp(prefix="kv-")
    for name in ("models", "cache"):
        (Path(home) / name).symlink_to(default_root() / name)
    os.environ["SHOAL_HOME"] = home
    try:
        yield
    finally:
        shutil.rmtree(home)


def rss_mb() -> float:
    """The most memory this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-precision", default="auto")
    parser.add_argument("--kv-memory", default="2GiB")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "threads": arguments.threads,
        "kv_precision": arguments.kv_precision,
        "kv_memory": arguments.kv_memory,
    }
    rng = random.Random(11)
    first = [[rng.randrange(1000, 40000) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)]
    second = [[rng.randrange(1000, 40000) for _ in range(50)] for _ in range(arguments.prompts)]
    with own_home():
        return measure(arguments.model, settings, first, second)


def measure(model: str, settings: dict[str, Any], first: list[list[int]], second: list[list[int]]) -> int:
    """Run it and print."""
    kept: list[list[int]] = [[] for _ in first]
    with Engine.load(model, **settings) as engine:  # the one that never stops
        expected = turns(engine, first, kept) + turns(engine, second, kept)
    past: list[list[int]] = [[] for _ in first]
    with Engine.load(model, kv_cache="16GiB", **settings) as engine:
        computed = turns(engine, first, past)
    with Engine.load(model, kv_cache="16GiB", **settings) as engine:
        again = turns(engine, first, [[] for _ in first])
        later = turns(engine, second, past)
        tiers = engine.stats().tiers
    same = [(r.tokens, r.logprobs) for r in computed + later] == [(r.tokens, r.logprobs) for r in expected]
    same = same and [(r.tokens, r.logprobs) for r in again] == [(r.tokens, r.logprobs) for r in computed]
    computing, restoring = (sum(r.ttft_s or 0.0 for r in results) for results in (computed, again))
    plain = sum(r.ttft_s or 0.0 for r in expected[: len(first)])
    hits = sum(r.cached_tokens for r in again + later) / sum(r.prompt_tokens for r in again + later)
    told = {
        "tokens": sum(map(len, first)),
        "computed_s": round(computing, 3),
        "computed_without_tiers_s": round(plain, 3),
        "restored_s": round(restoring, 3),
        "ratio": round(computing / restoring, 1),
        "hits": round(hits, 4),
        "disk_tokens": sum(r.receipt.disk_tokens for r in again),
        "same": same,
        "rss_mb": round(rss_mb()),
        "read_mb": round(tiers.disk_read_bytes / 1e6) if tiers is not None else 0,
    }
    print(json.dumps(told))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
