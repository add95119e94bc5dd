"""Random bodies of up to 8 MiB against a served engine: python scripts/server_fuzz.py --bodies 5000

The server runs in a process of its own, beside it a ticker on its event loop. Told: answers by status, the longest that
the event loop did nothing else, and memory before and after. A gap counts no longer than the process worked in it, so
that other load on the machine is not taken for it. Exit status 1 for a 5xx, a request that is left, or a missed bar.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

MIB = 2**20
WARM = 2000  # bodies before anything is measured
KEPT_MB = 40  # of memory, at most, more at the end than at the beginning
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/v1/messages")
ELEMENTS = (
    "0", "0.0", "-1", "1e9", "null", "true", '""', '"a"', "[]", "{}", "[0]", '{"a":0}', '{"role":"user"}', '"\\u00e9"',
    '{"role":"user","content":"x"}', '{"type":"function"}', '{"type":"text","text":"x"}', "9" * 400, '"\\ud800"',
    "1e999", "NaN", '{"type":"function","name":"f","parameters":{"a":1e999}}',
    '{"name":"f","input_schema":{"a":-1e999}}',
)  # fmt: skip
FIELDS = (
    "messages", "prompt", "input", "tools", "stop", "logit_bias", "metadata", "stop_token_ids", "n", "user", "model",
    "structured_outputs", "response_format", "tool_choice", "chat_template_kwargs", "modalities", "text", "no_such",
)  # fmt: skip
BYTES = (
    b"a", b" ", b'\\"', b"\\\\", b"\\n", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"[", b"{", b"]", b",", b":",
    b"\\u00e9", b"\xff",
)  # fmt: skip


def body_of(rng: random.Random) -> bytes:
    """One body: of a wrong shape, of a right one with a part blown up, or of bytes."""
    size = int(2 ** rng.uniform(4, 23))
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(min(size, MIB))
    if kind == 1:
        return bytes(rng.choices(b'[]{}",:0-9aeE.\\ \n', k=min(size, MIB)))
    element, field = rng.choice(ELEMENTS), rng.choice(FIELDS)
    if kind in (2, 3):
        listed = ",".join([element] * max(1, size // (len(element) + 1)))
        return f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":[{listed}]}}'.encode()[: 8 * MIB]
    if kind == 4:
        members = ",".join(f'"{i:x}":{element}' for i in range(size // (len(element) + 8)))
        return f'{{"{field}":{{{members}}},"prompt":"x"}}'.encode()[: 8 * MIB]
    if kind == 5:
        text = rng.choice(BYTES) * (size // 4)
        places = (b'{"prompt":"%s","max_tokens":1}', b'{"messages":[{"role":"user","content":"%s"}],"max_tokens":1}')
        return (rng.choice(places) % text)[: 8 * MIB]
    if kind == 6:
        depth = min(size, 200_000)
        return b'{"messages":' + rng.choice((b"[", b'{"a":')) * depth
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    fields["structured_outputs"] = rng.choice(
        (
            {"regex": f"(a{{1,{rng.randrange(1, 10**6)}}}b?){{1,{rng.randrange(1, 10**4)}}}"},
            {"regex": "(" * rng.randrange(1, 2000)},
            {"json": {"enum": [f"v{i}" for i in range(rng.randrange(1, 6000))]}},
            {
                "json": {
                    "$ref": "#/$defs/0",
                    "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(rng.randrange(600))},
                }
            },
            {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(rng.randrange(1, 3000)))},
        )
    )
    return json.dumps(fields).encode()


def serve(model: str | None, port: Any) -> None:
    """The server's process."""
    import psutil  # type: ignore[import-untyped, unused-ignore]
    from tests.support.live import Live, toy

    from shoal.engine.engine import Engine

    with Live(Engine.load(model) if model else toy(), name=model or "toy", request_timeout_s=20) as live:
        state = {"worst": 0.0}

        async def tick() -> None:
            while True:
                begin, worked = time.perf_counter(), time.process_time()
                await asyncio.sleep(0.001)
                late = min(time.perf_counter() - begin, time.process_time() - worked) - 0.001
                state["worst"] = max(state["worst"], late)

        gc.collect()
        gc.freeze()  # as `shoal serve` does
        asyncio.run_coroutine_threadsafe(tick(), live.loop)
        port.send(live.port)
        while (asked := port.recv()) is not None:
            if asked == "idle":
                live.wait_idle()
            port.send((state["worst"], psutil.Process().memory_info().rss))
            if asked == "reset":
                state["worst"] = 0.0


async def throw(url: str, bodies: int, seed: int, statuses: Counter[str], until: float) -> int:
    """Send bodies, four at a time; gives how many."""
    sent = 0

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal sent
        while sent < bodies and time.monotonic() < until:
            sent += 1
            rng = random.Random(seed * 10**6 + sent)
            headers = {"Content-Type": "application/json"}
            answer = await http.post(rng.choice(PATHS), content=await asyncio.to_thread(body_of, rng), headers=headers)
            statuses[str(answer.status_code)] += 1
            if answer.status_code >= 500 and answer.status_code != 504:
                print(f"body {sent} of seed {seed}: {answer.status_code} {answer.text[:300]}", flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(one(http) for _ in range(4)))
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600, help="stop after that long")
    parser.add_argument("--model", default=None, help="a real one; the toy model unless given")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.model, theirs))
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    statuses: Counter[str] = Counter()
    # What is loaded once; and caches that have a bound are filled to it.
    asyncio.run(throw(url, WARM, 0, Counter(), time.monotonic() + 120))
    ours.send("reset")
    _, before = ours.recv()
    until = time.monotonic() + options.seconds
    sent = asyncio.run(throw(url, options.bodies, options.seed, statuses, until))
    ours.send("idle")
    worst, after = ours.recv()
    ours.send(None)
    server.join(60)
    print(f"{sent} bodies: {dict(sorted(statuses.items()))}")
    print(f"event loop still for at most {worst * 1e3:.0f} ms, memory {before / 1e6:.0f} to {after / 1e6:.0f} MB")
    bad = sum(count for status, count in statuses.items() if status >= "500" and status != "504")
    sys.exit(bad > 0 or worst > 0.05 or after > before + KEPT_MB * 1e6 or server.exitcode != 0)


if __name__ == "__main__":
    main()
