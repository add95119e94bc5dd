"""An agent: what it is told, how it samples, how long it may take, what happens when it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

from shoal.agents.build.policy import Default, FailRun, Fallback, Policy, Retry, Skip, fail
from shoal.agents.build.schema import Schema, schema_of
from shoal.checks import is_number, is_whole
from shoal.errors import GraphError
from shoal.types import Namespace, Priority, SamplingParams

_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # it goes into HTTP headers
_PATH = r"[A-Za-z_][\w-]*(?:\.\w+)*"
# In one pair of braces a name is replaced, in two it is text in one pair, in three it is replaced within one pair.
_PLACEHOLDER = re.compile(
    rf"\{{\{{\{{(?P<within>{_PATH})\}}\}}\}}|\{{\{{(?P<text>{_PATH})\}}\}}|\{{(?P<path>{_PATH})\}}"
)


@dataclass(frozen=True, eq=False)
class Agent:
    """One agent. Checked when built; raises `GraphError`.

    `task` is what it is to do, `role` who it is; both may name inputs of the graph, and outputs that its node depends
    on, in braces: `{question}`, `{planner.sections}`, and `{item}` in a map; `{{a}}` is the text `{a}`, so that a word
    may stand in braces. With a `schema` (a dataclass, a pydantic
    model, a JSON schema) its output is held to that and parsed. `timeout_s` bounds one attempt, from when it joins the
    batch; `deadline_s` the whole node, waiting and retries included, from when its inputs are there. A `private` agent
    shares prefixes only with itself, within one `version` of it; others share inside the graph's namespace.
    """

    name: str
    _: KW_ONLY
    task: str
    role: str = ""
    schema: Any = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority | str = Priority.NORMAL
    timeout_s: float | None = None
    deadline_s: float | None = None
    on_failure: Policy = fail
    private: bool = False
    version: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise _wrong("name", self.name, "letters, digits, - and _, beginning with a letter")
        if not isinstance(self.task, str) or not self.task.strip():
            raise _wrong("task", self.task, "text")
        if not isinstance(self.role, str):
            raise _wrong("role", self.role, "text")
        if not isinstance(self.sampling, SamplingParams):
            raise _wrong("sampling", self.sampling, "a SamplingParams")
        if self.priority not in tuple(Priority):
            raise _wrong("priority", self.priority, f"one of {', '.join(Priority)}")
        object.__setattr__(self, "priority", Priority(self.priority))
        if not isinstance(self.private, bool):
            raise _wrong("private", self.private, "true or false")
        if not is_whole(self.version, 0) or (self.version and not self.private):
            raise _wrong("version", self.version, "0 or more, and 0 for an agent that is not private")
        for name in ("timeout_s", "deadline_s"):
            check_seconds(name, getattr(self, name))
        if not isinstance(self.on_failure, FailRun | Skip | Default | Fallback | Retry):
            raise _wrong("on_failure", self.on_failure, "retry(...), default(...), fallback(...), skip or fail")
        if self.schema is not None and self.sampling.structured:
            raise _wrong("schema", self.schema, "given here or in sampling, not in both")

    @cached_property
    def output(self) -> Schema | None:
        """The schema of what it writes; None for plain text."""
        return None if self.schema is None else schema_of(self.schema)

    def namespace(self, common: Namespace, task_id: str) -> Namespace:
        """Where its prefixes are shared: in the graph's namespace, or in one of its own."""
        if not self.private:
            return common
        return Namespace(common.task or task_id, json.dumps([common.agent, self.name]), self.version)

    @property
    def cost(self) -> int:
        """Tokens it may write: what critical paths are measured in."""
        return self.sampling.max_tokens


def check_seconds(name: str, value: object) -> None:
    """GraphError unless `value` is None or a finite number above 0."""
    if value is not None and not (is_number(value) and value > 0):
        raise _wrong(name, value, "above 0 seconds, or None")


def _wrong(name: str, value: object, limit: str) -> GraphError:
    return GraphError(f"{name} of an agent is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")


def placeholders(template: str) -> Iterator[tuple[str, ...]]:
    """The dotted names in braces of a template, split: `{plan.sections}` is ("plan", "sections")."""
    for found in _PLACEHOLDER.finditer(template):
        path = found["path"] or found["within"]
        if path:
            yield tuple(path.split("."))


def render(template: str, lookup: Any) -> str:
    """The template with each name in braces replaced by the text that `lookup(path)` gives.

    A name in doubled braces is text in single ones: `{{a}}` gives `{a}`. Other braces stay.
    """

    def fill(found: re.Match[str]) -> str:
        if found["text"]:
            return f"{{{found['text']}}}"
        path = found["path"] or found["within"]
        value = str(lookup(tuple(path.split("."))))
        return f"{{{value}}}" if found["within"] else value

    return _PLACEHOLDER.sub(fill, template)
