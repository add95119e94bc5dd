"""A graph in the terminal: nodes by level, and the tree of what their prompts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from shoal.agents.build.policy import Default, FailRun, Fallback, Policy, Retry, Skip
from shoal.agents.dry_run import Rehearsed, dry_run
from shoal.cli.console import printable

if TYPE_CHECKING:
    from shoal.agents import Agent, Graph, Node


def draw(graph: Graph, count: Callable[[str], int], unit: str, console: Console | None = None) -> None:
    """Print both drawings; `count` measures a text in `unit`."""
    console = console or Console(highlight=False)
    scenes = dry_run(graph)
    inputs = ", ".join(sorted(graph.inputs)) or "none"
    console.print(Text(f"{graph.name}: {len(graph.nodes)} nodes; inputs: {inputs}"))
    if graph.deadline_s is not None:
        console.print(Text(f"deadline: {graph.deadline_s:g} s"))
    console.print(_table(graph, scenes))
    console.print()
    console.print(_prefixes(scenes, count, unit))


def _table(graph: Graph, scenes: Sequence[Rehearsed]) -> Table:
    levels = {scene.node: scene.level for scene in scenes}
    levels |= {scene.node.parent: scene.level for scene in scenes if scene.node.parent is not None}
    table = Table("level", "node", "after", "limits", "on failure", box=None, pad_edge=False)
    finals = set(graph.nodes.values()) - {need for node in graph.nodes.values() for need in graph.needs(node)}
    for node in sorted(graph.nodes.values(), key=lambda node: levels.get(node, 0)):
        after = ", ".join(need.id for need in graph.needs(node)) or "-"
        mark = " (final)" if node in finals else ""
        agents = list(node.agents)
        limits = ", ".join(dict.fromkeys(filter(None, map(_limits, agents)))) or "-"
        policy = ", ".join(dict.fromkeys(_policy(agent.on_failure) for agent in agents)) or "-"
        row = (str(levels.get(node, "")), f"{_name(node)}{mark}", after, limits, policy)
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _name(node: Node) -> str:
    return node.id if node.rule is None else f"{node.id}: {node.rule.label}"


def _limits(agent: Agent) -> str:
    parts = [] if agent.priority == "normal" else [str(agent.priority)]
    parts += [f"{agent.timeout_s:g} s an attempt"] if agent.timeout_s is not None else []
    parts += [f"{agent.deadline_s:g} s in all"] if agent.deadline_s is not None else []
    return ", ".join(parts)


def _policy(policy: Policy) -> str:
    match policy:
        case FailRun():
            return "fail"
        case Skip():
            return "skip"
        case Default(value):
            return f"default {value!r:.30}"
        case Fallback(agent):
            return f"fallback {agent.name}"
        case Retry(times, _, _, then):
            return f"retry {times}, then {_policy(then)}"


def _prefixes(scenes: Sequence[Rehearsed], count: Callable[[str], int], unit: str) -> Tree:
    """The parts of all prompts as a tree: what stands on one branch is computed once."""
    root = Tree(Text(f"prompts, in {unit}; each branch is computed once"))
    _grow(root, [(scene.node.id, scene.layout.parts(scene.agent.name)) for scene in scenes], count)
    return root


def _grow(tree: Tree, prompts: Sequence[tuple[str, list[tuple[str, str]]]], count: Callable[[str], int]) -> None:
    branches: dict[tuple[str, str], list[tuple[str, list[tuple[str, str]]]]] = {}
    for name, parts in prompts:
        if parts:
            branches.setdefault(parts[0], []).append((name, parts[1:]))
    for (label, text), below in branches.items():
        size = "written by the model" if label.startswith("output of") else str(count(text))
        line, rest = f"{label} ({size})", below
        while len(rest) == 1 and rest[0][1]:  # what only one prompt has goes on one line
            name, parts = rest[0]
            size = "written by the model" if parts[0][0].startswith("output of") else str(count(parts[0][1]))
            line, rest = f"{line} + {parts[0][0]} ({size})", [(name, parts[1:])]
        ends = [name for name, parts in rest if not parts]
        branch = tree.add(Text(printable(line + (f"  = {', '.join(ends)}" if ends else ""))))
        _grow(branch, [one for one in rest if one[1]], count)
