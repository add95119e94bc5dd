"""Identical greedy calls of one run are computed once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields

from shoal.agents.run.engines import AgentEngine, leaving
from shoal.types import Event, FinishReason, Request, Result, SamplingParams

_GOOD = (FinishReason.STOP, FinishReason.LENGTH)
_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "seed"]


class Memo:
    """Maps greedy requests to the results of those that asked the same before, or are asking now.

    Only whole outputs are kept. While one computes, the others wait; if it fails or goes away, one of them computes.
    """

    def __init__(self, found: Mapping[str, Result], keep: Callable[[str, Result], None]) -> None:
        """`found` are results that are there already; `keep` is told of each new one."""
        self._found = found
        self._keep = keep
        self._results: dict[str, asyncio.Future[Result | None]] = {}

    async def known(self, key: str | None) -> Result | None:
        """The result of the request with this key, waiting for it if it is being computed; None: compute it."""
        if key is not None and key in self._found:
            return self._found[key]
        while key is not None and key in self._results:
            result = await asyncio.shield(self._results[key])
            if result is not None:
                return result
        return None

    async def generate(self, engine: AgentEngine, request: Request, key: str | None) -> AsyncIterator[Event]:
        """Events of the request, and its result noted for others that have the same key (None: none has)."""
        if key is None or key in self._results:
            async with leaving(engine.generate(request)) as events:
                async for event in events:
                    yield event
            return
        future: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
        self._results[key] = future
        try:
            async with leaving(engine.generate(request)) as events:
                async for event in events:
                    if event.result is not None and event.result.finish_reason in _GOOD:
                        self._keep(key, event.result)
                        future.set_result(event.result)
                    yield event
        finally:
            if not future.done():
                del self._results[key]
                future.set_result(None)


def key_of(request: Request) -> str | None:
    """What two requests with the same output have in common; None for one that samples."""
    sampling = request.sampling
    if sampling.temperature > 0:
        return None
    facts = [getattr(sampling, name) for name in _FIELDS]
    text = repr((request.messages, facts, request.namespace))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
