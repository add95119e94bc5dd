"""What a run tells: where its nodes stand, what happens, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shoal.agents.build.node import Node
from shoal.agents.build.schema import as_text
from shoal.errors import GraphFailedError


class State(StrEnum):
    """Where a node stands. It enters exactly one of the last five, and stays there."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"  # its own output
    DEFAULTED = "defaulted"  # it failed; its default, or its fallback's output, stands in
    SKIPPED = "skipped"  # its dependants go on without it
    FAILED = "failed"  # so do its dependants, unless their policies say otherwise
    CANCELLED = "cancelled"  # by the caller, with all that depends on it

    @property
    def final(self) -> bool:
        """True for a state that is not left any more."""
        return self not in (State.WAITING, State.RUNNING)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a node ended: its state, its value if it has one, the text a model wrote, and why it is no better."""

    state: State
    value: Any = None
    text: str | None = None
    cause: str | None = None

    @property
    def shown(self) -> str:
        """The output as prompts show it."""
        return as_text(self.value) if self.text is None else self.text


class EventKind(StrEnum):
    """What an event tells."""

    ADDED = "added"  # a node that was not in the graph when the run began
    STARTED = "started"  # its inputs are there
    TEXT = "text"  # more output of an attempt
    ATTEMPT = "attempt"  # an attempt ended: `record`
    ENDED = "ended"  # the node's final state: `outcome`
    FINISHED = "finished"  # the last event: `result`


@dataclass(frozen=True, slots=True)
class GraphEvent:
    """News of a run. `node` is None only in the last event, which has the `result`."""

    kind: EventKind
    node: Node | None = None
    text: str = ""
    attempt: int = 0
    outcome: Outcome | None = None
    record: Mapping[str, Any] | None = None
    result: GraphResult | None = None


@dataclass(frozen=True, slots=True)
class GraphResult:
    """How a run ended. `finals` are the ids of the nodes that nothing depended on, `records` those of the trace."""

    task_id: str
    outcomes: Mapping[str, Outcome]
    finals: tuple[str, ...]
    records: tuple[Mapping[str, Any], ...]
    wall_s: float

    @property
    def outputs(self) -> dict[str, Any]:
        """What each node gave its dependants, by id; skipped, failed and cancelled ones are not in it."""
        given = (State.DONE, State.DEFAULTED)
        return {name: outcome.value for name, outcome in self.outcomes.items() if outcome.state in given}

    @property
    def output(self) -> Any:
        """The output of the final node; of several, a mapping by id. None where there is none."""
        outputs = self.outputs
        if len(self.finals) == 1:
            return outputs.get(self.finals[0])
        return {name: outputs[name] for name in self.finals if name in outputs}

    @property
    def text(self) -> str:
        """The output as text."""
        return as_text(self.output) if self.output is not None else ""

    @property
    def states(self) -> dict[str, State]:
        """The final state of each node, by id."""
        return {name: outcome.state for name, outcome in self.outcomes.items()}

    @property
    def ok(self) -> bool:
        """True when no final node failed or was cancelled."""
        return not any(self.states[name] in (State.FAILED, State.CANCELLED) for name in self.finals)

    def raise_for_failure(self) -> None:
        """`GraphFailedError` when a final node failed; nothing otherwise."""
        for name in self.finals:
            outcome = self.outcomes[name]
            if outcome.state is State.FAILED:
                raise GraphFailedError(
                    f"{name} failed: {outcome.cause}", result=self, value=name, hint="see error.result and its trace"
                )
