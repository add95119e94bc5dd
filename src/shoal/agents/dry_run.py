"""A graph gone through without a model: what each prompt will look like, with stand-ins for outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.agents.build.agent import Agent
from shoal.agents.build.graph import Graph
from shoal.agents.build.node import Node, Rule
from shoal.agents.build.rules import Loop, Map, Reduce
from shoal.agents.run.events import Outcome, State
from shoal.agents.run.layout import Layout
from shoal.agents.run.prompts import layout_of
from shoal.agents.run.state import RunState


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One prompt to be: of which node and agent, on which level (from 1), and how it is laid out."""

    node: Node
    agent: Agent
    level: int
    layout: Layout


class StandIn(str):
    """Text in place of an output; any field of it is another."""

    def __getitem__(self, field: Any) -> StandIn:
        return StandIn(f"({self.strip('()')}.{field})")


Mapping.register(StandIn)


class _Stage(RunState):
    """The books of a rehearsal: every node succeeds with a stand-in, rules add one node per agent, maps two."""

    def dry_run(self) -> list[Rehearsed]:
        """All prompts, level by level."""
        levels: dict[Node, int] = {}
        scenes: list[Rehearsed] = []
        ready = [node for node, count in self.open.items() if not count]
        while ready:
            node = ready.pop(0)
            level = levels[node] = 1 + max((levels[need] for need in self._needs[node]), default=0)
            if node.agent is not None:
                scenes.append(Rehearsed(node, node.agent, level, layout_of(self, node, node.agent)))
            elif node.rule is not None:
                scenes += self._play(node, node.rule, level)
            ready += self._book(node, _well(node))
        return scenes

    def _play(self, node: Node, rule: Rule, level: int) -> list[Rehearsed]:
        """What a rule would add: one node for each of its agents, two for a map."""
        values = [{name: StandIn(f"({name})") for name in rule.provides}]
        if isinstance(rule, Map):
            values = [{"item": StandIn(f"(item {i})"), "index": StandIn(str(i))} for i in range(2)]
        scenes = []
        made: list[Node] = []
        read = [need for need in rule.sources if isinstance(need, Node)] if isinstance(rule, Reduce) else []
        for agent in rule.agents:
            for i, given in enumerate(values):
                name = f"{node.id}[{i}]" if isinstance(rule, Map) else f"{node.id}.{agent.name}"
                chained = made[-1:] if isinstance(rule, Loop) else []
                part = Node(self._name(name), agent=agent, values=given, parent=node)
                self._enter(part, [*rule.after, *read, *chained])
                scenes.append(Rehearsed(part, agent, level, layout_of(self, part, agent)))
                self._book(part, _well(part))
                made.append(part)
        self._members[node] = made
        return scenes


def _well(node: Node) -> Outcome:
    return Outcome(State.DONE, StandIn(f"({node.id})"))


def dry_run(graph: Graph, inputs: Mapping[str, Any] | None = None) -> list[Rehearsed]:
    """The prompts of a graph, level by level. Inputs that are not given have stand-ins. Raises as `Graph.check`."""
    graph.check()
    given = {name: StandIn(f"({name})") for name in graph.inputs} | dict(inputs or {})
    return _Stage(graph, given).dry_run()
