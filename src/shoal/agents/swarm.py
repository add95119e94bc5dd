"""A swarm: one question, up to eight specialists, one batch.

The prompts of a swarm share everything but their last line, so the prefix tree computes rules and question once and
each agent adds a dozen tokens of its own. `Swarm` runs the agents and keeps a card for each, for whoever shows them.

    swarm = Swarm("Should we move?", specialists(8), SamplingParams(max_tokens=96, seed=1))
    swarm.start(engine)
    while not swarm.finished:
        for card in swarm.pump(timeout_s=0.1):
            print(card.name, card.text)
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING

from shoal.errors import InvalidRequestError, ShoalError
from shoal.sampling.sampler import derive_seed
from shoal.types import Event, FinishReason, Message, Namespace, Request, Result, SamplingParams

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.engine.handles import Handle


@dataclass(frozen=True, slots=True)
class Specialist:
    """One point of view: the name on its card, and the line that asks for it at the end of the prompt."""

    name: str
    task: str


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
"""Who reads what the others wrote, once they have ended."""


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


def swarm_messages(question: str, specialist: Specialist) -> list[Message]:
    """The chat for one specialist: what all share first, what is its own last."""
    return [{"role": "system", "content": RULES}, {"role": "user", "content": f"{question}\n\n{specialist.task}"}]


def synthesis_messages(question: str, reader: Specialist, notes: Sequence[tuple[str, str]]) -> list[Message]:
    """The chat for the one who joins `notes`, pairs of a name and a text. It begins as the agents' chats do."""
    told = "\n\n".join(f"{name}: {text.strip()}" for name, text in notes)
    content = f"{question}\n\nNotes:\n\n{told}\n\n{reader.task}"
    return [{"role": "system", "content": RULES}, {"role": "user", "content": content}]


def swarm_requests(
    question: str,
    team: Sequence[Specialist],
    sampling: SamplingParams,
    *,
    sharing: bool = True,
    deadline_s: float | None = None,
) -> list[Request]:
    """One request per specialist, each with a seed of its own drawn from `sampling.seed`, and with that deadline.

    Without `sharing` each is in a namespace that nobody else has, so that no prefix is found or left.
    Raises `InvalidRequestError` for a question without text.
    """
    question = question.strip()
    if not question:
        raise InvalidRequestError("the question is empty", param="question", value=question, hint="ask something")
    requests = []
    for number, specialist in enumerate(team):
        seed = None if sampling.seed is None else derive_seed(sampling.seed, number)
        own = dataclasses.replace(sampling, seed=seed)
        space = Namespace() if sharing else _alone()
        chat = swarm_messages(question, specialist)
        requests.append(Request(messages=chat, sampling=own, group="swarm", namespace=space, deadline_s=deadline_s))
    return requests


def _alone() -> Namespace:
    return Namespace(task=f"alone-{secrets.token_hex(8)}")


class State(StrEnum):
    """Where an agent stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = {FinishReason.STOP: State.DONE, FinishReason.LENGTH: State.DONE, FinishReason.ABORTED: State.ABORTED}


@dataclass(slots=True, eq=False)
class Card:
    """What one agent has written so far and where it stands. Changed by its swarm only, on the thread that pumps.

    `text` is the joined text of the events taken so far, `result` is set with the last one.
    """

    specialist: Specialist
    text: str = ""
    tokens: int = 0
    state: State = State.QUEUED
    first_token_at: float | None = None
    result: Result | None = None
    handle: Handle | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The specialist's name."""
        return self.specialist.name

    @property
    def finished(self) -> bool:
        """True when nothing more will come."""
        return self.state in (State.DONE, State.FAILED, State.ABORTED)

    def tokens_per_s(self, now: float) -> float:
        """Tokens per second since the first one; 0 while there are fewer than two."""
        if self.tokens < 2 or self.first_token_at is None:
            return 0.0
        result = self.result
        exact = result is not None and result.ttft_s is not None
        span = result.latency_s - result.ttft_s if exact else now - self.first_token_at  # type: ignore[union-attr,operator]
        return (self.tokens - 1) / span if span > 0 else 0.0

    def take(self, event: Event, now: float) -> None:
        """Add what an event brings."""
        if event.tokens and self.first_token_at is None:
            self.first_token_at = now
        self.text += event.text
        self.tokens += len(event.tokens)
        if event.result is not None:
            self.result = event.result
            self.state = _ENDS.get(event.result.finish_reason, State.FAILED)

    def look(self) -> None:
        """Ask the engine where the request stands. It may have moved on by the time this returns."""
        if self.handle is not None and not self.finished and self.handle.state != "finished":
            self.state = State(self.handle.state)


@dataclass(frozen=True, slots=True)
class Summary:
    """A swarm in numbers. `prefix_tokens`: tokens with which all prompts begin; `cached_tokens`: prompt tokens that
    were taken from the prefix tree instead of computed, all agents together."""

    tokens: int
    wall_s: float
    prefix_tokens: int
    cached_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all agents over the wall time, prefill included."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0


