"""What of a run is written to its checkpoint, and what a resumed run takes from there.

A run is resumed by running its graph again, with what had ended taken as it was: no agent and no function that gave a
value is called again. Rules add their nodes again (so do functions that had added some), and these are known by who
added them and in which order. Records, after the first one:

{"kind": "added", "id", "by": the rule's node or null, "sum"}             a node that was not in the graph
{"kind": "ended", "id", "state", "text", "cause", "chat", "value" | "typed"}
{"kind": "memo", "key", "result"}                                         a greedy call, for the same ones to come
{"kind": "message", "message"}                                            one that chats refer to, by its number
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.agents.build.policy import Default, Fallback, attempts_of
from shoal.agents.run.events import Outcome, State
from shoal.agents.run.identity import graph_sums, node_sum, sum_of
from shoal.agents.run.journal import Journal, Record
from shoal.errors import CheckpointError
from shoal.types import Result
from shoal.wire import from_json, to_json

if TYPE_CHECKING:
    from shoal.agents.build.agent import Agent
    from shoal.agents.build.graph import Graph
    from shoal.agents.build.node import Node
    from shoal.types import Message

_VERSION = 2
_GIVEN = (State.DONE, State.DEFAULTED)


@dataclass(slots=True)
class Past:
    """What a checkpoint says of a run: ended nodes and calls by id and key, and the ids that each node's rule added."""

    task_id: str
    seed: int
    inputs: dict[str, Any]
    earlier: tuple[Message, ...] = ()
    used_s: float = 0.0
    ended: dict[str, Record] = field(default_factory=dict)
    added: dict[str, Record] = field(default_factory=dict)
    added_by: dict[str | None, list[str]] = field(default_factory=dict)
    memo: dict[str, Result] = field(default_factory=dict)
    chats: dict[str, list[Message]] = field(default_factory=dict)


