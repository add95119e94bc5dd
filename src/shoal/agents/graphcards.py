"""A graph with a card for each node, those that its rules add too: what a page shows of a graph from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.agents.build.rules import Map
from shoal.agents.carded import CardedRun
from shoal.agents.cards import Card, CardState, Specialist
from shoal.agents.run.events import Outcome, State
from shoal.agents.run.state import check_inputs
from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.agents.build.graph import Graph
    from shoal.agents.build.node import Node
    from shoal.types import Request

MAX_NODES = 48
"""Nodes of a graph on cards, with those that its rules add. A number holds a set of them, also in JavaScript."""
_ENDS = {
    State.DONE: CardState.DONE,
    State.DEFAULTED: CardState.DONE,
    State.SKIPPED: CardState.SKIPPED,
    State.FAILED: CardState.FAILED,
    State.CANCELLED: CardState.ABORTED,
}


def shown_node(node: Node) -> Specialist:
    """A node as its card is headed: its id, and what it is to do."""
    if node.agent is not None:
        return Specialist(node.id, node.agent.task)
    assert node.rule is not None
    return Specialist(node.id, node.rule.label)


def check_size(graph: Graph, inputs: Mapping[str, Any]) -> None:
    """GraphError for a graph that is known to have more than `MAX_NODES` nodes before it runs."""
    lists = [
        inputs.get(getattr(node.rule.over, "name", ""), node.rule.over)
        for node in graph.nodes.values()
        if isinstance(node.rule, Map)
    ]
    count = len(graph.nodes) + sum(len(one) for one in lists if isinstance(one, Sequence))
    if count > MAX_NODES:
        raise _too_many(count)


def _too_many(count: int) -> GraphError:
    hint = "make it smaller, or run it with `shoal graph run`"
    return GraphError(f"the graph has {count} nodes", value=count, limit=MAX_NODES, hint=hint)


class GraphCards(CardedRun):
    """A graph that somebody wrote, on cards. A node that is stopped is skipped: what waits for it goes on without it.

    The cards stand in the order in which their nodes came. `known` are the cards of a run that is resumed, in the order
    they had. A node ends as its policies say; the run has failed when a final node has.
    """

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Any], *, known: Sequence[Specialist] = (), **settings: Any
    ) -> None:
        """Raises `GraphError` for a graph of too many nodes, and for missing or unknown inputs."""
        check_inputs(graph, inputs)
        check_size(graph, inputs)
        super().__init__(graph, **settings)
        self._given = dict(inputs)
        self._stopped: set[Card] = set()
        for specialist in known:
            self._add(specialist)
        for node in graph.nodes.values():
            self._meet(node)

    @property
    def failed(self) -> bool:
        """True when a final node has failed."""
        run = self._run
        ended = [] if run is None else [run.outcome(run.nodes[name]) for name in run.finals]
        return any(outcome is not None and outcome.state is State.FAILED for outcome in ended)

    @property
    def finals(self) -> list[int]:
        """The places of the cards whose texts are what the graph is for."""
        nodes = [] if self._run is None else [self._run.nodes[name] for name in self._run.finals]
        parts = [part for node in nodes if self._run is not None for part in self._run.members(node)]
        return [self.cards.index(self._card_of[part.id]) for part in parts if part.id in self._card_of]

    def abort(self, only: Card | None = None) -> None:
        """End all nodes, or one; requests end at the next token boundary."""
        run = self._run
        for card in self.cards if only is None else [only]:
            if not card.finished and (run is None or card not in self._node_of):
                card.state = CardState.ABORTED  # it has not begun: it is discarded when it would
            elif not card.finished and run is not None and only is not None:
                self._stopped.add(card)
                run.discard(self._node_of[card])
        if run is not None and only is None:
            for node in list(run.open):
                run.cancel(node)
        self._news.set()

    def card(self, request: Request) -> Card:
        """As `CardedRun.card`; its node may be new. Raises the refusal of a run that has grown too large."""
        self._look_around()
        if self._refusal is not None:
            raise self._refusal
        return super().card(request)

    # -- inside -------------------------------------------------------------------------------------------------

    def _inputs(self) -> Mapping[str, Any]:
        return self._given

    def _add(self, specialist: Specialist) -> Card:
        card = Card(specialist)
        self.cards.append(card)
        self._card_of[specialist.name] = card
        return card

    def _meet(self, node: Node) -> None:
        """Give a node its card."""
        self._enter(self._card_of.get(node.id) or self._add(shown_node(node)), node)

    def _look_around(self) -> None:
        """Give nodes that rules have added their cards, as many as there may be; a run that has more is ended."""
        run = self._run
        if run is None or len(run.nodes) == len(self._node_of):
            return
        for node in list(run.nodes.values())[len(self._node_of) : MAX_NODES]:
            self._meet(node)
        if len(run.nodes) > MAX_NODES and self._refusal is None:
            self.refuse(_too_many(len(run.nodes)))

    def _settle(self) -> None:
        self._look_around()
        for card, node in self._node_of.items():
            if node.agent is None and not card.finished and self._run is not None:
                card.state = CardState.DECODING if self._run.state(node) is State.RUNNING else CardState.QUEUED
        super()._settle()

    def _request_ended(self, card: Card) -> None:
        """Whether its node has ended with that, its policy says a little later."""
        card.state = CardState.DECODING

    def _conclude(self, card: Card, outcome: Outcome) -> None:
        node = self._node_of[card]
        if node.agent is not None and outcome.state in (State.DONE, State.DEFAULTED):
            card.rewrite(outcome.shown)
        card.cause = outcome.cause
        card.state = _ENDS[outcome.state]
        if card in self._stopped:
            card.cause, card.state = None, CardState.ABORTED
