"""Graphs as YAML files: read, checked key by key, built; what is wrong is said with file and line.

shared: |
  Rules for an answer to {question}.
nodes:
  planner:  {task: "Outline it.", schema: {...}}
  writer:   {map: planner.sections, task: "Write section {item}.", timeout_s: 20}
  reviewer: {task: "Check.", after: writer, on_failure: {default: no remarks}}
  editor:   {task: "Merge.", after: [writer, reviewer], priority: high}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.agents.build.agent import Agent
from shoal.agents.build.graph import Graph
from shoal.agents.build.node import Input, Node, Ref, Source
from shoal.agents.build.policy import Last, Policy, Retry, default, fail, fallback, retry, skip
from shoal.agents.build.schema import pick
from shoal.errors import CycleError, GraphError, GraphFileError, InvalidRequestError
from shoal.names import did_you_mean
from shoal.types import Namespace, SamplingParams

_GRAPH = ("name", "shared", "deadline_s", "reserve_s", "namespace", "nodes")
_PLAIN = ("task", "role", "schema", "sampling", "priority", "timeout_s", "deadline_s", "private", "version")
_AGENT = (*_PLAIN, "on_failure")
_KINDS = ("map", "reduce", "loop", "branch")
_NODE = ("after", "continues", *_KINDS)
_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")
}
_MAX_DEPTH, _MAX_VALUES = 100, 100_000  # aliases counted as often as they are used


@dataclass(frozen=True, slots=True)
class _Entry:
    """One key of a mapping: where it stands, and the node of its value."""

    key: str
    line: int
    value: yaml.Node


class _File:
    """One file being read: knows lines, refuses by line."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        try:
            self.root = yaml.compose(text, yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
            raise GraphFileError(f"no YAML: {error.problem}", file=name, line=line) from error
        except yaml.YAMLError as error:
            raise GraphFileError(f"no YAML: {' '.join(str(error).split())}", file=name, line=1) from error
        except RecursionError:
            raise self.wrong(f"it nests deeper than {_MAX_DEPTH} levels", 1) from None
        if self.root is None:
            raise GraphFileError("the file is empty", file=name, line=1, hint="give it nodes")
        self._check(self.root)

    def _check(self, root: yaml.Node) -> None:
        """Refuse what is no JSON (a date), and what is too deep or too much; a value that holds itself is too deep."""
        waiting, count = [(root, 1)], 0
        while waiting:
            node, depth = waiting.pop()
            count += 1
            if depth > _MAX_DEPTH:
                raise self.wrong(f"it nests deeper than {_MAX_DEPTH} levels", line_of(node))
            if count > _MAX_VALUES:
                raise self.wrong(f"it has more than {_MAX_VALUES} values, with aliases", line_of(node))
            if node.tag not in _TAGS:
                kind = node.tag.removeprefix("tag:yaml.org,2002:")
                hint = (
                    "put it in quotes" if isinstance(node, yaml.ScalarNode) else "give text, numbers, lists, mappings"
                )
                raise self.wrong(f"a value of the kind {kind!r} is no plain data", line_of(node), hint=hint)
            if isinstance(node, yaml.MappingNode):
                waiting += [(inner, depth + 1) for pair in node.value for inner in pair]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(inner, depth + 1) for inner in node.value]

    def wrong(self, message: str, line: int, value: object = None, hint: str | None = None) -> GraphFileError:
        return GraphFileError(message, file=self.name, line=line, value=value, hint=hint)

    def entries(self, node: yaml.Node, what: str, known: Sequence[str] | None = None) -> list[_Entry]:
        """The keys of a mapping, each once, and only known ones."""
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong(f"{what} is no mapping", line_of(node), hint="give it keys")
        found: dict[str, _Entry] = {}
        for key_node, value in node.value:
            key, line = str(key_node.value), line_of(key_node)
            if key in found:
                raise self.wrong(f"{what} has {key!r} twice, also in line {found[key].line}", line, key)
            if known is not None and key not in known:
                raise self.wrong(f"unknown key {key!r} in {what}", line, key, did_you_mean(key, known))
            found[key] = _Entry(key, line, value)
        return list(found.values())

    def plain(self, node: yaml.Node) -> Any:
        """The value as plain data."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            raise self.wrong(f"not plain data: {error.problem}", line_of(node)) from error
        except (ValueError, KeyError) as error:  # a tag that the value does not fit, or a number without an end
            raise self.wrong(f"not plain data: {error}", line_of(node)) from error
        finally:
            loader.dispose()


def line_of(node: yaml.Node) -> int:
    """The line that a node of the file begins in, from 1."""
    return int(node.start_mark.line) + 1


def load_graph(path: Path) -> Graph:
    """The graph that a file describes. Errors as `parse_graph`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphFileError(f"the file cannot be read: {error}", file=str(path), line=1) from error
    return parse_graph(str(path), text)


