"""The prompt of a node: its agent's templates filled in, the outputs it depends on put in their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.agents.build.agent import Agent, placeholders, render
from shoal.agents.build.node import Node
from shoal.agents.build.schema import as_text, pick
from shoal.agents.run.events import State
from shoal.agents.run.layout import Layout, Section
from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.agents.run.state import RunState
    from shoal.types import Message


class MissingInputError(GraphError):
    """A prompt names an output that was skipped or failed."""


class PendingInputError(GraphError):
    """A prompt names an output that is not written yet."""


def shared_text(books: RunState) -> str:
    """The part that all prompts begin with."""
    return render(books.graph.shared, lambda path: _of_inputs(books, path, "the shared part"))


def layout_of(
    books: RunState,
    node: Node,
    agent: Agent,
    history: tuple[Message, ...] = (),
    *,
    ahead: bool = False,
) -> Layout:
    """The prompt of `node` when `agent` writes (its own agent, or a fallback). Outputs not written yet have no text.

    `history` is the conversation it goes on with; `ahead` leaves the task out, which comes last and may not be certain.
    For a rule's node it is how the prompts of its nodes will begin.
    Raises `MissingInputError`, `PendingInputError` for a template that names such an output, `GraphError` for one
    that names what does not exist.
    """
    named = {path[0] for path in (*placeholders(agent.role), *placeholders(agent.task))}
    given = books.needs(node) if node.rule is None else node.rule.after
    needs = [need for need in given if need.id not in named and need is not node.continues]
    common = {need for need in needs if not history and _read_elsewhere(books, need, node, agent)}
    order = {name: place for place, name in enumerate(books.nodes)} if common else {}

    def lookup(path: tuple[str, ...]) -> str:
        return _value(books, node, path)

    return Layout(
        shared="" if history else shared_text(books),
        common=tuple(s for need in sorted(common, key=lambda n: order[n.id]) for s in _sections(books, need)),
        role=render(agent.role, lookup),
        own=tuple(s for need in needs if need not in common for s in _sections(books, need)),
        task="" if ahead else render(agent.task, lookup),
        history=history,
        earlier=books.earlier,
    )


def _read_elsewhere(books: RunState, need: Node, node: Node, agent: Agent) -> bool:
    """True when an agent with another role reads this output too."""
    for other in books.dependants(need):
        if other is node or other.agent is agent:
            continue
        if any(reader.role != agent.role for reader in other.agents):
            return True
    return False


def _sections(books: RunState, need: Node) -> Iterator[Section]:
    """The output of a node, or of each node it stands for, under its own name."""
    for member in books.members(need):
        outcome = books.outcome(member)
        if outcome is None:
            yield Section(member.id, None)
        elif outcome.state in (State.DONE, State.DEFAULTED):
            yield Section(member.id, outcome.shown)


def _value(books: RunState, node: Node, path: tuple[str, ...]) -> str:
    name, *fields = path
    if name in node.values:
        return _pick(node.values[name], path, node.id)
    need = next((need for need in books.needs(node) if need.id == name), None)
    if need is None:
        return _of_inputs(books, path, node.id)
    outcome = books.outcome(need)
    if outcome is None:
        raise PendingInputError(f"{node.id} names {name}, which is not written yet", value=name)
    if outcome.state not in (State.DONE, State.DEFAULTED):
        raise MissingInputError(f"{node.id} names {name}, which was {outcome.state}", value=name)
    return _pick(outcome.value, path, node.id) if fields else outcome.shown


def _of_inputs(books: RunState, path: tuple[str, ...], where: str) -> str:
    if path[0] not in books.inputs:
        raise GraphError(f"{where} names {{{'.'.join(path)}}}, which is no input", value=path[0], hint="check the name")
    return _pick(books.inputs[path[0]], path, where)


def _pick(value: object, path: tuple[str, ...], where: str) -> str:
    try:
        return as_text(pick(value, path[1:]))
    except (LookupError, TypeError) as error:
        raise GraphError(f"{where} names {{{'.'.join(path)}}}, which is not there: {error}", value=path[-1]) from error
