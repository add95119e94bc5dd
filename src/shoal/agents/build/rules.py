"""Rules: what nodes do that add more nodes while a graph runs: map, reduce, loop, branch, and any function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.agents.build.agent import Agent
from shoal.agents.build.node import NOTHING, Expansion, Input, Node, Ref, Rule, Source
from shoal.checks import is_whole
from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.agents.run.run import Run

MOST = 10_000  # nodes of one map: more is taken for a mistake


@dataclass(frozen=True, eq=False)
class Map(Rule):
    """One agent for each item of a list."""

    agent: Agent
    over: Source
    after: tuple[Node, ...]
    provides = ("item", "index")

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", (self.agent,))

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it cannot do without."""
        return (self.over,)

    @property
    def label(self) -> str:
        """For drawings."""
        what = f"{len(self.over)} items" if isinstance(self.over, list | tuple) else str(self.over)
        return f"{self.agent.name} for each of {what}"

    @property
    def cost(self) -> int:
        """Its agents write side by side."""
        return self.agent.cost

    async def expand(self, run: Run, node: Node) -> Expansion:
        """The nodes, one per item. GraphError when there is no list."""
        items = run.resolve(self.over)
        if isinstance(items, str) or not isinstance(items, Sequence):
            raise GraphError(f"{node.id} maps over {items!r:.60}", value=str(self.over), hint="it must be a list")
        if len(items) > MOST:
            raise GraphError(f"{node.id} maps over {len(items)} items", value=len(items), limit=MOST)
        return [
            run.spawn(node, self.agent, f"{node.id}[{i}]", self.after, {"item": item, "index": i})
            for i, item in enumerate(items)
        ]


@dataclass(frozen=True, eq=False)
class Reduce(Rule):
    """One agent over groups of outputs, until one is left."""

    agent: Agent
    over: Node
    width: int
    after: tuple[Node, ...]
    provides = ("index", "round")

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", (self.agent,))
        if not is_whole(self.width, 2):
            raise GraphError(f"width is {self.width!r}", value=self.width, hint="it must be 2 or more")

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it cannot do without."""
        return (self.over,)

    @property
    def label(self) -> str:
        """For drawings."""
        return f"{self.agent.name} over each {self.width} of {self.over.id}"

    @property
    def cost(self) -> int:
        """One level; how many there will be is not known yet."""
        return self.agent.cost

    async def expand(self, run: Run, node: Node) -> Expansion:
        """The one node that is left in the end."""
        level: Sequence[Node] = run.members(self.over)
        if not level:
            raise GraphError(f"{node.id} has nothing to reduce", value=self.over.id, hint="give it a map with items")
        number = 0
        while len(level) > 1 or not number:
            number += 1
            groups = [level[at : at + self.width] for at in range(0, len(level), self.width)]
            level = [
                run.spawn(
                    node, self.agent, f"{node.id}[{number}.{i}]", (*self.after, *group), {"index": i, "round": number}
                )
                for i, group in enumerate(groups)
            ]
        return level[0]


@dataclass(frozen=True, eq=False)
class Loop(Rule):
    """Agents one after another, round after round."""

    agents: tuple[Agent, ...]
    until: Callable[[Any], bool]
    at_most: int
    after: tuple[Node, ...]
    provides = ("round",)

    def __post_init__(self) -> None:
        if not self.agents:
            raise GraphError("the loop has no agents", hint="give at least one")
        if not is_whole(self.at_most, 1, 1000):
            raise GraphError(f"at_most is {self.at_most!r}", value=self.at_most, hint="it must be from 1 to 1000")

    @property
    def label(self) -> str:
        """For drawings."""
        return f"{' -> '.join(agent.name for agent in self.agents)}, at most {self.at_most} rounds"

    @property
    def cost(self) -> int:
        """All rounds that there may be."""
        return sum(agent.cost for agent in self.agents) * self.at_most

    async def expand(self, run: Run, node: Node) -> Expansion:
        """The last node of the first round."""
        return self._round(run, node, 1, [])

    def proceed(self, run: Run, node: Node, value: Any) -> Node | None:
        """The last node of one more round, unless that was the last."""
        number = len(run.offspring(node)[1:]) // len(self.agents)
        over = number >= self.at_most or bool(self.until(value))
        run.decide("loop", node, {"round": number, "output": value, "over": over})
        return None if over else self._round(run, node, number + 1, run.members(node))

    def _round(self, run: Run, node: Node, number: int, before: Sequence[Node]) -> Node:
        for agent in self.agents:
            name = f"{node.id}[{number}].{agent.name}"
            before = [run.spawn(node, agent, name, (*self.after, *before), {"round": number})]
        return before[0]


@dataclass(frozen=True, eq=False)
class Branch(Rule):
    """One of several agents, by a value."""

    on: Ref | Input | Node
    cases: dict[Any, Agent]
    otherwise: Agent | None
    after: tuple[Node, ...]
    provides = ("case",)

    def __post_init__(self) -> None:
        if not self.cases:
            raise GraphError("the branch has no cases", hint="give a mapping of values to agents")
        rest = () if self.otherwise is None else (self.otherwise,)
        object.__setattr__(self, "agents", (*self.cases.values(), *rest))

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it cannot do without."""
        return (self.on,)

    @property
    def label(self) -> str:
        """For drawings."""
        cases = [f"{value}: {agent.name}" for value, agent in self.cases.items()]
        rest = [] if self.otherwise is None else [f"otherwise: {self.otherwise.name}"]
        name = self.on.id if isinstance(self.on, Node) else str(self.on)
        return f"by {name} ({', '.join([*cases, *rest])})"

    @property
    def cost(self) -> int:
        """The dearest case."""
        return max(agent.cost for agent in self.agents)

    async def expand(self, run: Run, node: Node) -> Expansion:
        """The chosen agent's node; nothing (the node is skipped) when no case fits."""
        value = run.resolve(self.on)
        agent = self.cases.get(value, self.otherwise) if _hashable(value) else self.otherwise
        run.decide("branch", node, {"on": value, "chosen": None if agent is None else agent.name})
        if agent is None:
            return NOTHING
        return run.spawn(node, agent, f"{node.id}.{agent.name}", self.after, {"case": value})


def _hashable(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)


@dataclass(frozen=True, eq=False)
class FunctionRule(Rule):
    """Any function."""

    function: Callable[..., Any]
    after: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", ())

    @property
    def label(self) -> str:
        """For drawings."""
        return f"{getattr(self.function, '__name__', 'function')}()"

    async def expand(self, run: Run, node: Node) -> Expansion:  # noqa: ARG002 - the face of a rule
        """What the function returns."""
        given = self.function(run, *(run.outputs.get(other.id) for other in self.after))
        return await given if inspect.isawaitable(given) else given
