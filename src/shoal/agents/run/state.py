"""The books of one run: what has ended and how, what still waits for what, and how far it is to the end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.agents.build.graph import Graph, GraphBuilder
from shoal.agents.build.node import Input, Node, NodeLike, Ref, Source
from shoal.agents.build.schema import pick
from shoal.agents.run.events import Outcome, State
from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.types import Message

_GIVEN = (State.DONE, State.DEFAULTED)


class RunState(GraphBuilder):
    """A graph's nodes and those its rules added, with their outcomes.

    Invariant: a node has an outcome or is in `open`, with the number of its needs that have none; an outcome is set
    once. Who runs is `Run`'s business.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Any], earlier: tuple[Message, ...] = ()) -> None:
        super().__init__()
        self.graph = graph
        self.earlier = earlier  # turns before this run, which all its prompts go on from
        self.inputs = dict(inputs)
        self.open: dict[Node, int] = {}
        self._outcomes: dict[Node, Outcome] = {}
        self._dependants: dict[Node, list[Node]] = {}
        self._children: dict[Node, list[Node]] = {}  # the nodes that its rule added
        self._members: dict[Node, list[Node]] = {}  # the nodes whose outputs are its output
        self._paths: dict[Node, int] = {}
        for node in graph.nodes.values():
            self.nodes[node.id] = node
            self._needs[node] = list(graph.needs(node))
            self._dependants[node] = []
        for node, needs in self._needs.items():
            self._wait_for(node, needs)

    # -- asking -------------------------------------------------------------------------------------------------

    def outcome(self, node: Node) -> Outcome | None:
        """How a node ended; None while it has not."""
        return self._outcomes.get(node)

    def output(self, node: Node) -> Any:
        """What an ended node gives its dependants; None when it gives nothing."""
        outcome = self._outcomes.get(node)
        return None if outcome is None else outcome.value

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs so far, by id."""
        return {node.id: outcome.value for node, outcome in self._outcomes.items() if outcome.state in _GIVEN}

    @property
    def finals(self) -> tuple[str, ...]:
        """The ids of the nodes that nothing waits for."""
        return tuple(node.id for node, dependants in self._dependants.items() if not dependants)

    def dependants(self, node: Node) -> Sequence[Node]:
        """The nodes that wait for it."""
        return self._dependants[node]

    def readers(self, node: Node) -> list[Node]:
        """The nodes that wait for it, and those that wait for a node it is a part of."""
        found, stack = [], list(self._dependants[node])
        while stack:
            other = stack.pop()
            if other in self._members:
                stack += self._dependants[other]
            else:
                found.append(other)
        return found

    def members(self, node: Node) -> Sequence[Node]:
        """The agents' nodes that a node stands for; an agent's node stands for itself."""
        found, stack = [], [node]
        while stack:
            part = stack.pop()
            if part in self._members:
                stack += reversed(self._members[part])
            else:
                found.append(part)
        return found

    def resolve(self, source: Source) -> Any:
        """The value behind a reference. GraphError when there is none."""
        try:
            if isinstance(source, Ref):
                return pick(self.output(source.node), source.path)
            if isinstance(source, Node):
                return self.output(source)
            return self.inputs[source.name] if isinstance(source, Input) else source
        except (LookupError, TypeError) as error:
            raise GraphError(f"{source} has no value: {error}", value=str(source)) from error

    def is_final(self, node: Node) -> bool:
        """True when nothing waits for it but nodes that it is a part of, and nothing waits for those."""
        while self._dependants[node]:
            if len(self._dependants[node]) > 1 or self._dependants[node][0] not in self._members:
                return False
            node = self._dependants[node][0]
        return True

    def subtree(self, node: Node) -> list[Node]:
        """The node, all that wait for it, and all that rules of these added."""
        found, stack = {node: None}, [node]
        while stack:
            at = stack.pop()
            for other in (*self._dependants[at], *self._children.get(at, ())):
                if other not in found:
                    found[other] = None
                    stack.append(other)
        return list(found)

    def offspring(self, node: Node) -> list[Node]:
        """The node and all that its rule and theirs added."""
        found, at = [node], 0
        while at < len(found):
            found += self._children.get(found[at], ())
            at += 1
        return found

    def critical_path(self, node: Node) -> int:
        """Tokens that may have to be written one after another from this node to the end of the graph.

        A final node that others led to counts as the longest of all: it outranks stragglers.
        """
        own = self._path(node)
        return max(self._paths.values()) + 1 if self._needs[node] and self.is_final(node) else own

    def _path(self, node: Node) -> int:
        stack = [node]
        while stack:
            at = stack[-1]
            missing = [other for other in self._dependants[at] if other not in self._paths]
            if missing:
                stack += missing
                continue
            stack.pop()
            ahead = max((self._paths[other] for other in self._dependants[at]), default=0)
            self._paths[at] = self._cost(at) + ahead
        return self._paths[node]

    def distance(self, node: Node) -> int:
        """Tokens that may have to be written one after another until this node's inputs are there."""
        known: dict[Node, int] = {}
        stack = [node]
        while stack:
            at = stack[-1]
            pending = [need for need in self._needs[at] if need in self.open]
            missing = [need for need in pending if need not in known]
            if missing:
                stack += missing
                continue
            stack.pop()
            known[at] = max((known[need] + self._cost(need) for need in pending), default=0)
        return known[node]

    def _cost(self, node: Node) -> int:
        if node.agent is not None:
            return node.agent.cost
        return 0 if node.rule is None or node in self._members else node.rule.cost

    # -- booking ------------------------------------------------------------------------------------------------

    def _wait_for(self, node: Node, needs: Sequence[Node]) -> None:
        """Book what a node waits for from now on."""
        self._paths.clear()
        for need in needs:
            self._dependants[need].append(node)
        self.open[node] = self.open.get(node, 0) + sum(need not in self._outcomes for need in needs)

    def _enter(self, node: Node, needs: NodeLike) -> Node:
        super()._enter(node, needs)
        self._dependants[node] = []
        if node.parent is not None:
            self._children.setdefault(node.parent, []).append(node)
        self._wait_for(node, self._needs[node])
        return node

    def depend(self, node: Node, *, on: NodeLike) -> None:
        """As `GraphBuilder.depend`."""
        known = len(self._needs[node])
        super().depend(node, on=on)
        self._wait_for(node, self._needs[node][known:])

    def _book(self, node: Node, outcome: Outcome) -> list[Node]:
        """Set a node's outcome; gives those that wait for nothing any more."""
        del self.open[node]
        self._outcomes[node] = outcome
        ready = []
        for other in self._dependants[node]:
            if other in self.open:
                self.open[other] -= 1
                if not self.open[other]:
                    ready.append(other)
        return ready

    def _joined(self, node: Node, single: bool) -> Outcome:
        """The outcome of a rule's node whose members have all ended."""
        members = self._members[node]
        ended = [self._outcomes[member] for member in members]
        for state in (State.CANCELLED, State.FAILED):
            bad = [member.id for member, outcome in zip(members, ended, strict=True) if outcome.state is state]
            if bad:
                return Outcome(state, cause=f"{', '.join(bad[:5])} {'was' if len(bad) == 1 else 'were'} {state}")
        if single:
            return ended[0]
        given = [outcome for outcome in ended if outcome.state in _GIVEN]
        if not given:
            return Outcome(State.SKIPPED, cause="all of its nodes were skipped")
        return Outcome(State.DONE, [outcome.value for outcome in given])


def check_inputs(graph: Graph, inputs: Mapping[str, Any]) -> None:
    """GraphError unless these are all the inputs that the graph has."""
    wanted = graph.inputs
    missing = sorted(wanted - set(inputs))
    if missing:
        raise GraphError(f"the graph lacks input {missing[0]!r}", value=missing, hint=f"give {missing[0]}=...")
    unknown = sorted(set(inputs) - wanted)
    if unknown:
        raise GraphError(f"the graph has no input {unknown[0]!r}", value=unknown, limit=sorted(wanted), hint="drop it")


def task_id_of(graph: Graph, task_id: str | None) -> str:
    """The name of a run, made up where none is given. GraphError for one that cannot be sent on."""
    if task_id is None:
        return f"{graph.name}-{secrets.token_hex(4)}"
    if not isinstance(task_id, str) or not task_id or not task_id.isascii() or not task_id.isprintable():
        raise GraphError(f"task_id is {task_id!r}", value=task_id, hint="it must be printable ASCII")
    return task_id
