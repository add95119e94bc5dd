"""`/v1/events`: what the engine's prefix tree holds, for routers, in the words of vLLM's KV events.

A batch is one server-sent event whose id is its number; its data has the fields of vLLM's `KVEventBatch` and of
`BlockStored`, `BlockRemoved` and `AllBlocksCleared`, and beside them how many tokens wait and run here. A reader that
gives no number, or one whose successors are gone, gets a snapshot first: all cleared, then all that is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from shoal.core.journal import Change, Removed, Stored
from shoal.engine.feed import BlockBatch, follow
from shoal.errors import EngineClosedError
from shoal.server.errors import ApiError
from shoal.server.generation import Api
from shoal.server.sse import KEEP_ALIVE, WatchedStream, encode

MEDIUM = "GPU"  # vLLM's word for the memory that a step reads, whichever device that is
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def block_events(api: Api, after: int | None, *, with_tokens: bool) -> Response:
    """The stream; it ends when the model is switched or the engine closed. ApiError 503 where none is loaded."""
    served = api.hub.acquire(None)
    api.hub.release(served)  # who listens holds up no switch
    if served.engine.feed is None:
        raise ApiError(404, "this is the door of a cluster: ask its replicas", code="not_supported")
    block_size = served.engine.spec.block_size

    async def pieces() -> AsyncIterator[bytes]:
        batches = follow(served.engine, after)
        pending = asyncio.ensure_future(anext(batches, None))
        try:
            while True:
                done, _ = await asyncio.wait({pending}, timeout=api.config.keepalive_s)
                if not done:
                    yield KEEP_ALIVE
                    continue
                try:
                    batch = pending.result()
                except EngineClosedError:
                    return
                assert batch is not None
                yield write_batch(batch, block_size, with_tokens=with_tokens)
                pending = asyncio.ensure_future(anext(batches, None))
        finally:
            pending.cancel()
            await asyncio.wait({pending})
            await batches.aclose()  # type: ignore[attr-defined]

    return WatchedStream(pieces(), api.config.write_timeout_s, media_type="text/event-stream", headers=_HEADERS)


def write_batch(batch: BlockBatch, block_size: int, *, with_tokens: bool) -> bytes:
    """One batch as a server-sent event."""
    events = [kv_event(change, block_size, with_tokens=with_tokens) for change in batch.changes]
    document = {
        "ts": batch.time_s,
        "events": events,
        "data_parallel_rank": None,
        "queued_tokens": batch.queued_tokens,
        "running_tokens": batch.running_tokens,
    }
    return f"id: {batch.seq}\ndata: {encode(document)}\n\n".encode()


def kv_event(change: Change, block_size: int, *, with_tokens: bool = True) -> dict[str, Any]:
    """A change in vLLM's words, its fields in vLLM's order: over ZeroMQ the values alone are sent."""
    match change:
        case Stored():
            return {
                "type": "BlockStored",
                "block_hashes": change.hashes,
                "parent_block_hash": change.parent,
                "token_ids": change.tokens if with_tokens else (),
                "block_size": block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        case Removed():
            return {"type": "BlockRemoved", "block_hashes": change.hashes, "medium": MEDIUM}
        case _:
            return {"type": "AllBlocksCleared"}
