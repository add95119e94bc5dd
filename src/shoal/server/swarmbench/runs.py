"""All swarm runs of a server: begun, followed from any point, kept in the history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from shoal.errors import HistoryError, ShoalError
from shoal.server.errors import ApiError
from shoal.server.generation import Api
from shoal.server.hub import Served
from shoal.server.logs import logger
from shoal.server.swarmbench.history import History
from shoal.server.swarmbench.orders import Order
from shoal.server.swarmbench.record import Document, frozen
from shoal.server.swarmbench.resumed import INTERRUPTED, Resumed
from shoal.server.swarmbench.run import SwarmRun
from shoal.server.swarmbench.turns import Thread, fitting, thread_after

MAX_RUNNING = 8  # each may have eight agents; more only wait for each other
_KEPT = 16  # runs in memory that have ended: a page may come back for its last frames
_SAVE_S = 1.0  # what a killed server loses at most


class SwarmRuns:
    """Runs by id. All methods belong on the event loop's thread, which never waits for the disk.

    A run holds a lease on the model from its start to its end, so a switch of models waits for it, or ends it.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._runs: dict[str, SwarmRun] = {}
        self._history: History | None = None
        self._opening = asyncio.Lock()
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.history_error: str | None = None  # why the last save failed; the page shows it

    async def history(self) -> History:
        """The history, opened when it is first needed. Raises `HistoryError`."""
        async with self._opening:
            if self._history is None:
                self._history = await asyncio.to_thread(History, self._api.config.history)
        return self._history

    async def start(self, order: Order, model: str | None, after: str | None = None) -> SwarmRun:
        """Begin a run, `after` another one of the same thread.

        ApiError when there are too many, no model serves, or that other one is not there or goes on;
        `InvalidRequestError`, `GraphError`.
        """
        thread = None if after is None else await self._thread(after)
        running = sum(not run.finished for run in self._runs.values())
        if running >= MAX_RUNNING:
            raise ApiError(429, f"{running} swarms run already", code="queue_full", headers={"Retry-After": "2"})
        served = self._api.hub.acquire(model)
        try:
            if thread is not None:
                order = order.of_thread(await asyncio.to_thread(fitting, served.engine, thread, order.prompt))
            folder = await asyncio.to_thread(self._made_folder)
            run = SwarmRun(order, served.engine, served.name, lambda run: self._ended(run, served), folder=folder)
        except BaseException:
            self._api.hub.release(served)
            raise
        self._begin(run)
        return run

    def _begin(self, run: SwarmRun) -> None:
        self._runs[run.id] = run
        run.start()
        self._keeping[run.id] = asyncio.create_task(self._keep(run))
        self._keeping[run.id].add_done_callback(lambda task: self._keeping.pop(run.id))  # noqa: ARG005

    # -- across a restart ---------------------------------------------------------------------------------------

    async def interrupt(self, served: Served) -> None:  # noqa: ARG002 - the hub's face
        """At a stop of the server: what has not ended by now is left to the next start."""
        for run in self._runs.values():
            run.interrupt()

    async def take_up(self) -> None:
        """At a start: let the runs go on that a stop or a kill cut off, and mark those that cannot, with the reason."""
        try:
            history = await self.history()
            for left in await asyncio.to_thread(history.take_over):
                why = await self._resume(left)
                if why is not None:
                    await asyncio.to_thread(history.mark_interrupted, left.document, f"{INTERRUPTED}, and {why}")
            await asyncio.to_thread(self._sweep, history)
        except HistoryError as error:
            logger.error("history", extra={"fields": {"error": str(error)}})

    async def _resume(self, left: Resumed) -> str | None:
        """Begin such a run; says why it cannot be."""
        folder, served, model = self._folder(), self._api.hub.served, left.document["model"]
        if folder is None or not (folder / left.document["id"]).exists():
            return "nothing was kept of what its agents had done"
        if served is None or (served.name, served.engine.spec.precision) != (model["name"], model["precision"]):
            return f"{model['name']} ({model['precision']}) is not served any more"
        served = self._api.hub.acquire(None)
        try:
            order = await asyncio.to_thread(left.order)
            run = SwarmRun(
                order, served.engine, served.name, lambda run: self._ended(run, served), folder=folder, resumed=left
            )
        except (ShoalError, TypeError, KeyError, ValueError) as error:  # its record is of another version
            self._api.hub.release(served)
            return f"its record cannot be read: {error}"
        self._begin(run)
        return None

    def _sweep(self, history: History) -> None:
        """Delete checkpoints of runs that have ended: a kill came between the last save and that."""
        folder = self._folder()
        for path in folder.glob("*") if folder is not None else ():
            document = history.get(path.name)
            if document is not None and document["state"] != "running":
                path.unlink(missing_ok=True)

    def _made_folder(self) -> Path | None:
        """The same, made; None where it cannot be: the run goes on without a checkpoint, as it does unsaved."""
        folder = self._folder()
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.error("history", extra={"fields": {"error": f"no checkpoints: {error}"}})
            return None
        return folder

    def _folder(self) -> Path | None:
        """Where checkpoints are: beside the history, for its owner only. None: there is no place that outlives us."""
        path = self._api.config.history
        return None if path is None else path.with_suffix(".runs")

    # -- while a run goes on ------------------------------------------------------------------------------------

    async def _thread(self, after: str) -> Thread:
        document = await self.record(after)
        if document["state"] == "running":
            raise ApiError(409, "the run has not ended: a question after it has to wait", code="run_in_progress")
        return thread_after(document)

    def _ended(self, run: SwarmRun, served: Served) -> None:
        self._api.hub.release(served)
        for result in run.results:
            self._api.metrics.count_generation(result)

    async def _keep(self, run: SwarmRun) -> None:
        """Save a run's record now, from time to time, and at its end."""
        while True:
            finished = run.finished
            try:
                history = await self.history()
                await asyncio.to_thread(history.save, frozen(run.document), run.caller, left=run.interrupted)
                self.history_error = None
            except HistoryError as error:
                self.history_error = str(error)
                logger.error("history", extra={"fields": {"run": run.id, "error": str(error)}})
            if finished:
                if run.checkpoint is not None and not run.interrupted:
                    await asyncio.to_thread(run.checkpoint.unlink, missing_ok=True)
                break
            await run.until_finished(_SAVE_S)
        ended = [known for known in self._runs.values() if known.finished and known.id not in self._keeping]
        for known in ended[: max(0, len(ended) - _KEPT)]:
            del self._runs[known.id]

    @property
    def running(self) -> list[str]:
        """Ids of runs that have not ended, the latest last."""
        return [run.id for run in self._runs.values() if not run.finished]

    async def stop(self, run_id: str, card: int | None) -> None:
        """End one card of a run, or all; nothing happens when that has ended. ApiError 404."""
        run = self._runs.get(run_id)
        if run is None:
            await self.record(run_id)
        else:
            run.stop(card)

    async def record(self, run_id: str) -> Document:
        """The record of a run as it is now. ApiError 404 when there is none."""
        run = self._runs.get(run_id)
        if run is not None:
            return run.document
        document = await asyncio.to_thread((await self.history()).get, run_id)
        if document is None:
            raise ApiError(404, f"there is no run {run_id!r}", code="run_not_found")
        return document

    async def search(self, query: str, limit: int, offset: int) -> list[Document]:
        """Runs of the history, newest first, without their cards."""
        history = await self.history()
        return await asyncio.to_thread(history.search, query, limit, offset)

    async def threads(self, query: str, limit: int, offset: int) -> list[Document]:
        """Conversations with a run that `search` would find, the latest first."""
        history = await self.history()
        return await asyncio.to_thread(history.threads, query, limit, offset)

    async def thread(self, thread_id: str) -> list[Document]:
        """The turns of a conversation, in order, without their cards. ApiError 404."""
        turns = await asyncio.to_thread((await self.history()).thread, thread_id)
        if not turns:
            raise ApiError(404, f"there is no thread {thread_id!r}", code="thread_not_found")
        return turns

    async def delete_thread(self, thread_id: str) -> None:
        """Forget a conversation. ApiError 404, 409 while a turn goes on: then none is deleted."""
        turns = [turn["id"] for turn in await self.thread(thread_id)]
        if any(turn in self._runs and not self._runs[turn].finished for turn in turns):
            raise ApiError(409, "a turn has not ended; stop it first", code="run_in_progress")
        for turn in turns:
            await self.delete(turn)

    async def size(self) -> tuple[int, int]:
        """How many runs the history has, and its bytes on disk; zeros when it cannot be read."""
        try:
            return await asyncio.to_thread((await self.history()).size)
        except HistoryError:
            return 0, 0

    async def rename(self, run_id: str, title: str) -> None:
        """Give a run another title. ApiError 404."""
        if not await asyncio.to_thread((await self.history()).rename, run_id, title):
            raise ApiError(404, f"there is no run {run_id!r}", code="run_not_found")
        if run_id in self._runs:
            self._runs[run_id].document["title"] = title

    async def delete(self, run_id: str) -> None:
        """Forget a run that has ended. ApiError 404, 409 while it goes on."""
        run = self._runs.get(run_id)
        if run is not None and not run.finished:
            raise ApiError(409, "the run has not ended; stop it first", code="run_in_progress")
        known = self._runs.pop(run_id, None)
        if run_id in self._keeping:  # its last save is under way, and must not come after this
            await asyncio.wait([self._keeping[run_id]])
        if not await asyncio.to_thread((await self.history()).delete, run_id) and known is None:
            raise ApiError(404, f"there is no run {run_id!r}", code="run_not_found")

    async def follow(self, run_id: str, after: int | None) -> AsyncIterator[bytes]:
        """A run as server-sent events: with `after`, the frames behind that one; else a snapshot and what follows.

        The last event is `end`. ApiError 404 when there is no such run.
        """
        run = self._runs.get(run_id)
        return self._stored(await self.record(run_id)) if run is None else self._live(run, after)

    async def _stored(self, record: Document) -> AsyncIterator[bytes]:
        yield _event("snapshot", record)
        yield _event("end", {})

    async def _live(self, run: SwarmRun, after: int | None) -> AsyncIterator[bytes]:
        at = after
        if at is None or at > len(run.frames):
            at = len(run.frames)
            yield f"id: {at}\n".encode() + _event("snapshot", run.document)
        while True:
            if at < len(run.frames):
                frames = run.frames[at:]
                at += len(frames)
                yield b"".join(frames)
            elif run.finished:
                if not run.interrupted:  # else the reader comes back, and finds it going on
                    yield _event("end", {})
                return
            elif not await run.changed(self._api.config.keepalive_s):
                yield b": keep-alive\n\n"

    async def close(self) -> None:
        """Wait until what has ended is saved, and close the history."""
        if self._keeping:
            await asyncio.wait(self._keeping.values(), timeout=5)
        if self._history is not None:
            await asyncio.to_thread(self._history.close)


def _event(name: str, document: Any) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode("utf-8", "replace")
