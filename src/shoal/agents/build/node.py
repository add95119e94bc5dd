"""The nodes of a graph, and lazy references to what they will write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.agents.build.agent import Agent
    from shoal.agents.run.run import Run


class Rule(ABC):
    """What a node without an agent of its own does when its inputs are there: it may add more nodes.

    `agents` are those whose prompts it may fill in, `provides` the names that it fills in itself, and `sources` what
    it reads: it is skipped when one of these was.
    """

    agents: Sequence[Agent]
    after: tuple[Node, ...]  # what the nodes it adds will wait for
    provides: tuple[str, ...] = ()

    @property
    def sources(self) -> Sequence[Source]:
        """What it cannot do without."""
        return ()

    @property
    def cost(self) -> int:
        """Tokens that the nodes it will add may write one after another."""
        return 0

    @property
    @abstractmethod
    def label(self) -> str:
        """What a drawing shows."""

    @abstractmethod
    async def expand(self, run: Run, node: Node) -> Expansion:
        """Give a value, or the node or nodes (added to the run) whose outputs become this node's."""

    def proceed(self, run: Run, node: Node, value: Any) -> Node | None:  # noqa: ARG002 - for rules that go on
        """Once the node that it became has written `value`: another one to become, or None to leave it at that."""
        return None


class Node:
    """One step of a graph: an agent to run, or a rule that adds more nodes when its turn comes.

    `plan.sections` and `plan["sections"]` refer to a field of its structured output; use the second form for fields
    named like an attribute here. A node is the same object in the graph and in all of its runs, and holds no state.
    """

    def __init__(
        self,
        id: str,
        *,
        agent: Agent | None = None,
        rule: Rule | None = None,
        values: Mapping[str, Any] | None = None,
        continues: Node | None = None,
        parent: Node | None = None,
    ) -> None:
        self.id = id
        self.agent = agent
        self.rule = rule
        self.values = values or {}  # what {item}, {index} and {round} stand for
        self.continues = continues  # the node whose conversation this one goes on with
        self.parent = parent  # the node whose rule added this one

    @property
    def agents(self) -> Sequence[Agent]:
        """The agents that write for it, or may."""
        if self.agent is not None:
            return (self.agent,)
        return () if self.rule is None else self.rule.agents

    def __getattr__(self, field: str) -> Ref:
        if field.startswith("_"):
            raise AttributeError(field)
        return self[field]

    def __getitem__(self, field: str | int) -> Ref:
        return Ref(self, ())[field]

    def __iter__(self) -> Iterator[Node]:
        """Itself, so that `[*parts, review]` reads well: how many a map has is known when it runs."""
        yield self

    def __repr__(self) -> str:
        return f"<Node {self.id}>"


@dataclass(frozen=True, slots=True)
class Ref:
    """A field of what a node will write. `GraphError` for one that its schema does not have."""

    node: Node
    path: tuple[str, ...]

    def __getattr__(self, field: str) -> Ref:
        if field.startswith("_"):
            raise AttributeError(field)
        return self[field]

    def __getitem__(self, field: str | int) -> Ref:
        agent = self.node.agent
        if not self.path and agent is not None:
            if agent.output is None:
                raise GraphError(
                    f"{self.node.id} has no field {field!r}: its output is plain text",
                    value=field,
                    hint=f"give {agent.name} a schema",
                )
            known = agent.output.fields
            if known is not None and field not in known:
                raise GraphError(
                    f"{self.node.id} has no field {field!r}", value=field, limit=list(known), hint="see its schema"
                )
        return Ref(self.node, (*self.path, str(field)))

    def __str__(self) -> str:
        return ".".join((self.node.id, *self.path))


@dataclass(frozen=True, slots=True)
class Input:
    """A reference to an input of the graph: `graph.map(reader, over=Input("documents"))`."""

    name: str

    def __str__(self) -> str:
        return self.name


Expansion: TypeAlias = Any
"""A value, a `Node`, a list of nodes, or `NOTHING`."""
NOTHING = object()
"""The expansion of a node that is to be skipped."""
Source: TypeAlias = Ref | Input | Node | Sequence[Any]
"""Where a list or a value comes from."""
NodeLike: TypeAlias = Node | Iterable[Node]


def nodes_of(given: NodeLike) -> list[Node]:
    """The nodes in `given`, each once, in order. GraphError for anything else in it."""
    found: dict[Node, None] = {}
    for node in [given] if isinstance(given, Node) else given:
        if not isinstance(node, Node):
            hint = "give the node that the field belongs to" if isinstance(node, Ref) else "give nodes of this graph"
            raise GraphError(f"after has {str(node)!r}, which is no node", value=str(node), hint=hint)
        found[node] = None
    return list(found)
