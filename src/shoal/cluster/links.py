"""The way to a replica: one of ours, which takes requests as the scheduler has them, or another server with the API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import httpx

from shoal.cluster.replica import CARD, RUN
from shoal.cluster.router import Router
from shoal.core.journal import BlockHash, Change, Cleared, Removed, Stored
from shoal.core.request import RequestSpec
from shoal.engine.feed import BlockBatch
from shoal.engine.inflight import Output
from shoal.engine.remote import RemoteEngine, refusal
from shoal.errors import BackendError, EngineClosedError, ReplicaLostError
from shoal.runners.plan import ModelSpec
from shoal.types import Event, Request
from shoal.wire import from_json, to_json

log = logging.getLogger("shoal.cluster")

_AGAIN_S = 0.5  # before a stream of events that has ended is asked for anew


class Link(Protocol):
    """One replica as a door sees it. `ReplicaLostError` where it cannot be reached, or breaks off."""

    name: str

    def run(self, spec: RequestSpec, before: Output) -> AsyncGenerator[Event, None]:
        """One request; leaving early ends it there. Raises what the replica refuses it with."""
        ...

    def batches(self, after: int | None) -> AsyncGenerator[BlockBatch, None]:
        """What it holds, as `shoal.engine.feed.follow`; ends at once where it tells nothing of that."""
        ...

    async def ping(self, timeout_s: float) -> None:
        """Returns when it has answered; ReplicaLostError after `timeout_s`, or when it is not well."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


async def follow(link: Link, router: Router) -> None:
    """Keep a router informed of what a replica holds, for good. What cannot be read is logged, and asked for again."""
    while True:
        try:
            async with aclosing(link.batches(router.seq(link.name))) as batches:
                async for batch in batches:
                    if not router.apply(link.name, batch, now=time.time()):
                        break  # some are missing: they are asked for again
        except ReplicaLostError as error:
            log.debug("%s", error)
        except (ValueError, KeyError, TypeError):
            log.exception("%s tells of its blocks in another way", link.name)
        await asyncio.sleep(_AGAIN_S)


class _Http:
    """Connections to one address."""

    def __init__(self, name: str, url: str, api_key: str | None) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # silence is told by `ping`
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def ping(self, timeout_s: float) -> None:
        """As `Link.ping`."""
        try:
            answer = await self._http.get("/health", timeout=timeout_s)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if answer.status_code != 200:
            raise ReplicaLostError(f"the replica {self.name} is not well: {answer.text[:200]}", value=self.name)

    async def batches(self, after: int | None) -> AsyncGenerator[BlockBatch, None]:
        """As `Link.batches`."""
        query = {"tokens": "false"} if after is None else {"tokens": "false", "after": str(after)}
        try:
            async with self._http.stream("GET", "/v1/events", params=query) as answer:
                if answer.status_code != 200:
                    return
                number = 0
                async for line in answer.aiter_lines():
                    if line.startswith("id:"):
                        number = int(line[3:])
                    elif line.startswith("data:"):
                        yield read_batch(number, json.loads(line[5:]))
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ReplicaLostError:
        words = str(error) or type(error).__name__
        return ReplicaLostError(f"the replica {self.name} is lost: {words}", value=self.name, hint="send it again")

    async def close(self) -> None:
        """As `Link.close`."""
        await self._http.aclose()


class ReplicaLink(_Http):
    """One of our replicas: it gets whole requests, and gives their events, log-probabilities and all."""

    async def run(self, spec: RequestSpec, before: Output) -> AsyncGenerator[Event, None]:
        """As `Link.run`."""
        order = {"spec": to_json(spec), "before": to_json(before)}
        try:
            async with self._http.stream("POST", RUN, json=order) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise refusal(answer, spec.sampling)
                async for line in answer.aiter_lines():
                    yield from_json(json.loads(line), Event)
        except (httpx.HTTPError, ValueError) as error:
            raise self._lost(error) from error

    async def card(self) -> ModelSpec:
        """Facts about the model it serves. BackendError when it cannot be asked."""
        try:
            answer = await self._http.get(CARD, timeout=30.0)
            return from_json(answer.raise_for_status().json()["spec"], ModelSpec)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise BackendError(f"the replica at {self.url} does not say what it serves: {error}") from error


class ServerLink(_Http):
    """Another server, of vLLM, SGLang or ours: what it cannot be asked is refused by name (see `RemoteEngine`)."""

    def __init__(self, name: str, url: str, model: str | None, api_key: str | None) -> None:
        """`url` without `/v1`; `model` as the server calls it, None: the first it lists."""
        super().__init__(name, url, api_key)
        self._engine = RemoteEngine(f"{self.url}/v1", model, api_key=api_key)

    async def run(self, spec: RequestSpec, before: Output) -> AsyncGenerator[Event, None]:
        """As `Link.run`."""
        if before.tokens:
            raise BackendError(f"{self.name} cannot go on after what another has written", hint="use our replicas")
        request = Request(
            prompt_tokens=spec.prompt,
            sampling=dataclasses.replace(spec.sampling, seed=spec.seed),
            priority=spec.priority,
            deadline_s=spec.deadline_s,
            timeout_s=spec.timeout_s,
            group=spec.group,
            namespace=spec.namespace,
            critical_path=spec.critical_path,
            keep_s=spec.keep_s,
        )
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    yield event
        except (httpx.HTTPError, BackendError, EngineClosedError) as error:
            raise self._lost(error) from error

    async def card(self) -> ModelSpec:
        """What it tells of its model: sizes it does not tell are 0."""
        await self._engine.describe()
        return self._engine.spec

    async def close(self) -> None:
        """As `Link.close`."""
        await self._engine.close()
        await super().close()


def read_batch(number: int, document: Mapping[str, Any]) -> BlockBatch:
    """A batch from an event of `/v1/events`."""
    return BlockBatch(
        number,
        document["ts"],
        tuple(_change(event) for event in document["events"]),
        document.get("queued_tokens", 0),
        document.get("running_tokens", 0),
    )


def _change(event: Mapping[str, Any]) -> Change:
    match event["type"]:
        case "BlockStored":
            return Stored(event["parent_block_hash"], _hashes(event), tuple(event["token_ids"]))
        case "BlockRemoved":
            return Removed(_hashes(event))
        case "AllBlocksCleared":
            return Cleared()
        case other:
            raise ValueError(f"an event of blocks of an unknown kind: {other!r}")


def _hashes(event: Mapping[str, Any]) -> tuple[BlockHash, ...]:
    hashes = tuple(event["block_hashes"])
    for value in hashes:
        if not 0 <= value < 2**64:
            raise ValueError(f"a hash of a block has 64 bits, not {value!r}")
    return hashes