class Checkpoint:
    """Keeps the record of one run, and knows what a run before it had done.

    Invariant: a node's end is on the disk before anything else of the run knows of it. Without a path nothing is kept.
    """

    def __init__(
        self,
        graph: Graph,
        path: Path | None,
        *,
        resumed: bool,
        inputs: Mapping[str, Any],
        earlier: Sequence[Message] = (),
    ) -> None:
        """With `resumed` the file is read. CheckpointError when it is not of this graph and these inputs."""
        self._graph = graph
        self._path = path
        self._journal: Journal | None = None
        self._messages: dict[str, int] = {}  # each that is on the disk, and its number there
        self._counts: dict[str | None, int] = {}  # how many nodes each rule has added in this run
        self._began = 0.0
        self.past = Past("", 0, dict(inputs), tuple(earlier))
        if resumed and path is not None:
            self._journal, records = Journal.resume(path)
            try:
                self._check(records[0], inputs)
                self.past = self._read(records, inputs)
            except BaseException:
                self._journal.close()
                raise

    # -- the file -----------------------------------------------------------------------------------------------

    def begin(self, task_id: str, seed: int) -> None:
        """Make the file, if there is to be one and it is not there. CheckpointError when it cannot be made."""
        if self._journal is None and self._path is not None:
            inputs = {name: _held(value) for name, value in self.past.inputs.items()}
            first = {"kind": "run", "version": _VERSION, "graph": self._graph.name, "task_id": task_id, "seed": seed}
            given = {"sums": graph_sums(self._graph), "inputs": inputs, "earlier": list(self.past.earlier)}
            self._journal = Journal.begin(self._path, {**first, **given})

    @property
    def error(self) -> CheckpointError | None:
        """Why nothing is written any more."""
        return None if self._journal is None else self._journal.error

    def close(self) -> None:
        """Write nothing any more: what ends from here on does so because the run does. Idempotent."""
        if self._journal is not None:
            self._journal.close()

    def _check(self, first: Record, inputs: Mapping[str, Any]) -> None:
        if first.get("version") != _VERSION:
            message = f"{self._path} has version {first.get('version')!r}, and this release reads version {_VERSION}"
            raise CheckpointError(message, value=first.get("version"), limit=_VERSION, hint="begin the run again")
        now, then = graph_sums(self._graph), first["sums"]
        for name in {**then, **now}:
            if now.get(name) != then.get(name):
                what = "is new" if name not in then else "is gone" if name not in now else "is another"
                message = f"{self._path} is of another graph: {name} {what}"
                raise CheckpointError(message, value=name, hint="resume it with the graph it was made with")
        for name, value in inputs.items():
            if name in first["inputs"] and first["inputs"][name]["sum"] != _held(value)["sum"]:
                message = f"{self._path} is of another input {name}"
                raise CheckpointError(message, value=name, hint=f"leave {name} out: the file has it")

    def _read(self, records: list[Record], inputs: Mapping[str, Any]) -> Past:
        first = records[0]
        messages: list[Message] = []
        kept = {name: value["value"] for name, value in first["inputs"].items() if "value" in value}
        past = Past(first["task_id"], first["seed"], {**kept, **inputs}, tuple(first["earlier"]))
        for record in records[1:]:
            past.used_s = max(past.used_s, record.get("at_s", 0.0))
            if record["kind"] == "message":
                self._messages[sum_of(record["message"])] = len(messages)
                messages.append(record["message"])
            elif record["kind"] == "memo":
                past.memo[record["key"]] = from_json(record["result"], Result)
            elif record["kind"] == "added":
                past.added[record["id"]] = record
                past.added_by.setdefault(record["by"], []).append(record["id"])
            elif record["kind"] == "ended":
                past.ended[record["id"]] = record
                if record["chat"] is not None:
                    past.chats[record["id"]] = [messages[number] for number in record["chat"]]
        return past

    # -- names of added nodes -----------------------------------------------------------------------------------

    def named(self, by: Node | None, wanted: str) -> str | None:
        """The id that a node had when `by` added it before; None for one that is new.

        CheckpointError when another one was added there.
        """
        name = None if by is None else by.id
        known, at = self.past.added_by.get(name, []), self._counts.get(name, 0)
        if at >= len(known):
            return None
        if known[at] != wanted and not known[at].startswith(f"{wanted}-"):
            raise self._changed(name, known[at], wanted)
        return known[at]

    def entered(self, node: Node, needs: list[Node], adder: Node | None) -> None:
        """A node was added by a rule's node, or by the caller (None), while the run goes on."""
        if self._path is None:
            return
        by = None if adder is None else adder.id
        self._counts[by] = self._counts.get(by, 0) + 1
        now, before = node_sum(node, needs), self.past.added.get(node.id)
        if before is None:
            self._write("added", id=node.id, by=by, sum=now)
        elif before["sum"] != now:
            raise self._changed(by, node.id, f"another {node.id}")

    def _changed(self, by: str | None, before: str, now: str) -> CheckpointError:
        message = f"{by or 'the caller'} added {before} before, and {now} this time"
        return CheckpointError(message, value=now, limit=before, hint="it must add the same nodes in the same order")

    def check_claimed(self, nodes: Mapping[str, Node]) -> None:
        """CheckpointError when nodes had been added that nobody has added again."""
        missing = [name for name in self.past.added if name not in nodes]
        if missing:
            by = self.past.added[missing[0]]["by"] or "the caller"
            message = f"{by} had added {missing[0]}, and has not added it again"
            raise CheckpointError(message, value=missing, hint="it must add the same nodes in the same order")

    # -- ends ---------------------------------------------------------------------------------------------------

    def ended(self, node: Node, outcome: Outcome, chat: list[Message] | None, *, joined: bool) -> None:
        """A node ends so; `joined`: its value is that of nodes it added.

        CheckpointError when its value is of a kind that cannot be kept.
        """
        if self._journal is None or node.id in self.past.ended:
            return
        facts: dict[str, Any] = {"text": outcome.text, "cause": outcome.cause, "chat": None}
        if outcome.state in _GIVEN and not joined:
            facts |= _value_facts(node, outcome)
        if outcome.state in _GIVEN and chat is not None:
            facts["chat"] = [self._number(message) for message in chat]
        self._write("ended", id=node.id, state=outcome.state, **facts)

    def keep_call(self, key: str, result: Result) -> None:
        """A greedy call has this result."""
        self._write("memo", key=key, result=to_json(result))

    def _number(self, message: Message) -> int:
        """Where a message stands in the file; it is written when it is new there."""
        key = sum_of(message)
        if key not in self._messages:
            self._messages[key] = len(self._messages)
            self._write("message", message=message)
        return self._messages[key]

    def _write(self, kind: str, **facts: Any) -> None:
        if self._journal is not None:
            self._journal.write({"kind": kind, **facts, "at_s": round(self.elapsed(), 3)})

    def start_clock(self) -> float:
        """When the run began, on the clock of `time.perf_counter`, had it never stopped."""
        self._began = time.perf_counter() - self.past.used_s
        return self._began

    def elapsed(self) -> float:
        """Seconds in which the run ran, in all processes together."""
        return time.perf_counter() - self._began

    # -- taking up ----------------------------------------------------------------------------------------------

    def outcome(self, node: Node) -> Outcome | None:
        """How a node had ended, where that needs nothing but the file; None when it has to find out again.

        A rule adds its nodes again.
        """
        record = self.past.ended.get(node.id)
        return None if record is None or node.id in self.past.added_by else _restored(node, record)

    def settled(self, node: Node, outcome: Outcome) -> Outcome:
        """The outcome of a rule that ran again: what had been cancelled, skipped or failed stays so."""
        record = self.past.ended.get(node.id)
        if record is None or State(record["state"]) in _GIVEN:
            return outcome
        return _restored(node, record)


