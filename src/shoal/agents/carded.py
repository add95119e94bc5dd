"""A run of a graph with a card for each agent: what `Swarm` and a graph from a file have in common on a screen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.agents.cards import Card, CardState, Summary
from shoal.agents.run.engines import leaving
from shoal.agents.run.events import Outcome
from shoal.agents.run.events import State as NodeState
from shoal.engine.aio import AsyncEngine
from shoal.errors import ShoalError
from shoal.types import Event, Message, Namespace, Request, Result

if TYPE_CHECKING:
    from shoal.agents.build.graph import Graph
    from shoal.agents.build.node import Node
    from shoal.agents.run.run import Run
    from shoal.engine.engine import Engine
    from shoal.engine.handles import Expectation, Handle


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of a run that broke off and is resumed: how long it had run, and when its last agent had ended.

    `recall` fills in the card (its place among all) of an agent that had ended; the text and the state that the
    checkpoint has are there already.
    """

    used_s: float
    ended_s: float
    recall: Callable[[int, Card], None]


class CardedRun:
    """Runs one graph, keeps a card for each of its agents, ends them.

    Invariant: a submitted agent is followed to its one last event, also after `abort`. All methods belong to one event
    loop. With `serial` each agent is submitted when the one before has ended, everything else being equal. Without
    `sharing` each agent has a namespace of its own, so that no prefix is found or left. `deadline_s` is the longest an
    agent may take, from when it is submitted. `seed` makes the run repeatable. `earlier` are turns of a conversation
    that all prompts go on from. What has ended is kept in the new file `checkpoint`; with `before` that file is there
    and the run goes on from it.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        serial: bool = False,
        sharing: bool = True,
        deadline_s: float | None = None,
        seed: int | None = None,
        earlier: Sequence[Message] = (),
        checkpoint: Path | None = None,
        before: Before | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.graph = graph
        self.cards: list[Card] = []
        self.serial, self.sharing, self.deadline_s = serial, sharing, deadline_s
        self.results: list[Result] = []  # of all requests that have ended
        self._seed, self._earlier = seed, tuple(earlier)
        self._checkpoint, self._before = checkpoint, before
        self._clock = clock
        self._card_of: dict[str, Card] = {}  # by the id of its node
        self._node_of: dict[Card, Node] = {}
        self._run: Run | None = None
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._ended_cards: list[Card] = []
        self._refusal: ShoalError | None = None
        self._concluded = False
        self._began = self._ended = 0.0

    @property
    def finished(self) -> bool:
        """True when every agent has ended and `pump` has said so."""
        return self._concluded

    @property
    def everyone(self) -> list[Card]:
        """All cards, in the order in which they are shown."""
        return self.cards

    @property
    def failed(self) -> bool:
        """True when an agent has failed."""
        return any(card.state is CardState.FAILED for card in self.everyone)

    @property
    def finals(self) -> list[int]:
        """The places of the cards whose texts are the answer, where that is not all of them."""
        return []

    def start(self, engine: Engine) -> None:
        """Begin, on the running event loop."""
        self._began = self._ended = self._clock()
        if self._before is not None:
            self._began -= self._before.used_s
            self._ended = self._began + self._before.ended_s
        self._work = asyncio.get_running_loop().create_task(self._follow(CardedEngine(engine, self)))

    async def pump(self, timeout_s: float) -> list[Card]:
        """Wait until an agent ends or begins to stream or the time is up; returns those that ended since the last call.

        Raises what a request was refused with (as `Engine.submit`); then none is left running.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()
        assert self._work is not None
        if self._work.done() or all(card.finished for card in self.everyone):
            self._concluded = True
            await self._work
        self._settle()
        for card in self.everyone:
            card.look()
        ended, self._ended_cards = self._ended_cards, []
        return ended

    def abort(self, only: Card | None = None) -> None:
        """End all agents, or one, at the next token boundary; those that are still to come end at once."""
        for card in self.everyone:
            if card.finished or (only is not None and card is not only):
                continue
            if card.handle is not None:
                card.handle.abort()
                continue
            card.state = CardState.ABORTED
            if self._run is not None and card in self._node_of:
                self._run.discard(self._node_of[card])
        self._news.set()

    def interrupt(self) -> None:
        """End the run here, and leave what has not ended to a resume from its checkpoint."""
        if self._run is not None:
            self._run.interrupt()

    def summary(self, now: float | None = None) -> Summary:
        """Numbers of `cards`, up to the last end or, while agents run, up to `now`."""
        ended = self._ended if now is None or all(card.finished for card in self.cards) else now
        prompts = [card.handle.prompt_tokens for card in self.cards if card.handle is not None]
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
        return Summary(
            tokens=sum(card.tokens for card in self.cards),
            wall_s=ended - self._began,
            prefix_tokens=shared if len(prompts) > 1 else 0,
            prompt_tokens=sum(card.result.prompt_tokens for card in self.cards if card.result is not None),
            cached_tokens=sum(card.result.cached_tokens for card in self.cards if card.result is not None),
        )

    def failures(self) -> list[ShoalError]:
        """Errors of the agents that failed."""
        results = [card.result for card in self.everyone]
        return [result.error for result in results if result is not None and result.error is not None]

    # -- the run ------------------------------------------------------------------------------------------------

    def _inputs(self) -> Mapping[str, Any]:
        """The inputs of the graph."""
        return {}

    def _enter(self, card: Card, node: Node) -> Node:
        self._card_of[node.id] = card
        self._node_of[card] = node
        return node

    async def _follow(self, engine: CardedEngine) -> None:
        """Run the graph to its end. Raises the refusal of a request."""
        kept: dict[str, Any] = {"checkpoint": self._checkpoint, "resumed": self._before is not None}
        if self._before is None:
            kept |= {"seed": self._seed, "earlier": self._earlier}
        try:
            async with self.graph.start(engine, **kept, **self._inputs()) as self._run:
                self._settle()  # what had ended before: the synthesis of a swarm reads it
                for card in self.everyone:
                    if card.finished and card in self._node_of:  # aborted before it began
                        self._run.discard(self._node_of[card])
                await self._run.result()
        finally:
            engine.detach()
            self._settle()
            for card in self.everyone:
                if not card.finished:
                    card.state = CardState.ABORTED
            self._news.set()
        if self._refusal is not None:
            raise self._refusal

    def _settle(self) -> None:
        """Bring up to date the cards whose nodes ended without a request: the same call was made already, or failed."""
        for card, node in self._node_of.items():
            outcome = None if card.finished or self._run is None else self._run.outcome(node)
            if outcome is not None:
                self._conclude(card, outcome)
                if self._before is not None and card.handle is None:
                    self._before.recall(self.everyone.index(card), card)
                    self._ended_cards.append(card)
                else:
                    self._card_ended(card)

    def _conclude(self, card: Card, outcome: Outcome) -> None:
        """Put on a card how its node has ended."""
        card.text = outcome.text or ""
        card.state = CardState.DONE if outcome.state is NodeState.DONE else CardState.FAILED

    def _request_ended(self, card: Card) -> None:
        """A card has its result. Here its node has ended with that."""
        self._card_ended(card)

    def _card_ended(self, card: Card) -> None:
        self._ended_cards.append(card)
        if card in self.cards:
            self._ended = self._clock()
        self._news.set()

    # -- what the engine below asks -----------------------------------------------------------------------------

    def card(self, request: Request) -> Card:
        """The card of a request of this run: its id is `task/node/attempt`."""
        assert request.id is not None
        assert self._run is not None
        return self._card_of[request.id.removeprefix(f"{self._run.task_id}/").rpartition("/")[0]]

    def take(self, card: Card, event: Event) -> None:
        """Add what an event of a card's request brings."""
        began = card.first_token_at is None
        card.take(event, self._clock())
        if event.result is not None:
            self.results.append(event.result)
            self._request_ended(card)
        elif began:
            self._news.set()

    def refused(self, error: ShoalError) -> None:
        """A request was refused. What becomes of its node is its policy's business."""

    def refuse(self, error: ShoalError) -> None:
        """End the run; `pump` raises that error when all have ended."""
        self._refusal = self._refusal or error
        self.abort()


