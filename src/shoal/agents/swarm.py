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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.agents.build.agent import Agent
from shoal.agents.build.graph import Graph
from shoal.agents.build.policy import skip
from shoal.agents.carded import CardedEngine, CardedRun
from shoal.agents.cards import Card, CardState, Specialist
from shoal.errors import InvalidRequestError, ShoalError
from shoal.types import Message, Namespace, Request, SamplingParams

if TYPE_CHECKING:
    from shoal.agents.build.node import Node
    from shoal.agents.run.run import Run
    from shoal.engine.engine import Engine

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


class Swarm(CardedRun):
    """One question and its agents: a `CardedRun` of a graph of siblings.

    With a `synthesis` one more agent reads what the others wrote, once they have ended; its card is not among `cards`.
    When one request is refused, all end. Prefixes are shared inside `namespace`; the rest is as in `CardedRun`.
    """

    def __init__(
        self,
        question: str,
        team: Sequence[Specialist],
        sampling: SamplingParams,
        *,
        synthesis: Specialist | None = None,
        namespace: Namespace | None = None,
        **settings: Any,
    ) -> None:
        """Raises `InvalidRequestError` for a question without text."""
        self._question = question.strip()
        if not self._question:
            raise InvalidRequestError("the question is empty", param="question", value=question, hint="ask something")
        super().__init__(Graph(RULES, name="swarm", namespace=namespace), **settings)
        self.cards = [Card(specialist) for specialist in team]
        self.synthesis = Card(synthesis) if synthesis is not None else None
        self._sampling = sampling
        for number, card in enumerate(self.cards):
            self._enter(card, self.graph.add(self._agent(f"agent-{number}", f"{{task_{number}}}")))
        if self.synthesis is not None:
            self._join = self.graph.call(self._synthesise, after=list(self._node_of.values()), name="join")

    @property
    def everyone(self) -> list[Card]:
        """All cards, that of the synthesis last."""
        return [*self.cards, self.synthesis] if self.synthesis is not None else self.cards

    def _inputs(self) -> Mapping[str, Any]:
        tasks = {f"task_{number}": card.specialist.task for number, card in enumerate(self.cards)}
        return {"question": self._question, **tasks}

    def refused(self, error: ShoalError) -> None:
        """A request was refused: the run ends, with that error."""
        self.refuse(error)

    def _agent(self, name: str, task: str) -> Agent:
        """An agent that is asked the question and then this; what it writes is the swarm's business, so none fails."""
        return Agent(name, role="{question}", task=task, sampling=self._sampling, on_failure=skip)

    async def _synthesise(self, run: Run, *texts: str | None) -> Node | None:  # noqa: ARG002 - aborted agents wrote too
        """Add the synthesis to the run; nothing when no agent wrote anything, or when the synthesis was aborted."""
        card = self.synthesis
        assert card is not None
        notes = [(other.name, other.text) for other in self.cards if other.text.strip()]
        if not notes or card.finished:
            card.state = CardState.ABORTED
            return None
        assert isinstance(run.engine, CardedEngine)
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
