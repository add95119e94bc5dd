"""The Jinja environment chat templates run in: the immutable sandbox, what they expect of it, a budget, and tracing.

Every way in which a template makes one string of others goes through this environment, and keeps track of what is
content and what the template's own (`Traced`). Imported with the first template that is rendered: Jinja is not needed
to serve plain prompts.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from shoal.models.traced import Traced, derived, formatted, holds_content, joined, plain, shown

_MAX_NUMBER = 1 << 256
_EXACT_FILTERS = frozenset(
    {"attr", "capitalize", "d", "default", "first", "format", "join", "last", "lower", "max", "min", "random"}
    | {"replace", "reverse", "string", "sum", "trim", "upper"}
)
"""Filters that only call methods of a string, or hand something through: what they return is traced right."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Raises `SecurityError` when a rendering takes over `max_steps` or a value grows over `max_chars` characters.

    Counts loop rounds and macro calls of one rendering per thread, and the size of what operators make.

    The counting calls are put into the syntax tree as attributes of the environment, which a template cannot shadow.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_steps: int, max_chars: int) -> None:
        extensions = [LoopControlExtension, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=shown)
        self.max_steps, self.max_chars = max_steps, max_chars
        self.local = threading.local()
        self.filters["tojson"] = _tojson
        self.filters |= {"replace": _replace, "join": _join, "format": _format}
        self.filters = {name: _traced_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]  # filler text without end

    def start(self) -> None:
        """Begin the count of this thread's next rendering."""
        self.local.steps = 0

    def tick(self) -> str:
        """One round of a loop, or one call of a macro."""
        self.local.steps = getattr(self.local, "steps", 0) + 1
        if self.local.steps > self.max_steps:
            raise SecurityError(f"more than {self.max_steps:,} steps")
        return ""

    def concat_checked(self, *parts: object) -> str:
        """The operator `~`."""
        texts = list(map(shown, parts))
        self._check_size(sum(map(len, texts)))
        return joined(texts)

    def concat(self, parts: Iterable[str]) -> str:
        """How compiled templates build the text of macros and of block sets."""
        parts = list(parts)
        self._check_size(sum(map(len, parts)))
        return joined(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators of `intercepted_binops`."""
        sizes = [len(x) if isinstance(x, str | bytes | list | tuple) else 0 for x in (left, right)]
        if operator == "*":
            factors = [x for x in (left, right) if isinstance(x, int)]
            self._check_size(max(sizes) * max([1, *factors]))
        elif operator == "+":
            self._check_size(sum(sizes))
        elif operator == "%" and isinstance(left, str) and re.search(r"\*|\d{5}", left):
            raise SecurityError("a format with a width that large")
        numbers = [x for x in (left, right) if isinstance(x, int)]
        limit = 1024 if operator == "**" else _MAX_NUMBER
        if any(abs(x) > limit for x in numbers):
            raise SecurityError(f"a number too large for {operator}")
        if operator == "%" and isinstance(left, str) and not isinstance(left, Markup):
            pattern = plain(left)
            if isinstance(right, tuple):
                return formatted(lambda *args: pattern % args, left, right, {})
            return formatted(pattern.__mod__, left, (right,), {})
        return derived(super().call_binop(context, operator, left, right), (left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or a method."""
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and holds_content(args):
            __obj = getattr(Traced(owner), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        if owner is not None and not isinstance(owner, str):  # of a list or an object: what it held already
            return result
        return derived(result, (owner, *args, *kwargs.values()))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` and `format_map` of a string, or None for anything else."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(value, "__name__", "") != "format":
            return super().wrap_str_format(value)
        form = super().wrap_str_format(plain(owner).format if isinstance(owner, Traced) else value)
        assert form is not None
        return lambda *args, **kwargs: formatted(form, owner, args, kwargs)

    def _check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise SecurityError(f"a value of more than {self.max_chars:,} characters")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick))  # type: ignore[attr-defined]
        _replace_concats(tree)
        tree.set_environment(self)
        return tree


def _replace_concats(node: nodes.Node) -> None:
    """Turn every `a ~ b` below `node` into a call that checks the size of the result first."""
    for name, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        fresh = [_as_call(child) if isinstance(child, nodes.Concat) else child for child in children]
        setattr(node, name, fresh if isinstance(value, list) else fresh[0])
    for child in node.iter_child_nodes():
        _replace_concats(child)


def _as_call(concat: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("concat_checked"), list(concat.nodes), [], None, None)


def _traced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, which knows nothing of tracing, with what it makes of content marked as such."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # what precedes the value: a context or environment
    exact = name in _EXACT_FILTERS

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, Traced) and not exact:  # put together of traced and of plain strings
            result = plain(result)
        return derived(result, (*args[first:], *kwargs.values()))

    return traced


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return joined([str(value)]).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _format(environment: BudgetedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
    return environment.call_binop(None, "%", value, kwargs or args)


@pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined([str(d)]).join(map(shown, value))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` defines it: no escaping of HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
