"""Stored responses and conversations over HTTP, and those that a stop of the server interrupted.

`shoal serve` puts the stored responses aside that are in flight when it stops, and takes them up again at its next
start: they are then fetched by id. A call that nobody can ask for again (chat completions, `store: false`) ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query
from starlette.requests import Request as HttpRequest

from shoal.engine.state import STATE_FILE, restore
from shoal.errors import HistoryError, ShoalError
from shoal.server.errors import ApiError, bad_request
from shoal.server.openai.kept import Document, Interrupted, Kept
from shoal.server.openai.responses_schemas import ConversationRequest, ItemsRequest, MetadataRequest, given_items

if TYPE_CHECKING:
    from shoal.engine.handles import Handle
    from shoal.server.config import ServerConfig
    from shoal.server.generation import Api
    from shoal.server.hub import Served

T = TypeVar("T")
log = logging.getLogger("shoal.server")
Order = Annotated[Literal["asc", "desc"], Query()]
Limit = Annotated[int, Query(ge=1, le=100)]
_STOPPED = {"code": "server_error", "message": "the server stopped before the response had ended"}
_SAVE_S = 5.0  # of a stop


class KeptAccess:
    """`Kept` for the event loop: one thing after another, on threads; opened when it is first needed."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._kept: Kept | None = None
        self._turn = asyncio.Lock()  # first come, first served: what is read was written before
        self._tasks: set[asyncio.Task[None]] = set()
        self.running: set[str] = set()  # stored responses that are being written
        self.saved: set[str] = set()  # of those, what a stop has put aside for the next start

    async def __call__(self, work: Callable[[Kept], T]) -> T:
        """Do something with what is kept. Raises `HistoryError`."""
        async with self._turn:
            if self._kept is None:
                config = self._config
                self._kept = await asyncio.to_thread(Kept, config.history, config.max_stored, config.max_stored_bytes)
            return await asyncio.to_thread(work, self._kept)

    def later(self, work: Callable[[Kept], None]) -> None:
        """The same without waiting for it; what goes wrong is logged."""

        async def do() -> None:
            try:
                await self(work)
            except HistoryError as error:
                log.error("a response cannot be kept: %s", error)

        self.begin_task(do())

    def begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def finish(self, document: Document) -> None:
        """A stored response has ended; what a stop has put aside goes on instead."""
        self.running.discard(document["id"])
        if document["id"] not in self.saved:
            self.later(lambda kept: kept.finish(document))

    async def close(self) -> None:
        """Wait until everything is kept, and close the file."""
        while self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        if self._kept is not None:
            await asyncio.to_thread(self._kept.close)


def caller_of(http: HttpRequest) -> str:
    """Whose what is kept is: a name of the API key."""
    return str(http.scope["state"].get("caller", ""))


def missing(what: str, name: str) -> ApiError:
    """For an id that this key has not."""
    return ApiError(404, f"there is no {what} {name!r}", code="not_found")


