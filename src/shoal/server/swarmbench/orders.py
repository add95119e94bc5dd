"""What a run of the page was asked for: a question to a team of specialists, or a graph from a file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shoal.agents.build.files import parse_graph
from shoal.agents.build.graph import Graph
from shoal.agents.carded import Before, CardedRun
from shoal.agents.cards import Specialist
from shoal.agents.graphcards import MAX_NODES, GraphCards, check_size, shown_node
from shoal.agents.swarm import SYNTHESIS, Swarm, swarm_messages, swarm_sampling
from shoal.server.swarmbench.record import Document
from shoal.server.swarmbench.turns import Thread
from shoal.types import Message, Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(ABC):
    """What all runs have. `sharing`: whether agents may share KV of what their prompts begin with, and with the other
    calls of `caller`. `deadline_s` is that of each agent. `synthesis`: the last card joins what the others wrote.
    `one_by_one`: run the agents once more, one after another, to compare the times.
    """

    question: str
    seed: int
    sharing: bool
    deadline_s: float | None = None
    caller: str = ""
    thread: Thread = field(default_factory=Thread)
    synthesis: bool = False
    one_by_one: bool = False

    def of_thread(self, thread: Thread) -> Self:
        """The same, as a turn of that conversation."""
        return replace(self, thread=thread)

    @abstractmethod
    def prompt(self, earlier: Sequence[Message]) -> list[Message]:
        """About the longest prompt of an agent that waits for nobody, to be measured."""

    @abstractmethod
    def work(self, *, alone: bool, checkpoint: Path | None, before: Before | None) -> CardedRun:
        """A phase of the run, not yet begun; `alone`: one by one. Raises `InvalidRequestError`, `GraphError`."""

    @property
    @abstractmethod
    def agents(self) -> int:
        """How many of the first cards are agents whose KV counts."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the history calls the run."""

    @abstractmethod
    def facts(self) -> Document:
        """What the record has of it: `settings`, and what only a graph has."""

    def _settings(self) -> Document:
        names = ("seed", "sharing", "deadline_s", "synthesis", "one_by_one")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmOrder(Order):
    """A question, and the team that answers it."""

    team: tuple[Specialist, ...]
    max_tokens: int
    temperature: float

    def prompt(self, earlier: Sequence[Message]) -> list[Message]:
        """That of the specialist with the longest task."""
        return swarm_messages(self.question, max(self.team, key=lambda one: len(one.task)), earlier)

    def work(self, *, alone: bool, checkpoint: Path | None, before: Before | None) -> CardedRun:
        """The swarm; alone, without the synthesis."""
        return Swarm(
            self.question,
            self.team,
            swarm_sampling(self.max_tokens, self.temperature, self.seed),
            serial=alone,
            synthesis=SYNTHESIS if self.synthesis and not alone else None,
            sharing=self.sharing,
            deadline_s=self.deadline_s,
            namespace=Namespace(agent=self.caller),
            earlier=self.thread.messages(),
            checkpoint=checkpoint,
            before=before,
        )

    @property
    def agents(self) -> int:
        """The team."""
        return len(self.team)

    @property
    def title(self) -> str:
        """The first line of the question."""
        return self.question.strip().split("\n", 1)[0][:80]

    def facts(self) -> Document:
        """As `Order.facts`."""
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {"settings": {**self._settings(), **sampling}, "graph": None}


def inputs_of(graph: Graph) -> list[str]:
    """The names of a graph's inputs in order; `question` is the first, if it is one. The page asks for that."""
    return sorted(graph.inputs, key=lambda name: (name != "question", name))


def describe(file: str, text: str) -> Document:
    """What is in a graph file: its name, its inputs, its nodes. Takes time; raises `GraphError`."""
    graph = parse_graph(file, text)
    check_size(graph, {})
    heads = [(shown_node(node), graph.needs(node)) for node in graph.nodes.values()]
    nodes = [{"name": head.name, "task": head.task, "needs": [one.id for one in needs]} for head, needs in heads]
    return {"name": graph.name, "inputs": inputs_of(graph), "nodes": nodes}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOrder(Order):
    """A graph: the name and the text of its file, and its inputs. `known` are the cards of a run that is resumed."""

    file: str
    text: str
    inputs: dict[str, Any]
    graph: Graph
    known: tuple[Specialist, ...] = ()

    @classmethod
    def read(cls, file: str, text: str, inputs: dict[str, Any], **more: Any) -> Self:
        """The order; reading the text takes time. Raises `GraphError`. What it is asked is its first input."""
        graph = parse_graph(file, text)
        said = inputs.get(next(iter(inputs_of(graph)), ""), "")
        question = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        return cls(file=file, text=text, inputs=inputs, graph=graph, question=question.strip() or graph.name, **more)

    def prompt(self, earlier: Sequence[Message]) -> list[Message]:
        """All inputs and the longest task: which prompt has which of them is not looked at."""
        agents = [agent for node in self.graph.nodes.values() for agent in node.agents]
        longest = max((f"{agent.role}\n{agent.task}" for agent in agents), key=len)
        given = "\n".join(map(str, self.inputs.values()))
        system: Message = {"role": "system", "content": self.graph.shared or longest}
        return [system, *earlier, {"role": "user", "content": f"{given}\n\n{longest}"}]

    def work(self, *, alone: bool, checkpoint: Path | None, before: Before | None) -> CardedRun:
        """The graph with its cards; it is never run alone."""
        assert not alone
        self.graph.namespace = self._namespace()
        return GraphCards(
            self.graph,
            self.inputs,
            known=self.known,
            seed=self.seed,
            sharing=self.sharing,
            deadline_s=self.deadline_s,
            earlier=self.thread.messages(),
            checkpoint=checkpoint,
            before=before,
        )

    def _namespace(self) -> Namespace:
        """Where its prefixes are shared: never with those of another caller, whatever the file says."""
        own = self.graph.namespace
        if own == Namespace():
            return Namespace(agent=self.caller)
        return Namespace(json.dumps(["graph", own.task, own.agent]), self.caller, own.version)

    @property
    def agents(self) -> int:
        """All."""
        return MAX_NODES

    @property
    def title(self) -> str:
        """The graph's name, and the first line of what it was asked."""
        first = self.question.split("\n", 1)[0]
        return (self.graph.name if first == self.graph.name else f"{self.graph.name}: {first}")[:80]

    def facts(self) -> Document:
        """As `Order.facts`."""
        graph = {"file": self.file, "text": self.text, "inputs": self.inputs, "name": self.graph.name}
        return {"settings": self._settings(), "graph": graph}
