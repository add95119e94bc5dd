"""A swarm: one question, up to eight specialists, one batch; and a card for each, to be shown.

The prompts of a swarm share everything but their last line, so the prefix tree computes rules and question once and
each agent adds a dozen tokens of its own. The agents are a `Graph` of siblings and, if wanted, a synthesis.

    swarm = Swarm("Should we move?", specialists(8), SamplingParams(max_tokens=96, seed=1))
    swarm.start(engine)
    while not swarm.finished:
        for card in await swarm.pump(timeout_s=0.1):
            print(card.name, card.text)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.agents.build.agent import Agent
from shoal.agents.build.graph import Graph
from shoal.agents.build.policy import skip
from shoal.agents.cards import Card, CardState, Specialist, Summary
from shoal.agents.run.engines import leaving
from shoal.agents.run.events import State as NodeState
from shoal.engine.aio import AsyncEngine
from shoal.errors import InvalidRequestError, ShoalError
from shoal.types import Event, Message, Namespace, Request, SamplingParams

if TYPE_CHECKING:
    from shoal.agents.build.node import Node
    from shoal.agents.run.run import Run
    from shoal.engine.engine import Engine
    from shoal.engine.handles import Expectation, Handle


# A small model keeps to a number of sentences better than to one of words, and follows orders, not characters.
RULES = "You are a helpful expert. Answer in three short sentences at most. Stay on the topic of the question."

SPECIALISTS = (
    Specialist("Key facts", "List three facts about this topic, one short sentence each."),
    Specialist("Plan", "Write a plan with three steps, one short sentence each."),
    Specialist("Risks", "List three risks, one short sentence each."),
    Specialist("Contrarian", "List three arguments against it, one short sentence each."),
    Specialist("Benefits", "List three benefits, one short sentence each."),
    Specialist("Questions", "List three short questions to think about first."),
    Specialist("Story", "Tell a very short story about one person as an example."),
    Specialist("Advice", "Sum up in two short sentences what you would do and why."),
)


SYNTHESIS = Specialist(
    "Synthesis", "Join these notes into one answer to the question, in four short sentences at most."
)
"""The agent that reads what the others wrote, once they have ended."""


def swarm_sampling(max_tokens: int, temperature: float, seed: int) -> SamplingParams:
    """How a swarm's agents choose their tokens: what keeps a small model from repeating itself."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=seed
    )


def specialists(count: int) -> tuple[Specialist, ...]:
    """The first `count` built-in specialists; `InvalidRequestError` unless there are as many."""
    most = len(SPECIALISTS)
    if not 1 <= count <= most:
        limit = f"a whole number from 1 to {most}"
        raise InvalidRequestError(
            f"agents is {count}", param="agents", value=count, limit=limit, hint=f"it must be {limit}"
        )
    return SPECIALISTS[:count]


def swarm_messages(question: str, specialist: Specialist, earlier: Sequence[Message] = ()) -> list[Message]:
    """The chat for one specialist: what all share first, what is its own last."""
    return [
        {"role": "system", "content": RULES},
        *earlier,
        {"role": "user", "content": f"{question}\n\n{specialist.task}"},
    ]


def notes_text(notes: Sequence[tuple[str, str]]) -> str:
    """What several agents wrote, pairs of a name and a text, as it stands in the prompt of the synthesis."""
    return "\n\n".join(["Notes:", *(f"{name}: {text.strip()}" for name, text in notes)])