class CardedEngine(AsyncEngine):
    """The engine as one such run sees it: each request as the run wants it, its events put on its card."""

    def __init__(self, engine: Engine, run: CardedRun) -> None:
        super().__init__(engine)
        self._run = run
        self._turn = asyncio.Lock() if run.serial else contextlib.nullcontext()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """As `AsyncEngine.generate`."""
        run, card = self._run, self._run.card(request)
        limits = [limit for limit in (request.deadline_s, run.deadline_s) if limit is not None]
        changes: dict[str, Any] = {"deadline_s": min(limits, default=None)}
        if not run.sharing:
            changes["namespace"] = Namespace(task=f"alone-{secrets.token_hex(8)}")
        async with self._turn:
            try:
                async with leaving(super().generate(dataclasses.replace(request, **changes))) as events:
                    async for event in events:
                        run.take(card, event)
                        yield event
            except ShoalError as error:
                run.refused(error)
                raise

    async def expect(self, prompts: Any, **settings: Any) -> Expectation | None:
        """As `AsyncEngine.expect`; nothing is expected to be shared where nothing is to be."""
        return await super().expect(prompts, **settings) if self._run.sharing else None

    def _submit(self, request: Request, sink: Callable[[Event], None]) -> Handle:
        handle = super()._submit(request, sink)
        self._run.card(request).begin(handle)
        return handle