def parse_graph(name: str, text: str) -> Graph:
    """The graph that the text of a file of that name describes: YAML, of which JSON is a part.

    `GraphFileError` says file, line and key of what is wrong; `CycleError`.
    """
    return _Reader(_File(name, text)).graph()


def input_value(text: str) -> Any:
    """An input as somebody types it: what is a JSON list or object is taken as one, all else as text."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # text that happens to begin with a bracket
            return text
    return text


class _Reader:
    """Builds one graph. Nodes may stand in any order: they are added as soon as what they need is there."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._built: dict[str, Node] = {}

    def graph(self) -> Graph:
        entries = {e.key: e for e in self._file.entries(self._file.root, "the graph", _GRAPH)}
        if "nodes" not in entries:
            raise self._file.wrong("the graph has no nodes", 1, hint="add `nodes:`")
        fields = {key: self._file.plain(e.value) for key, e in entries.items() if key != "nodes"}
        if "namespace" in fields:
            fields["namespace"] = self._guard(entries["namespace"].line, lambda: Namespace(**fields["namespace"]))
        graph: Graph = self._guard(1, lambda: Graph(**fields))
        waiting = {e.key: e for e in self._file.entries(entries["nodes"].value, "nodes")}
        self._refuse_strangers(waiting)
        for name in self._in_order(waiting):
            entry = waiting[name]
            node = self._guard(entry.line, lambda entry=entry: self._node(graph, entry))
            self._built[name] = node
        for name, entry in waiting.items():
            self._guard(entry.line, lambda name=name: graph.inputs_of(self._built[name]))
        self._guard(entries["nodes"].line, graph.check)
        return graph

    def _guard(self, line: int, build: Callable[..., Any]) -> Any:
        """Build something; what the library refuses is said with the line."""
        try:
            return build()
        except GraphFileError:
            raise
        except (GraphError, InvalidRequestError, TypeError) as error:
            message = error.message if isinstance(error, GraphError | InvalidRequestError) else str(error)
            hint = None if isinstance(error, TypeError) else error.hint
            raise self._file.wrong(message, line, getattr(error, "value", None), hint) from error

    # -- order --------------------------------------------------------------------------------------------------

    def _in_order(self, waiting: Mapping[str, _Entry]) -> list[str]:
        """Names so that each comes after what it needs; a cycle is refused with its path."""
        order: dict[str, None] = {}
        for start in waiting:
            path: dict[str, Iterator[str]] = {start: self._needs(waiting[start], waiting)}
            while path:
                at, needs = next(reversed(path.items()))
                following = next((need for need in needs if need not in order), None)
                if following is None:
                    order[at] = None
                    del path[at]
                elif following in path:
                    names = list(path)
                    raise CycleError((*names[names.index(following) :], following))
                else:
                    path[following] = self._needs(waiting[following], waiting)
        return list(order)

    def _needs(self, entry: _Entry, known: Mapping[str, _Entry]) -> Iterator[str]:
        for part in self._file.entries(entry.value, entry.key, (*_AGENT, *_NODE)):
            if part.key in ("after", "continues", "map", "reduce"):
                value = self._file.plain(part.value)
                for one in value if isinstance(value, list) else [value]:
                    name = str(one).split(".")[0]
                    if name in known and not (part.key == "map" and isinstance(value, list)):
                        yield name
            elif part.key == "branch":
                on = next((e for e in self._file.entries(part.value, "branch") if e.key == "on"), None)
                name = "" if on is None else str(self._file.plain(on.value)).split(".")[0]
                if name in known:
                    yield name

    def _refuse_strangers(self, waiting: Mapping[str, _Entry]) -> None:
        for entry in waiting.values():
            for part in self._file.entries(entry.value, entry.key, (*_AGENT, *_NODE)):
                if part.key not in ("after", "continues", "reduce"):
                    continue
                value = self._file.plain(part.value)
                for name in value if isinstance(value, list) else [value]:
                    if name not in waiting:
                        message = f"{part.key} names {name!r}, which is no node"
                        raise self._file.wrong(message, part.line, name, did_you_mean(str(name), waiting))

    # -- nodes --------------------------------------------------------------------------------------------------

    def _node(self, graph: Graph, entry: _Entry) -> Node:
        parts = {e.key: e for e in self._file.entries(entry.value, entry.key, (*_AGENT, *_NODE))}
        kinds = [kind for kind in _KINDS if kind in parts]
        if len(kinds) > 1:
            raise self._file.wrong(f"{entry.key} has {' and '.join(kinds)}", parts[kinds[1]].line, kinds, "give one")
        after = self._nodes(parts.get("after"))
        if kinds and "continues" in parts:
            raise self._file.wrong(f"a {kinds[0]} cannot continue", parts["continues"].line, "continues")
        if not kinds:
            before = self._nodes(parts.get("continues"))
            agent = self._agent(entry.key, entry.line, parts)
            return graph.add(agent, after=after, continues=before[0] if before else None)
        if kinds[0] == "map":
            return graph.map(self._agent(entry.key, entry.line, parts), over=self._source(parts["map"]), after=after)
        if kinds[0] == "reduce":
            agent, over = self._agent(entry.key, entry.line, parts), self._nodes(parts["reduce"])
            return graph.reduce(agent, over=over[0], after=after)
        for name in _AGENT:
            if name in parts:
                message = f"{name} belongs to the agents of the {kinds[0]}"
                raise self._file.wrong(message, parts[name].line, name, f"move it into {kinds[0]}")
        make = self._loop if kinds[0] == "loop" else self._branch
        return make(graph, entry.key, parts[kinds[0]], after)

    def _loop(self, graph: Graph, name: str, part: _Entry, after: list[Node]) -> Node:
        parts = {e.key: e for e in self._file.entries(part.value, "loop", ("agents", "until", "at_most"))}
        for key in ("agents", "until", "at_most"):
            if key not in parts:
                raise self._file.wrong(f"the loop {name} lacks {key}", part.line, key, f"add {key}")
        agents = [self._inner(e) for e in self._file.entries(parts["agents"].value, "agents")]
        until = self._file.plain(parts["until"].value)
        if not isinstance(until, dict) or len(until) != 1:
            raise self._file.wrong("until is no single `field: value`", parts["until"].line, until)
        (path, wanted), *_ = until.items()
        at_most = self._file.plain(parts["at_most"].value)
        done = _Until(tuple(str(path).split(".")), wanted)
        return graph.loop(*agents, until=done, at_most=at_most, after=after, name=name)

    def _branch(self, graph: Graph, name: str, part: _Entry, after: list[Node]) -> Node:
        parts = {e.key: e for e in self._file.entries(part.value, "branch", ("on", "cases", "otherwise"))}
        for key in ("on", "cases"):
            if key not in parts:
                raise self._file.wrong(f"the branch {name} lacks {key}", part.line, key, f"add {key}")
        on = self._source(parts["on"])
        if not isinstance(on, Ref | Input | Node):
            raise self._file.wrong("on is no reference", parts["on"].line, str(on), "name a node's field or an input")
        cases = {e.key: self._inner(e) for e in self._file.entries(parts["cases"].value, "cases")}
        otherwise = self._inner(parts["otherwise"]) if "otherwise" in parts else None
        return graph.branch(on, cases, otherwise=otherwise, after=after, name=name)

    def _inner(self, entry: _Entry) -> Agent:
        """An agent inside of a loop, a branch or a fallback: named by its key, unless it has a `name`."""
        parts = {e.key: e for e in self._file.entries(entry.value, entry.key, ("name", *_AGENT))}
        name = str(self._file.plain(parts["name"].value)) if "name" in parts else entry.key
        return self._agent(name, entry.line, parts)

    def _agent(self, name: str, line: int, parts: Mapping[str, _Entry]) -> Agent:
        fields: dict[str, Any] = {}
        for key in _AGENT:
            if key in parts and key not in ("sampling", "on_failure"):
                fields[key] = self._file.plain(parts[key].value)
        if "task" not in fields:
            raise self._file.wrong(f"{name} has no task", line, name, "say what it is to do")
        if "sampling" in parts:
            known = [f.name for f in dataclasses.fields(SamplingParams)]
            entries = self._file.entries(parts["sampling"].value, "sampling", known)
            values = {e.key: self._file.plain(e.value) for e in entries}
            fields["sampling"] = self._guard(parts["sampling"].line, lambda: SamplingParams(**values))
        if "on_failure" in parts:
            fields["on_failure"] = self._policy(parts["on_failure"])
        lines = [parts[key].line for key in _AGENT if key in parts]
        return self._guard(min(lines, default=line), lambda: self._named(Agent, name, fields, parts))  # type: ignore[no-any-return]

    def _named(self, make: Any, name: str, fields: dict[str, Any], parts: Mapping[str, _Entry]) -> Any:
        """Build an agent; a field that is refused is said with its own line."""
        try:
            return make(name, **fields)
        except GraphError as error:
            field = error.message.split(" ")[0]
            if field in parts:
                raise self._file.wrong(error.message, parts[field].line, error.value, error.hint) from error
            raise

    def _policy(self, part: _Entry) -> Policy:
        """`skip`, `fail`, `{default: value}`, `{fallback: {agent}}`, `{retry: times, ..., then: one of these}`."""
        if isinstance(part.value, yaml.ScalarNode):
            return self._word(part)
        known = ("default", "fallback", "reserve_s", "retry", "backoff_s", "factor", "then")
        parts = {e.key: e for e in self._file.entries(part.value, part.key, known)}
        if "retry" in parts:
            values = {key: self._file.plain(parts[key].value) for key in ("backoff_s", "factor") if key in parts}
            then = parts.get("then")
            last = fail if then is None else self._policy(then)
            if isinstance(last, Retry):
                raise self._file.wrong("then is another retry", parts["then"].line, hint="give one number of times")
            times = self._file.plain(parts["retry"].value)
            return self._guard(parts["retry"].line, lambda: retry(times, then=last, **values))  # type: ignore[no-any-return]
        if "default" in parts:
            return default(self._file.plain(parts["default"].value))
        if "fallback" in parts:
            entry = parts["fallback"]
            reserve = self._file.plain(parts["reserve_s"].value) if "reserve_s" in parts else None
            return self._guard(entry.line, lambda: fallback(self._inner(entry), reserve_s=reserve))  # type: ignore[no-any-return]
        raise self._file.wrong(
            f"{part.key} says nothing", part.line, hint="give skip, fail, default, fallback or retry"
        )

    def _word(self, part: _Entry) -> Last:
        word = self._file.plain(part.value)
        if word == "skip":
            return skip
        if word == "fail":
            return fail
        hint = "give skip, fail, or a mapping with default, fallback or retry"
        raise self._file.wrong(f"{part.key} is {word!r}", part.line, word, hint)

    def _nodes(self, part: _Entry | None) -> list[Node]:
        if part is None:
            return []
        value = self._file.plain(part.value)
        return [self._built[name] for name in (value if isinstance(value, list) else [value])]

    def _source(self, part: _Entry) -> Source:
        """`node.field`, a node's output, the name of an input, or a list."""
        value = self._file.plain(part.value)
        if isinstance(value, list):
            return value
        name, *path = str(value).split(".")
        if name not in self._built:
            if path:
                raise self._file.wrong(f"{part.key} names {name!r}, which is no node", part.line, value)
            return Input(name)
        source: Node | Ref = self._built[name]
        for field in path:
            source = self._guard(part.line, lambda source=source, field=field: source[field])
        return source


@dataclass(frozen=True, slots=True)
class _Until:
    """Whether a field of the output has a value; of plain text, `contains: words`."""

    path: tuple[str, ...]
    wanted: Any

    def __call__(self, output: Any) -> bool:
        if isinstance(output, str):
            return self.path == ("contains",) and str(self.wanted) in output
        try:
            return bool(pick(output, self.path) == self.wanted)
        except LookupError:
            return False
