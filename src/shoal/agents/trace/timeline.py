"""What a trace tells of time: who ran when, who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.checks import is_number

_MOST = 1e15  # milliseconds, or any other number that a record tells

Record = Mapping[str, Any]


@dataclass(slots=True)
class Bar:
    """One attempt on the time axis, in milliseconds since its run began. None where it is not known."""

    attempt: int
    submitted: float
    joined: float | None
    first: float | None
    left: float
    outcome: str
    cause: str | None
    facts: Record


@dataclass(slots=True)
class Row:
    """One node: its state, what it waited for, its attempts."""

    node: str
    state: str = "?"
    cause: str | None = None
    started: float | None = None
    ended: float | None = None
    waited_for: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """One run: its nodes in the order in which they started, and what was decided meanwhile."""

    task_id: str
    graph: str = ""
    state: str = "?"
    wall_ms: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)

    @property
    def critical(self) -> list[str]:
        """The chain of nodes that the end waited for: from the last to end, each time the input that came last."""
        ended = {row.node: row.ended for row in self.rows if row.ended is not None}
        waits = {row.node: row.waited_for for row in self.rows}
        chain: list[str] = []
        at = max(ended, key=lambda name: ended[name] or 0.0, default=None)
        while at is not None and at not in chain:
            chain.append(at)
            at = max((n for n in waits.get(at, ()) if n in ended), key=lambda name: ended[name] or 0.0, default=None)
        return chain[::-1]


def timelines(records: Sequence[Record]) -> list[Timeline]:
    """The runs in a trace, in order of appearance. Records without a task belong to none, and are left out."""
    found: dict[str, Timeline] = {}
    rows: dict[tuple[str, str], Row] = {}
    for record in records:
        task = record.get("task_id")
        if not isinstance(task, str):
            continue
        line = found.setdefault(task, Timeline(task))
        line.wall_ms = max(line.wall_ms, at_ms(record), _number(record.get("left_at_ms")) or 0.0)
        kind, agent = record["kind"], record.get("agent_id")
        if kind == "graph":
            line.graph, line.state = str(record.get("graph", "")), str(record.get("state", "?"))
        elif kind in ("attempt", "node") and isinstance(agent, str):
            row = rows.get((task, agent))
            if row is None:
                row = rows[task, agent] = Row(agent)
                line.rows.append(row)
            _fill(row, record)
        else:
            line.notes.append(record)
    for line in found.values():
        line.rows.sort(key=_beginning)
    return list(found.values())


def loose(records: Sequence[Record]) -> list[Record]:
    """The records that belong to no run: decisions of a governor, say."""
    return [record for record in records if not isinstance(record.get("task_id"), str)]


def _fill(row: Row, record: Record) -> None:
    if record["kind"] == "node":
        row.state, row.cause = str(record.get("state", "?")), _words(record.get("cause"))
        row.started, row.ended = _number(record.get("started_at_ms")), _number(record.get("at_ms"))
        waited = record.get("waited_for")
        row.waited_for = [str(name) for name in waited] if isinstance(waited, list) else []
        return
    submitted, ttft = _number(record.get("submitted_at_ms")) or 0.0, _number(record.get("ttft_ms"))
    row.bars.append(
        Bar(
            attempt=int(_number(record.get("attempt")) or 1),
            submitted=submitted,
            joined=_number(record.get("joined_at_ms")),
            first=None if ttft is None else submitted + ttft,
            left=_number(record.get("left_at_ms")) or submitted,
            outcome=str(record.get("outcome", "?")),
            cause=_words(record.get("cause")),
            facts=record,
        )
    )


def _words(value: object) -> str | None:
    return None if value is None else str(value)


def _beginning(row: Row) -> float:
    if row.started is not None:
        return row.started
    return row.bars[0].submitted if row.bars else row.ended or 0.0


def _number(value: object) -> float | None:
    """A finite number, or None: what stands in a file may be anything."""
    return float(value) if is_number(value, -_MOST, _MOST) else None


def at_ms(record: Record) -> float:
    """When something was noted, in milliseconds since its run began; 0 where the record does not say."""
    return _number(record.get("at_ms")) or 0.0


def note_text(record: Record) -> str:
    """A decision or any other record in one line."""
    hidden = ("kind", "time", "task_id", "at_ms", "decision", "agent_id")
    facts = ", ".join(f"{name} {value}" for name, value in record.items() if name not in hidden)
    who = f" {record['agent_id']}" if record.get("agent_id") else ""
    return f"{record.get('decision', record['kind'])}{who}: {facts}"