def synthesis_messages(
    question: str, reader: Specialist, notes: Sequence[tuple[str, str]], earlier: Sequence[Message] = ()
) -> list[Message]:
    """The chat for the one who joins `notes`, pairs of a name and a text. It begins as the agents' chats do."""
    return swarm_messages(f"{question}\n\n{notes_text(notes)}", reader, earlier)


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of a swarm that broke off and is resumed: how long it had run, and when its last agent had ended.

    `recall` fills in the card (its place among all) of an agent that had ended; the text and the state that the
    checkpoint has are there already.
    """

    used_s: float
    ended_s: float
    recall: Callable[[int, Card], None]


class Swarm:
    """One question and its agents: builds their graph, runs it, keeps their cards, ends them.

    Invariant: a submitted agent is followed to its one last event, also after `abort` or when another was refused. All
    methods belong to one event loop. With `serial` each agent is submitted when the one before has ended, everything
    else being equal. With a `synthesis` one more agent reads what the others wrote, once they have ended; its card is
    not among `cards`. Without `sharing` each agent has a namespace of its own, so that no prefix is found
    or left; with it, prefixes are shared inside `namespace`. `deadline_s` is that of each agent, from when it is
    submitted. `earlier` are turns of a conversation that the question goes on from; every prompt begins with them.
    What has ended is kept in the new file `checkpoint`; with `before` that file is there and the swarm goes on from it.
    """

    def __init__(
        self,
        question: str,
        team: Sequence[Specialist],
        sampling: SamplingParams,
        *,
        serial: bool = False,
        synthesis: Specialist | None = None,
        sharing: bool = True,
        deadline_s: float | None = None,
        namespace: Namespace | None = None,
        earlier: Sequence[Message] = (),
        checkpoint: Path | None = None,
        before: Before | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `InvalidRequestError` for a question without text."""
        self._question = question.strip()
        if not self._question:
            raise InvalidRequestError("the question is empty", param="question", value=question, hint="ask something")
        self.cards = [Card(specialist) for specialist in team]
        self.synthesis = Card(synthesis) if synthesis is not None else None
        self.graph = Graph(RULES, name="swarm", namespace=namespace)
        self.serial, self.sharing, self.deadline_s = serial, sharing, deadline_s
        self._sampling = sampling
        self._earlier = tuple(earlier)
        self._checkpoint, self._before = checkpoint, before
        self._clock = clock
        self._card_of: dict[str, Card] = {}  # by the id of its node
        self._node_of: dict[Card, Node] = {}
        for number, card in enumerate(self.cards):
            self._enter(card, self.graph.add(self._agent(f"agent-{number}", f"{{task_{number}}}")))
        if self.synthesis is not None:
            self._join = self.graph.call(self._synthesise, after=list(self._node_of.values()), name="join")
        self._run: Run | None = None
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._ended_cards: list[Card] = []
        self._refusal: ShoalError | None = None
        self._concluded = False
        self._began = self._ended = 0.0

    @property
    def finished(self) -> bool:
        """True when every agent has ended, the one of the synthesis too, and `pump` has said so."""
        return self._concluded

    @property
    def everyone(self) -> list[Card]:
        """All cards, that of the synthesis last."""
        return [*self.cards, self.synthesis] if self.synthesis is not None else self.cards

    def start(self, engine: Engine) -> None:
        """Begin, on the running event loop."""
        self._began = self._ended = self._clock()
        if self._before is not None:
            self._began -= self._before.used_s
            self._ended = self._began + self._before.ended_s
        self._work = asyncio.get_running_loop().create_task(self._follow(SwarmEngine(engine, self)))

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
        """Numbers of the agents, without the synthesis, up to the last end or, while agents run, up to `now`."""
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

    def _agent(self, name: str, task: str) -> Agent:
        """An agent that is asked the question and then this; what it writes is the swarm's business, so none fails."""
        return Agent(name, role="{question}", task=task, sampling=self._sampling, on_failure=skip)

    def _enter(self, card: Card, node: Node) -> Node:
        self._card_of[node.id] = card
        self._node_of[card] = node
        return node

    async def _follow(self, engine: SwarmEngine) -> None:
        """Run the graph to its end. Raises the refusal of a request."""
        inputs: dict[str, Any] = {"question": self._question}
        inputs |= {f"task_{number}": card.specialist.task for number, card in enumerate(self.cards)}
        kept: dict[str, Any] = {"checkpoint": self._checkpoint, "resumed": self._before is not None}
        if self._before is None:
            kept["earlier"] = self._earlier
        try:
            async with self.graph.start(engine, **kept, **inputs) as self._run:
                self._settle()  # what had ended before: the synthesis reads it
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
                card.text = outcome.text or ""
                card.state = CardState.DONE if outcome.state is NodeState.DONE else CardState.FAILED
                if self._before is not None and card.handle is None:
                    self._before.recall(self.everyone.index(card), card)
                    self._ended_cards.append(card)
                else:
                    self._card_ended(card)

    def _card_ended(self, card: Card) -> None:
        self._ended_cards.append(card)
        if card is not self.synthesis:
            self._ended = self._clock()
        self._news.set()

    async def _synthesise(self, run: Run, *texts: str | None) -> Node | None:  # noqa: ARG002 - aborted agents wrote too
        """Add the synthesis to the run; nothing when no agent wrote anything, or when the synthesis was aborted."""
        card = self.synthesis
        assert card is not None
        notes = [(other.name, other.text) for other in self.cards if other.text.strip()]
        if not notes or card.finished:
            card.state = CardState.ABORTED
            return None
        assert isinstance(run.engine, SwarmEngine)
        fitting = await asyncio.to_thread(self._fitting, run.engine.engine, card.specialist, notes)
        agent = self._agent("synthesis", "{notes}\n\n{task}")
        values = {"notes": notes_text(fitting), "task": card.specialist.task}
        return self._enter(card, run.spawn(self._join, agent, "synthesis", (), values))

    def _fitting(
        self, engine: Engine, reader: Specialist, notes: Sequence[tuple[str, str]]
    ) -> Sequence[tuple[str, str]]:
        """The notes, cut, all alike, until they leave the answer its room."""
        limit = min(engine.spec.context_length, engine.spec.kv_capacity)
        limit -= min(self._sampling.max_tokens, limit // 4)
        longest = max(len(text) for _, text in notes)
        while True:
            cut = [(name, text[:longest]) for name, text in notes]
            request = Request(messages=synthesis_messages(self._question, reader, cut, self._earlier))
            if longest == 0 or len(engine.tokenize(request)) <= limit:
                return cut
            longest = longest * 2 // 3

    # -- what the engine below asks -----------------------------------------------------------------------------

    def card(self, request: Request) -> Card:
        """The card of a request of this swarm's run."""
        assert request.id is not None
        return self._card_of[request.id.split("/")[1]]

    def take(self, card: Card, event: Event) -> None:
        """Add what an event of a card's request brings."""
        began = card.first_token_at is None
        card.take(event, self._clock())
        if card.finished:
            self._card_ended(card)
        elif began:
            self._news.set()

    def refused(self, error: ShoalError) -> None:
        """A request was refused: the run ends, with that error."""
        self._refusal = self._refusal or error
        self.abort()


class SwarmEngine(AsyncEngine):
    """The engine as one swarm's run sees it: each request as the swarm wants it, its events put on its card."""

    def __init__(self, engine: Engine, swarm: Swarm) -> None:
        super().__init__(engine)
        self._swarm = swarm
        self._turn = asyncio.Lock() if swarm.serial else contextlib.nullcontext()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """As `AsyncEngine.generate`."""
        swarm, card = self._swarm, self._swarm.card(request)
        changes: dict[str, Any] = {"deadline_s": swarm.deadline_s}
        if not swarm.sharing:
            changes["namespace"] = Namespace(task=f"alone-{secrets.token_hex(8)}")
        async with self._turn:
            try:
                async with leaving(super().generate(dataclasses.replace(request, **changes))) as events:
                    async for event in events:
                        swarm.take(card, event)
                        yield event
            except ShoalError as error:
                swarm.refused(error)
                raise

    async def expect(self, prompts: Any, **settings: Any) -> Expectation | None:
        """As `AsyncEngine.expect`; nothing is expected to be shared where nothing is to be."""
        return await super().expect(prompts, **settings) if self._swarm.sharing else None

    def _submit(self, request: Request, sink: Callable[[Event], None]) -> Handle:
        handle = super()._submit(request, sink)
        self._swarm.card(request).handle = handle
        return handle
