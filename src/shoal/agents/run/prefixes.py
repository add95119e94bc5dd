"""What a run knows of prompts to come: told to the engine, so that beginnings are there when they are needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.agents.run.attempt import history_of
from shoal.agents.run.engines import LocalEngine
from shoal.agents.run.layout import Layout
from shoal.agents.run.prompts import layout_of, shared_text
from shoal.errors import GraphError, ShoalError

if TYPE_CHECKING:
    from shoal.agents.build.node import Node
    from shoal.agents.run.run import Run
    from shoal.engine.handles import Expectation
    from shoal.types import Message

_LEAST = 64  # characters beyond the shared part that are worth a word to the engine
_GROWTH = 1.25  # the next look comes when so many times more inputs have ended


class Keeper(Protocol):
    """Is told what happens to nodes, to keep and prefetch prefixes."""

    def begin(self) -> None:
        """The run begins."""
        ...

    def started(self, node: Node) -> None:
        """An agent's inputs are there: its request follows."""
        ...

    def joined(self, node: Node) -> None:
        """Its first token came: it holds its prompt itself."""
        ...

    def ended(self, node: Node) -> None:
        """A node has its outcome."""
        ...

    async def end(self) -> None:
        """The run is over: nothing is needed any more."""
        ...


class NoKeeper:
    """For engines that take no hints."""

    def begin(self) -> None:
        """Nothing."""

    def started(self, node: Node) -> None:
        """Nothing."""

    def joined(self, node: Node) -> None:
        """Nothing."""

    def ended(self, node: Node) -> None:
        """Nothing."""

    async def end(self) -> None:
        """Nothing."""


@dataclass(slots=True)
class _Look:
    """When to look at a waiting node again: after how many of its inputs have ended, or when one is being written."""

    ended: int = 0
    due: int = 0
    writing: bool = False


class _Kept:
    """One beginning: the task that announces it, and the nodes it is kept for."""

    def __init__(self, task: asyncio.Task[Expectation | None]) -> None:
        self.task = task
        self.nodes: set[Node | None] = set()


class PrefixKeeper:
    """Tells a local engine which beginnings pending nodes will need, and how soon.

    Invariant: a beginning is announced from when it is certain until the last node that needs it has its first token
    or has ended. While another input of that node is being written, what is certain is computed ahead.
    """

    def __init__(self, run: Run, engine: LocalEngine) -> None:
        self._run = run
        self._engine = engine
        self._kept: dict[str, _Kept] = {}
        self._of: dict[Node | None, str] = {}  # None: the shared part, kept for the whole run
        self._looks: dict[Node, _Look] = {}
        self._gone: list[asyncio.Task[Expectation | None]] = []

    def begin(self) -> None:
        """Announce the shared part. The first request computes it; the others wait for its blocks."""
        try:
            shared = shared_text(self._run)
        except GraphError:  # the nodes will say so
            return
        earlier = self._run.earlier
        if shared or earlier:
            self._keep(None, Layout(shared, (), "", (), "", earlier=earlier).beginnings(), 0, compute=False)

    def started(self, node: Node) -> None:
        """Its own beginning is needed now; those of its dependants while it writes."""
        kept = self._kept.get(self._of.get(node, ""))
        if kept is not None and kept.nodes == {node} and not kept.task.done():
            self._drop(node)  # it computes its prompt itself, in its own class
        for other in self._run.readers(node):
            self._look_ahead(other, ended=False)

    def joined(self, node: Node) -> None:
        """It holds its prompt itself from here on."""
        self._drop(node)

    def ended(self, node: Node) -> None:
        """One input more of its dependants is certain."""
        self._drop(node)
        for other in self._run.readers(node):
            self._look_ahead(other, ended=True)

    async def end(self) -> None:
        """Take all announcements back."""
        for node in list(self._of):
            self._drop(node)
        await asyncio.gather(*self._gone, return_exceptions=True)

    def _look_ahead(self, node: Node, *, ended: bool) -> None:
        """Announce what is certain of a waiting node's prompt, and compute it while an input is being written.

        Looking costs time in proportion to the inputs, so it is done a number of times that grows with their logarithm.
        """
        run = self._run
        if len(node.agents) != 1 or not run.open.get(node):
            return
        look = self._looks.setdefault(node, _Look())
        look.ended += ended
        if look.writing and look.ended < look.due:
            return
        look.writing = any(run.is_running(need) for need in run.needs(node))
        look.due = max(look.ended + 1, int(look.ended * _GROWTH))
        try:
            history = history_of(run, node)
            layout = layout_of(run, node, node.agents[0], history, ahead=True)
        except GraphError:  # a template names what is not there yet, or the node will say what is wrong
            return
        if history or len(layout.known()) >= _LEAST:
            self._keep(node, layout.beginnings(), run.distance(node), compute=look.writing)

    def _keep(self, node: Node | None, prompts: Sequence[Sequence[Message]], steps: int, *, compute: bool) -> None:
        whose = node.agents[0].name if node is not None and node.agents[0].private else ""
        key = f"{compute}{whose}{prompts!r}"
        if self._of.get(node) == key:
            return
        kept = self._kept.get(key)
        if kept is None:
            work = self._announce(node, prompts, steps, compute=compute)
            kept = self._kept[key] = _Kept(asyncio.get_running_loop().create_task(work))
        kept.nodes.add(node)
        self._drop(node)
        self._of[node] = key

    async def _announce(
        self, node: Node | None, prompts: Sequence[Sequence[Message]], steps: int, *, compute: bool
    ) -> Expectation | None:
        run, begin = self._run, time.perf_counter()
        try:
            space = run.graph.namespace
            if node is not None:
                space = node.agents[0].namespace(space, run.task_id)
            expectation = await self._engine.expect(
                prompts, steps=steps, compute=compute, namespace=space, group=run.task_id
            )
        except ShoalError:  # a hint failed; the requests themselves will tell why
            return None
        if expectation is not None and compute and node is not None:
            ms = round((time.perf_counter() - begin) * 1e3, 3)
            run.record({"kind": "prefetch", "agent_id": node.id, "tokens": len(expectation.tokens), "ms": ms})
        return expectation

    def _drop(self, node: Node | None) -> None:
        """This node no longer needs its beginning; if no other node does, take the announcement back."""
        key = self._of.pop(node, None)
        if key is None:
            return
        kept = self._kept[key]
        kept.nodes.discard(node)
        if not kept.nodes:
            del self._kept[key]
            kept.task.add_done_callback(_release)
            kept.task.cancel()
            self._gone = [task for task in self._gone if not task.done()]
            self._gone.append(kept.task)


def _release(task: asyncio.Task[Expectation | None]) -> None:
    if not task.cancelled() and task.exception() is None:
        expectation = task.result()
        if expectation is not None:
            expectation.release()


def make_keeper(run: Run) -> Keeper:
    """A keeper for the run's engine: one that does nothing where the engine takes no hints."""
    return PrefixKeeper(run, run.engine) if isinstance(run.engine, LocalEngine) else NoKeeper()
