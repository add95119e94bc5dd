"""What makes a graph the same graph: the facts of agents and rules that decide what is written, in short sums."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shoal.agents.build.node import Input, Node, Ref, Source
from shoal.agents.build.policy import Default, Fallback, Policy, Retry
from shoal.agents.build.rules import Branch, FunctionRule, Loop, Map, Reduce
from shoal.agents.build.schema import plain
from shoal.wire import to_json

if TYPE_CHECKING:
    from shoal.agents.build.agent import Agent
    from shoal.agents.build.graph import Graph


def sum_of(facts: object) -> str:
    """A short sum of plain data."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def graph_sums(graph: Graph) -> dict[str, str]:
    """A sum for each part of a graph: its nodes, and what their prompts begin with."""
    sums = {node.id: node_sum(node, graph.needs(node)) for node in graph.nodes.values()}
    return {**sums, "the shared part": sum_of(graph.shared)}


def node_sum(node: Node, needs: Iterable[Node]) -> str:
    """What a node does, and what it waits for. Time limits and priorities are not in it: they may change."""
    before = [need.id for need in needs]
    continues = None if node.continues is None else node.continues.id
    agent = None if node.agent is None else _agent(node.agent)
    return sum_of([agent, None if node.rule is None else _rule(node.rule), before, continues])


def _agent(agent: Agent) -> list[Any]:
    schema = None if agent.output is None else plain(agent.output.json_schema)
    return [agent.name, agent.role, agent.task, schema, to_json(agent.sampling), _policy(agent.on_failure)]


def _policy(policy: Policy) -> list[Any]:
    kind = type(policy).__name__
    if isinstance(policy, Retry):
        return [kind, policy.times, _policy(policy.then)]
    if isinstance(policy, Fallback):
        return [kind, _agent(policy.agent)]
    return [kind, plain(policy.value)] if isinstance(policy, Default) else [kind]


def _rule(rule: object) -> list[Any]:
    kind, facts = type(rule).__name__, [_agent(agent) for agent in getattr(rule, "agents", ())]
    if isinstance(rule, Map):
        return [kind, facts, _source(rule.over)]
    if isinstance(rule, Reduce):
        return [kind, facts, rule.over.id, rule.width]
    if isinstance(rule, Loop):
        return [kind, facts, rule.at_most, _function(rule.until)]
    if isinstance(rule, Branch):
        return [kind, facts, _source(rule.on), [repr(case) for case in rule.cases], rule.otherwise is None]
    return [kind, facts, _function(rule.function) if isinstance(rule, FunctionRule) else ""]


def _source(source: Source) -> Any:
    if isinstance(source, Node):
        return ["node", source.id]
    return [type(source).__name__, str(source)] if isinstance(source, Ref | Input) else plain(source)


def _function(function: Callable[..., Any]) -> str:
    """A function is known by its name, a callable dataclass by its fields."""
    if dataclasses.is_dataclass(function):
        return repr(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
