"""A load test of the server on loopback: 64 clients, half of which vanish at random moments, some read slowly.

    python scripts/server_load.py [--clients 64] [--rounds 20] [--toy]
    python scripts/server_load.py --toy --clients 1000 --rounds 1      # all at once: most of them queued

Prints one JSON line. Fails when a sequence, a block or a lease is left, a stream broke off, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.crowd import crowd
from tests.server.test_load import resident
from tests.support.live import Live, toy

from shoal.engine.engine import Engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--toy", action="store_true", help="the toy model instead of the default one")
    options = parser.parse_args()
    engine = (
        toy(step_s=0.002) if options.toy else Engine.load(max_batch=8, kv_memory="64MiB")
    )  # soon full, so that growth is not KV
    body = {"max_tokens": options.max_tokens, "temperature": 1}
    with Live(engine, name="load") as live:
        asyncio.run(crowd(live.url, options.clients, 2, body, patience_s=3))
        live.wait_idle(60)
        before = resident()
        begin = time.perf_counter()
        ends = asyncio.run(crowd(live.url, options.clients, options.rounds, body, seed=1, patience_s=3))
        wall_s = time.perf_counter() - begin
        live.wait_idle(60)
        grown = resident() - before
    told = {"ends": dict(ends), "wall_s": round(wall_s, 2), "grown_mb": round(grown / 1e6, 1)}
    print(json.dumps({"clients": options.clients, "rounds": options.rounds, **told}))
    return int(set(ends) > {"200", "vanished"} or grown > 50e6)


if __name__ == "__main__":
    sys.exit(main())
