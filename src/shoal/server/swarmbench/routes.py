"""The routes of the page: itself, its runs, their history, the store."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from shoal import __version__
from shoal.agents.build.files import input_value
from shoal.agents.swarm import SPECIALISTS
from shoal.server.generation import Api
from shoal.server.sse import WatchedStream
from shoal.server.swarmbench.export import to_markdown
from shoal.server.swarmbench.orders import GraphOrder, Order, SwarmOrder, describe
from shoal.server.swarmbench.page_files import page_file
from shoal.server.swarmbench.runs import SwarmRuns
from shoal.server.swarmbench.schemas import (
    MAX_AGENTS,
    MAX_GRAPH,
    GraphFile,
    GraphRequest,
    PullRequest,
    RenameRequest,
    SettingsRequest,
    StopRequest,
    SwarmRequest,
)
from shoal.server.swarmbench.storage import Storage

_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
Limit = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


def add_page(app: FastAPI, api: Api) -> None:
    """Put the page and what it calls on an application."""
    runs = SwarmRuns(api)
    api.hub.opening.append(runs.take_up)
    api.hub.keeping.append(runs.interrupt)
    api.hub.closing.append(runs.close)
    _file_routes(app)
    _page_routes(app, api, runs)
    _run_routes(app, api, runs)
    _graph_routes(app, api, runs)
    _history_routes(app, runs)
    _thread_routes(app, runs)
    _storage_routes(app, Storage(api.hub), runs)


def _file_routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page_file("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        return page_file(name)


def _page_routes(app: FastAPI, api: Api, runs: SwarmRuns) -> None:
    instance = secrets.token_hex(8)  # another one after a restart: that is how the page knows
    wanted: dict[str, float] = {}  # the stall bound that was asked for, for every model that is loaded from then on

    @app.get("/swarmbench/state")
    async def page() -> dict[str, Any]:
        served, (healthy, state) = api.hub.served, api.hub.health()
        told: dict[str, Any] = {"instance": instance, "version": __version__, "healthy": healthy, **state}
        told |= {"running": runs.running, "history_error": runs.history_error, "max_agents": MAX_AGENTS}
        told["max_graph"] = MAX_GRAPH
        told["specialists"] = [{"name": one.name, "task": one.task} for one in SPECIALISTS]
        if served is not None:
            await _set_stall(served.engine, wanted)
            spec, engine = served.engine.spec, served.engine.stats()
            told["calls"] = served.leases
            governor = served.engine.governor
            told["power"] = None if governor is None else governor.state()
            told["engine"] = {
                "runner": spec.runner,
                "precision": spec.precision,
                "context_length": spec.context_length,
                "max_batch": served.engine.config.max_batch,
                "max_stall_ms": served.engine.config.max_stall_ms,
                "prefix_sharing": served.engine.config.prefix_sharing,
                "kv_bytes": engine.kv_bytes,
                "kv_held_bytes": engine.kv_held_bytes,
                "kv_cached_bytes": engine.kv_cached_bytes,
                "weight_bytes": engine.weight_bytes,
            }
        return told

    @app.post("/swarmbench/state")
    async def settings(body: SettingsRequest) -> dict[str, Any]:
        wanted["max_stall_ms"] = body.max_stall_ms
        return await page()


async def _set_stall(engine: Any, wanted: dict[str, float]) -> None:
    ms = wanted.get("max_stall_ms")
    if ms is not None and engine.config.max_stall_ms != ms and not engine.closed:
        await asyncio.to_thread(engine.set_max_stall, ms)


def _run_routes(app: FastAPI, api: Api, runs: SwarmRuns) -> None:
    @app.post("/swarmbench/runs")
    async def start(http: HttpRequest, body: SwarmRequest) -> dict[str, Any]:
        if api.config.log_prompts:
            http.scope["state"]["record"]["body"] = body.model_dump(exclude_none=True)
        order = SwarmOrder(
            question=body.question,
            team=tuple(agent.specialist() for agent in body.agents),
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=_seed(body.seed),
            synthesis=body.synthesis,
            one_by_one=body.one_by_one,
            sharing=body.sharing,
            deadline_s=api.config.request_timeout_s,
            caller=api.caller(http),
        )
        return await _begun(runs, order, body)

    @app.get("/swarmbench/runs/{run_id}/events")
    async def events(
        run_id: str,
        after: Annotated[int | None, Query(ge=0)] = None,
        last_event_id: Annotated[int | None, Header(ge=0)] = None,
    ) -> Response:
        pieces = await runs.follow(run_id, after if after is not None else last_event_id)
        return WatchedStream(pieces, api.config.write_timeout_s, media_type="text/event-stream", headers=_STREAM)

    @app.post("/swarmbench/runs/{run_id}/stop")
    async def stop(run_id: str, body: StopRequest) -> dict[str, Any]:
        await runs.stop(run_id, body.card)
        return {"id": run_id, "stopping": True}


def _graph_routes(app: FastAPI, api: Api, runs: SwarmRuns) -> None:
    @app.post("/swarmbench/graphs")
    async def read(body: GraphFile) -> dict[str, Any]:
        return await asyncio.to_thread(describe, body.file, body.text)

    @app.post("/swarmbench/graphs/runs")
    async def start(http: HttpRequest, body: GraphRequest) -> dict[str, Any]:
        if api.config.log_prompts:
            http.scope["state"]["record"]["body"] = body.model_dump(exclude_none=True)
        order = await asyncio.to_thread(
            GraphOrder.read,
            body.file,
            body.text,
            {name: input_value(text) for name, text in body.inputs.items()},
            seed=_seed(body.seed),
            sharing=body.sharing,
            deadline_s=api.config.request_timeout_s,
            caller=api.caller(http),
        )
        return await _begun(runs, order, body)


def _seed(wanted: int | None) -> int:
    return secrets.randbelow(2**31) if wanted is None else wanted


async def _begun(runs: SwarmRuns, order: Order, body: SwarmRequest | GraphRequest) -> dict[str, Any]:
    run = await runs.start(order, body.model, body.after)
    told = {name: run.document[name] for name in ("id", "title", "thread", "turn")}
    return {**told, "seed": order.seed}


def _history_routes(app: FastAPI, runs: SwarmRuns) -> None:
    @app.get("/swarmbench/runs")
    async def search(
        q: Annotated[str, Query(max_length=200)] = "", limit: Limit = 50, offset: Offset = 0
    ) -> dict[str, Any]:
        return {"object": "list", "data": await runs.search(q, limit, offset)}

    @app.get("/swarmbench/runs/{run_id}")
    async def record(run_id: str, form: Literal["json", "markdown"] = "json") -> Response:
        document = await runs.record(run_id)
        if form == "markdown":
            return PlainTextResponse(to_markdown(document), media_type="text/markdown")
        return JSONResponse(document)

    @app.patch("/swarmbench/runs/{run_id}")
    async def rename(run_id: str, body: RenameRequest) -> dict[str, Any]:
        await runs.rename(run_id, body.title)
        return {"id": run_id, "title": body.title}

    @app.delete("/swarmbench/runs/{run_id}")
    async def delete(run_id: str) -> dict[str, Any]:
        await runs.delete(run_id)
        return {"id": run_id, "deleted": True}


def _thread_routes(app: FastAPI, runs: SwarmRuns) -> None:
    @app.get("/swarmbench/threads")
    async def threads(
        q: Annotated[str, Query(max_length=200)] = "", limit: Limit = 50, offset: Offset = 0
    ) -> dict[str, Any]:
        return {"object": "list", "data": await runs.threads(q, limit, offset)}

    @app.get("/swarmbench/threads/{thread_id}")
    async def thread(thread_id: str) -> dict[str, Any]:
        return {"object": "list", "data": await runs.thread(thread_id)}

    @app.delete("/swarmbench/threads/{thread_id}")
    async def delete_thread(thread_id: str) -> dict[str, Any]:
        await runs.delete_thread(thread_id)
        return {"id": thread_id, "deleted": True}


def _storage_routes(app: FastAPI, storage: Storage, runs: SwarmRuns) -> None:
    @app.get("/swarmbench/storage")
    async def describe() -> dict[str, Any]:
        count, size = await runs.size()
        return {**await asyncio.to_thread(storage.describe), "history": {"runs": count, "bytes": size}}

    @app.post("/swarmbench/storage")
    async def pull(body: PullRequest) -> dict[str, Any]:
        if body.precision is not None:
            pull = await asyncio.to_thread(storage.make, body.name, body.precision)
        else:
            pull = await asyncio.to_thread(storage.pull, body.name)
        return {"name": pull.name, "stage": pull.stage}

    @app.delete("/swarmbench/storage/{name:path}")
    async def remove(name: str) -> dict[str, Any]:
        return {"name": name, "freed_bytes": await asyncio.to_thread(storage.remove, name)}
