"""A crowd of clients, half of which vanish at random moments, and of the others every second one reads slowly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx


async def crowd(
    url: str, clients: int, rounds: int, body: Mapping[str, Any], *, seed: int = 0, patience_s: float = 0.5
) -> Counter[str]:
    """Each client makes `rounds` calls, streamed or whole; counts how they ended. Every second one vanishes, every
    fourth one reads its streams slowly.
    """
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(
            *(
                _client(http, number, rounds, body, random.Random(seed + number), patience_s, ends)
                for number in range(clients)
            )
        )
    return ends


async def _client(
    http: httpx.AsyncClient,
    number: int,
    rounds: int,
    body: Mapping[str, Any],
    rng: random.Random,
    patience_s: float,
    ends: Counter[str],
) -> None:
    for turn in range(rounds):
        text = f"client {number % 8}, turn {turn}: tell me something"
        call = {**body, "messages": [{"role": "user", "content": text}], "stream": rng.random() < 0.5}
        try:
            async with asyncio.timeout(rng.random() * patience_s if number % 2 else None):
                ends[await _call(http, call, pause_s=0.02 if number % 4 == 2 else 0)] += 1
        except TimeoutError:
            ends["vanished"] += 1


async def _call(http: httpx.AsyncClient, call: Mapping[str, Any], pause_s: float) -> str:
    if not call["stream"]:
        answer = await http.post("/v1/chat/completions", json=call)
        return str(answer.status_code)
    async with http.stream("POST", "/v1/chat/completions", json=call) as answer:
        last = ""
        async for line in answer.aiter_lines():
            last = line or last
            await asyncio.sleep(pause_s)
        done = answer.status_code != 200 or last == "data: [DONE]"
        return str(answer.status_code) if done else "broken"
