"""`/v1/events`: what is held here, in the shape that routers of vLLM read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from shoal.core.journal import content_hashes
from shoal.types import Namespace
from tests.support.live import Live, toy

STORED = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}


def batches(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, json.loads(line[6:])


def until_stored(told: Iterator[tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    return next((n, e) for n, batch in told for e in batch["events"] if e["type"] == "BlockStored")


def test_a_router_hears_of_blocks(live: Live) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, again and again: " * 3
    with live.http.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = batches(answer.iter_lines())
        first, snapshot = next(told)
        assert snapshot["events"][0] == {"type": "AllBlocksCleared"}
        live.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        number, stored = until_stored(told)
        assert number > first
        assert set(stored) == STORED
        assert stored["parent_block_hash"] is None
        tokens = list(prompt.encode())[: len(stored["block_hashes"]) * stored["block_size"]]
        assert stored["token_ids"] == tokens
        assert stored["block_hashes"] == content_hashes(tokens, Namespace(), stored["block_size"])
    with live.http.stream("GET", "/v1/events?tokens=false") as answer:
        _, stored = until_stored(batches(answer.iter_lines()))
        assert stored["token_ids"] == []


def test_events_tell_what_others_asked_and_want_a_key_that_manages() -> None:
    keys = {"one": frozenset({"generate"}), "two": frozenset({"manage"})}
    with Live(toy(), keys=keys) as live:
        url = f"{live.url}/v1/events"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer one"}).status_code == 403
        with httpx.stream("GET", url, headers={"Authorization": "Bearer two"}) as answer:
            assert answer.status_code == 200
