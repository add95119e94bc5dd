"""What a replica offers a door beside the usual API: whole requests as the scheduler has them, and its facts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal.core.request import RequestSpec
from shoal.engine.handles import Handle
from shoal.engine.inflight import Output
from shoal.errors import ShoalError
from shoal.server.errors import bad_request, from_shoal
from shoal.server.generation import Api
from shoal.server.sse import WatchedStream, encode
from shoal.types import Event
from shoal.wire import from_json, to_json

RUN = "/replica/run"
CARD = "/replica/card"


def add_replica(app: FastAPI, api: Api) -> None:
    """Put the routes on an application."""

    @app.get(CARD)
    async def card() -> dict[str, Any]:
        served = api.hub.acquire(None)
        api.hub.release(served)
        return {"spec": to_json(served.engine.spec), "pid": os.getpid()}

    @app.post(RUN)
    async def run(http: HttpRequest) -> Response:
        spec, before = _order(await http.body())
        served = api.hub.acquire(None)
        outbox, events = api.outbox, asyncio.Queue[Event]()
        served.engine.on_step_start(outbox.wake)
        submit = partial(served.engine.resume_request, spec, before, sink=outbox.sink(events.put_nowait))
        try:
            handle = await asyncio.to_thread(submit)
        except ShoalError as error:
            api.hub.release(served)
            raise from_shoal(error) from error

        async def lines() -> AsyncIterator[bytes]:
            try:
                async for line in _lines(events):
                    yield line
            finally:
                _leave(handle)
                api.hub.release(served)

        return WatchedStream(lines(), api.config.write_timeout_s, media_type="application/x-ndjson")


def _leave(handle: Handle) -> None:
    handle.abort()  # nothing happens where it has ended


async def _lines(events: asyncio.Queue[Event]) -> AsyncIterator[bytes]:
    """Events as lines of JSON, all that are there in one piece."""
    finished = False
    while not finished:
        wave = [await events.get()]
        while not events.empty():
            wave.append(events.get_nowait())
        finished = wave[-1].finished
        yield "".join(f"{encode(to_json(event))}\n" for event in wave).encode()


def _order(body: bytes) -> tuple[RequestSpec, Output]:
    try:
        order = json.loads(body)
        spec = from_json(order["spec"], RequestSpec)
        before = from_json(order["before"], Output)
    except (ValueError, KeyError, TypeError, ShoalError) as error:
        raise bad_request(f"the request of the door is wrong: {error}", "spec") from None
    return spec, before