async def earlier(api: Api, caller: str, previous: str | None, conversation: str | None) -> list[Document]:
    """The items that a new response goes on from. ApiError 400, 404."""
    if previous is not None and conversation is not None:
        raise bad_request("previous_response_id and conversation exclude each other", "conversation")
    if previous is not None:
        items = await api.kept(lambda kept: kept.chain(caller, previous))
        if items is None:
            raise ApiError(
                404,
                f"there is no response {previous!r}, or one before it was deleted",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return items
    if conversation is None:
        return []
    items = await api.kept(lambda kept: kept.items(caller, conversation))
    if items is None:
        raise ApiError(404, f"there is no conversation {conversation!r}", param="conversation", code="not_found")
    return items


def listed(items: list[Document], order: str, limit: int, after: str | None) -> Document:
    """A page of items. ApiError 400 for an `after` that is not among them."""
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise bad_request(f"after names {after!r}, which is not in the list", "after")
    at = 0 if after is None else ids.index(after) + 1
    page = ordered[at : at + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": at + limit < len(ordered)}


def add_stored_routes(app: FastAPI, api: Api) -> None:
    """Put the routes of stored responses and of conversations on an application."""
    _response_routes(app, api)
    _conversation_routes(app, api)
    _item_routes(app, api)


def _response_routes(app: FastAPI, api: Api) -> None:
    @app.get("/v1/responses/{response_id}")
    async def retrieve(http: HttpRequest, response_id: str, stream: bool = False) -> Document:
        if stream:
            raise bad_request("a stored response is given whole: leave stream out", "stream")
        document = await api.kept(lambda kept: kept.get(caller_of(http), response_id))
        if document is None:
            raise missing("response", response_id)
        return document

    @app.delete("/v1/responses/{response_id}")
    async def delete(http: HttpRequest, response_id: str) -> Document:
        if not await api.kept(lambda kept: kept.delete(caller_of(http), response_id)):
            raise missing("response", response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        http: HttpRequest, response_id: str, order: Order = "desc", limit: Limit = 20, after: str | None = None
    ) -> Document:
        items = await api.kept(lambda kept: kept.given(caller_of(http), response_id))
        if items is None:
            raise missing("response", response_id)
        return listed(items, order, limit, after)


def _conversation_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/conversations")
    async def create(http: HttpRequest, body: ConversationRequest) -> Document:
        items = given_items(body.items or [])
        return await api.kept(lambda kept: kept.converse(caller_of(http), items, body.metadata or {}))

    @app.get("/v1/conversations/{name}")
    async def retrieve(http: HttpRequest, name: str) -> Document:
        return await _found(api, http, name)

    @app.post("/v1/conversations/{name}")
    async def update(http: HttpRequest, name: str, body: MetadataRequest) -> Document:
        return await _found(api, http, name, body.metadata)

    @app.delete("/v1/conversations/{name}")
    async def delete(http: HttpRequest, name: str) -> Document:
        if not await api.kept(lambda kept: kept.end_conversation(caller_of(http), name)):
            raise missing("conversation", name)
        return {"id": name, "object": "conversation.deleted", "deleted": True}


def _item_routes(app: FastAPI, api: Api) -> None:
    async def items_of(http: HttpRequest, name: str) -> list[Document]:
        items = await api.kept(lambda kept: kept.items(caller_of(http), name))
        if items is None:
            raise missing("conversation", name)
        return items

    @app.get("/v1/conversations/{name}/items")
    async def items(
        http: HttpRequest, name: str, order: Order = "desc", limit: Limit = 20, after: str | None = None
    ) -> Document:
        return listed(await items_of(http, name), order, limit, after)

    @app.post("/v1/conversations/{name}/items")
    async def add(http: HttpRequest, name: str, body: ItemsRequest) -> Document:
        given = given_items(body.items)
        added = await api.kept(lambda kept: kept.add_items(caller_of(http), name, given))
        if added is None:
            raise missing("conversation", name)
        return listed(added, "asc", len(added), None)

    @app.get("/v1/conversations/{name}/items/{item_id}")
    async def item(http: HttpRequest, name: str, item_id: str) -> Document:
        for one in await items_of(http, name):
            if one["id"] == item_id:
                return one
        raise missing("item", item_id)

    @app.delete("/v1/conversations/{name}/items/{item_id}")
    async def drop(http: HttpRequest, name: str, item_id: str) -> Document:
        if not await api.kept(lambda kept: kept.drop_item(caller_of(http), name, item_id)):
            raise missing("item", item_id)
        return await _found(api, http, name)


async def _found(api: Api, http: HttpRequest, name: str, metadata: Document | None = None) -> Document:
    found = await api.kept(lambda kept: kept.conversation(caller_of(http), name, metadata))
    if found is None:
        raise missing("conversation", name)
    return found


# -- across a restart -------------------------------------------------------------------------------------------


async def save_running(api: Api, served: Served) -> None:
    """Put the stored responses in flight aside, at a stop of the server, in bounded time."""
    folder, running = api.config.state, set(api.kept.running)
    if folder is None or not running:
        return
    try:
        async with asyncio.timeout(_SAVE_S):
            await asyncio.to_thread(served.engine.suspend)
            await asyncio.to_thread(served.engine.save, folder)
        await api.kept(lambda kept: kept.put_aside(running))
        api.kept.saved |= running
    except (ShoalError, TimeoutError) as error:
        log.error("responses in flight are not saved: %s", error or "it took too long")


async def take_up(api: Api, follow: Callable[[Interrupted, Handle], Any]) -> None:
    """Let the responses go on that the last process put aside; those that cannot are marked as failed.

    `follow` gets each of them with its request, which goes on. Requests of which no response was kept are ended.
    """
    try:
        interrupted = {one.id: one for one in await api.kept(Kept.interrupted)}
    except HistoryError as error:
        log.error("no interrupted responses can be taken up: %s", error)
        return
    for handle in await _restored(api):
        one = interrupted.pop(handle.id, None)
        if one is None:
            handle.abort()
        else:
            follow(one, handle)
    for one in interrupted.values():
        api.kept.finish({**one.document, "status": "failed", "error": _STOPPED})


async def _restored(api: Api) -> list[Handle]:
    """The requests that were put aside, in the engine again. Their file is gone then: nothing is taken up twice."""
    folder, served = api.config.state, api.hub.served
    if folder is None or served is None or not (folder / STATE_FILE).exists():
        return []
    taken = Path(folder / STATE_FILE)
    engine = served.engine
    try:
        await asyncio.to_thread(restore, engine, folder)
    except ShoalError as error:
        log.error("the requests put aside cannot be taken up: %s", error)
    finally:
        taken.unlink(missing_ok=True)
        for prefix in engine.restored_prefixes:
            prefix.release()
        engine.restored_prefixes.clear()
    handles, engine.restored_handles = engine.restored_handles, []
    return handles