class Swarm:
    """One question and its agents: submits them, keeps their cards, ends them.

    Invariant: a submitted agent is pumped to its one last event, also after `abort` or when another was refused. All
    methods belong to one thread; the engine's thread only leaves events here. With `serial` each agent is submitted
    when the one before has ended, everything else being equal. With a `synthesis` one more agent reads what the
    others wrote, once they have ended; its card is not among `cards`.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `InvalidRequestError` for a question without text."""
        self._requests = swarm_requests(question, team, sampling, sharing=sharing, deadline_s=deadline_s)
        self.cards = [Card(specialist) for specialist in team]
        self.synthesis = Card(synthesis) if synthesis is not None else None
        self._question = question.strip()
        self._sharing = sharing
        self._coming = list(reversed(list(zip(self.cards, self._requests, strict=True))))
        self._serial = serial
        self._clock = clock
        self._engine: Engine | None = None
        self._running: dict[str, Card] = {}
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._news = threading.Event()
        self._streaming = False
        self._joining = False  # the agents have ended, the synthesis has begun
        self._began = self._ended = 0.0

    @property
    def finished(self) -> bool:
        """True when every agent has ended, the one of the synthesis too."""
        return all(card.finished for card in self.everyone)

    @property
    def everyone(self) -> list[Card]:
        """All cards, that of the synthesis last."""
        return [*self.cards, self.synthesis] if self.synthesis is not None else self.cards

    def start(self, engine: Engine) -> None:
        """Submit the agents (with `serial`, the first). Raises as `Engine.submit`, then none is left running."""
        self._engine = engine
        self._began = self._ended = self._clock()
        self._submit()

    def pump(self, timeout_s: float) -> list[Card]:
        """Wait until an agent ends or begins to stream or the time is up, bring the cards up to date, and return
        those that ended.

        Tokens between do not wake the caller: eight agents bring some thousand events a second, and each switch
        between threads would cost the engine.
        """
        self._news.wait(timeout_s)
        self._news.clear()
        now = self._clock()
        ended = []
        while not self._inbox.empty():
            event = self._inbox.get()
            card = self._running[event.request_id]
            card.take(event, now)
            if card.finished:
                del self._running[event.request_id]
                ended.append(card)
        if not self._running:
            self._go_on()
        for card in self._running.values():
            card.look()
        return ended

    def abort(self, only: Card | None = None) -> None:
        """End all agents, or one, at the next token boundary; those that are still to come end at once."""
        for entry in list(self._coming):
            if only is None or entry[0] is only:
                entry[0].state = State.ABORTED
                self._coming.remove(entry)
        for card in self._running.values():
            if only is None or card is only:
                assert card.handle is not None
                card.handle.abort()
        last = self.synthesis
        if last is not None and last.handle is None and (only is None or only is last):
            last.state = State.ABORTED

    def summary(self, now: float | None = None) -> Summary:
        """Numbers of the agents, without the synthesis, up to the last end or, while agents run, up to `now`."""
        ended = self._ended if now is None or all(card.finished for card in self.cards) else now
        prompts = [card.handle.prepared.spec.prompt for card in self.cards if card.handle is not None]
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
        return Summary(
            tokens=sum(card.tokens for card in self.cards),
            wall_s=ended - self._began,
            prefix_tokens=shared if len(prompts) > 1 else 0,
            cached_tokens=sum(card.result.cached_tokens for card in self.cards if card.result is not None),
        )

    def failures(self) -> list[ShoalError]:
        """Errors of the agents that failed."""
        results = [card.result for card in self.everyone]
        return [result.error for result in results if result is not None and result.error is not None]

    def _submit(self) -> None:
        assert self._engine is not None
        try:
            while self._coming and not (self._serial and self._running):
                card, request = self._coming[-1]
                handle = self._engine.submit(request, sink=self._take)
                self._coming.pop()
                card.handle = handle
                self._running[handle.id] = card
        except ShoalError:
            self.abort()
            raise

    def _go_on(self) -> None:
        """Nobody runs: the next of a serial run, or the synthesis."""
        if self._coming:
            self._submit()
        elif self.synthesis is not None and self.synthesis.handle is None and not self.synthesis.finished:
            try:
                self._synthesise(self.synthesis)
            except ShoalError:
                self.abort()
                raise

    def _synthesise(self, card: Card) -> None:
        """Submit the synthesis of what there is."""
        assert self._engine is not None
        notes = [(other.name, other.text) for other in self.cards if other.text.strip()]
        if not notes:
            card.state = State.ABORTED
            return
        self._joining = True
        request = self._fitting(self._engine, card.specialist, notes)
        card.handle = self._engine.submit(request, sink=self._take)
        self._running[card.handle.id] = card

    def _fitting(self, engine: Engine, reader: Specialist, notes: Sequence[tuple[str, str]]) -> Request:
        """The request for the synthesis, the notes cut, all alike, until they leave the answer its room."""
        first = self._requests[0]
        limit = min(engine.spec.context_length, engine.spec.kv_capacity)
        limit -= min(first.sampling.max_tokens, limit // 4)
        longest = max(len(text) for _, text in notes)
        while True:
            messages = synthesis_messages(self._question, reader, [(name, text[:longest]) for name, text in notes])
            space = Namespace() if self._sharing else _alone()
            request = dataclasses.replace(first, messages=messages, namespace=space)
            if longest == 0 or len(engine.inputs.tokenize(request)) <= limit:
                return request
            longest = longest * 2 // 3

    def _take(self, event: Event) -> None:
        """On the engine's thread."""
        self._inbox.put(event)
        if event.finished and not self._joining:
            self._ended = self._clock()
        if event.finished or not self._streaming:
            self._streaming = True
            self._news.set()