def _held(value: Any) -> dict[str, Any]:
    """An input as the file has it: its sum, and its value where JSON holds that exactly."""
    return {"sum": sum_of(value), **({"value": value} if is_json(value) else {})}


def _value_facts(node: Node, outcome: Outcome) -> dict[str, Any]:
    """How to come by the value again: it is the text, it is JSON, or which agent's schema makes it of the text."""
    if outcome.text is not None and outcome.value == outcome.text:
        return {}
    if is_json(outcome.value):
        return {"value": outcome.value}
    for depth, agent in enumerate(_writers(node)):
        if agent.output is not None and outcome.text is not None and _parsed(agent, outcome.text) == outcome.value:
            return {"typed": depth}
        last = attempts_of(agent.on_failure)[1]
        if outcome.text is None and isinstance(last, Default) and last.value is outcome.value:
            return {"typed": depth}
    raise CheckpointError(
        f"{node.id} gave a {type(outcome.value).__name__}, which a checkpoint cannot hold",
        value=node.id,
        hint="give text, numbers, booleans, lists and mappings of these, or run without a checkpoint",
    )


def _restored(node: Node, record: Record) -> Outcome:
    text, value = record["text"], record.get("value", record["text"])
    if "typed" in record:
        agent = list(_writers(node))[record["typed"]]
        last = attempts_of(agent.on_failure)[1]
        value = _parsed(agent, text) if text is not None else last.value if isinstance(last, Default) else None
    return Outcome(State(record["state"]), value, text, record["cause"])


def _writers(node: Node) -> Iterator[Agent]:
    """The agent of a node, and those that stand in for it."""
    agent = node.agent
    while agent is not None:
        yield agent
        last = attempts_of(agent.on_failure)[1]
        agent = last.agent if isinstance(last, Fallback) else None


def _parsed(agent: Agent, text: str) -> Any:
    """The text as that agent's schema has it; None when it does not fit."""
    try:
        return None if agent.output is None else agent.output.parse(text)
    except ValueError:
        return None


def is_json(value: Any) -> bool:
    """True when JSON gives the very same value back: no tuples, no keys but strings, no classes."""
    stack = [value]
    while stack:
        part = stack.pop()
        if type(part) is list:
            stack += part
        elif type(part) is dict:
            if not all(type(key) is str for key in part):
                return False
            stack += part.values()
        elif part is not None and type(part) not in (str, int, float, bool):
            return False
    return True
