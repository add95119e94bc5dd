"""JSON schemas before a grammar is made of them: too large ones and ones without a finite value are refused.

The grammar compiler knows less than JSON Schema: what it would refuse and can be said in other words is said so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from shoal.errors import InvalidRequestError

MAX_SCHEMA_NODES = 5_000
MAX_SCHEMA_DEPTH = 64
_MAX_REFS = 500

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
"""Values of `format` that outputs are held to. Others are ignored, as JSON Schema has it, and told of."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold schemas by name
_NESTED = (
    "items", "prefixItems", "additionalItems", "contains", "additionalProperties", "unevaluatedItems",
    "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
_OF_OBJECTS = (
    "properties", "required", "patternProperties", "additionalProperties", "minProperties", "dependentSchemas",
)  # fmt: skip
_COMBINED = ("anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a schema that is too large, too deep, or whose every value is infinite."""
    references: set[str] = set()
    for nodes, (depth, node) in enumerate(_walk(schema), 1):
        if nodes > MAX_SCHEMA_NODES:
            raise _too_much("it has too many parts", nodes, MAX_SCHEMA_NODES)
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_much("it is nested too deeply", depth, MAX_SCHEMA_DEPTH)
        reference = node.get("$ref") if isinstance(node, Mapping) else None
        if isinstance(reference, str):
            references.add(reference)
    if len(references) > _MAX_REFS:
        raise _too_much("it has too many different references", len(references), _MAX_REFS)
    if schema not in _Ends(schema):
        raise _too_much("every value of it contains itself, without end", None, None)


def _too_much(why: str, value: object, limit: object) -> InvalidRequestError:
    told = f" ({value}, the limit is {limit})" if limit is not None else ""
    return InvalidRequestError(
        f"json_schema cannot be honoured: {why}{told}",
        param="json_schema",
        value=value,
        limit=limit,
        hint="make the schema smaller" if limit is not None else "make the recursive part optional",
    )


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    """Every value in a document, with its depth."""
    pending = [(1, schema)]
    while pending:
        depth, node = pending.pop()
        yield depth, node
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        # One more than there may be is enough to see that there are too many.
        pending += [(depth + 1, child) for child in islice(children, MAX_SCHEMA_NODES + 1 - len(pending))]


class _Ends:
    """Which schemas have a finite value: the least fixed point, in time linear in the size of the document.

    Wrong only in the direction of letting a schema pass: what other keywords make impossible is the compiler's to say.
    A schema waits for groups of others: it ends when in each group one does.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open: dict[int, int] = {}  # schema: groups in which none has ended yet
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # schema: who waits for it, in which group
        self._met: set[tuple[int, int]] = set()
        self._ended: set[int] = set()
        for _, node in _walk(root):
            if isinstance(node, Mapping):
                self._enter(node)
        pending = [name for name, groups in self._open.items() if not groups]
        while pending:
            name = pending.pop()
            self._ended.add(name)
            pending += [other for other, group in self._waiting.pop(name, ()) if self._meet(other, group)]

    def __contains__(self, schema: Mapping[str, Any]) -> bool:
        return id(schema) in self._ended

    def _meet(self, name: int, group: int) -> bool:
        """True when this was the last group that a schema waited for."""
        if (name, group) in self._met:
            return False
        self._met.add((name, group))
        self._open[name] -= 1
        return not self._open[name]

    def _enter(self, schema: Mapping[str, Any]) -> None:
        groups = [group for group in self._groups(schema) if all(isinstance(one, Mapping) for one in group)]
        self._open[id(schema)] = len(groups)
        for number, group in enumerate(groups):
            for one in group:
                self._waiting.setdefault(id(one), []).append((id(schema), number))

    def _groups(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield [_resolve(self._root, reference)]
        yield from ([part] for part in _list(schema.get("allOf")))
        yield from (choices for key in ("anyOf", "oneOf") if (choices := _list(schema.get(key))))
        properties = schema.get("properties")
        if schema.get("type", "object") == "object" and isinstance(properties, Mapping):
            named = (name for name in _list(schema.get("required")) if isinstance(name, str))
            yield from ([properties[name]] for name in named if name in properties)
        fewest = schema.get("minItems", 0)
        if schema.get("type") == "array" and isinstance(fewest, int) and fewest >= 1:
            first = _list(schema.get("prefixItems"))[:fewest]
            yield from ([part] for part in first)
            if len(first) < fewest:
                yield [schema.get("items")]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    """What a local reference points to, or None: the compiler says what is wrong with it."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


# -- in other words -----------------------------------------------------------------------------------------------


def map_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy in which every schema, innermost first, is what `change` makes of it. Values and names are left alone."""
    if isinstance(schema, list):
        return [map_schema(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner: dict[str, Any] = {}
    for key, child in schema.items():
        if key in _NAMED and isinstance(child, Mapping):
            inner[key] = {name: map_schema(part, change) for name, part in child.items()}
        else:
            inner[key] = map_schema(child, change) if key in _NESTED else child
    return change(inner)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without properties that it does not name: a small model would make them up without end.

    What it allows, the given schema allows too, and it allows something if that does: objects that say themselves what
    else they take are left as they are, a property that is required and not declared is declared, and a schema whose
    parts add up (`allOf`, or choices and references beside properties) is left as it is.
    """
    adds_up = False

    def close(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal adds_up
        of_objects = any(key in part for key in _OF_OBJECTS)
        adds_up = adds_up or "allOf" in part or (of_objects and any(key in part for key in _COMBINED))
        properties = part.get("properties")
        says = ("additionalProperties", "patternProperties", "unevaluatedProperties")
        if (
            not isinstance(properties, Mapping)
            or part.get("type", "object") != "object"
            or any(key in part for key in says)
        ):
            return part
        missing = [name for name in _list(part.get("required")) if isinstance(name, str) and name not in properties]
        fewest = part.get("minProperties", 0)
        if isinstance(fewest, int) and fewest > len(properties) + len(missing):
            return part
        declared = {**properties, **{name: {} for name in missing}}
        return {**part, "properties": declared, "additionalProperties": False}

    result = map_schema(schema, close)
    return schema if adds_up else result


def translated(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in words that the grammar compiler knows; what that allows, the given schema allows."""
    return map_schema(schema, _translated)  # type: ignore[no-any-return]


def unchecked_formats(schema: Mapping[str, Any]) -> list[str]:
    """The formats in a schema that outputs are not held to, each once."""
    found: dict[str, None] = {}

    def look(part: dict[str, Any]) -> dict[str, Any]:
        form = part.get("format")
        if isinstance(form, str) and form not in (*FORMATS, "decimal") and _may_be(part, "string"):
            found[form] = None
        return part

    map_schema(schema, look)
    return list(found)


def may_hold_lists(schema: Mapping[str, Any]) -> bool:
    """True when a value of the schema may have a list in it."""
    found = False

    def look(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal found
        says = any(key in part for key in ("properties", "const", "enum", "$ref", "anyOf", "oneOf", "allOf"))
        listed = "items" in part or "prefixItems" in part or ("type" in part and _may_be(part, "array"))
        free = _may_be(part, "object") and not says  # any value, or any object
        found = found or listed or free
        return part

    map_schema(schema, look)
    return found


def _translated(part: dict[str, Any]) -> dict[str, Any]:
    part = _in_range(part)
    patterns = []
    if isinstance(part.get("pattern"), str):
        patterns = _without_look_ahead(part.pop("pattern"))
    form = part.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del part["format"]
        patterns += [_DECIMAL] if form == "decimal" and part.get("type") == "string" else []
    if len(patterns) == 1:
        part["pattern"] = patterns[0]
    elif patterns:
        part["allOf"] = [*_list(part.get("allOf")), *({"pattern": pattern} for pattern in patterns)]
    return part


def _may_be(part: Mapping[str, Any], kind: str) -> bool:
    told = part.get("type", kind)
    return kind in told if isinstance(told, list) else told == kind


# The compiler's ranges are of 64 bits, and it keeps bounds as doubles.
_MOST = 2**63 - 1024  # the largest double that is such a number, whose negative is one too
_MOST_REAL = 10**18
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _in_range(part: dict[str, Any]) -> dict[str, Any]:
    """The same with bounds that the compiler takes, moved inwards where they must be."""
    values = [part.get("const"), *_list(part.get("enum"))]
    for value in values:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _too_much("a number in it has more than 64 bits", value, "64 bits")
    given = {key: part[key] for key in _BOUNDS if _is_number(part.get(key))}
    if not any(abs(value) > 2**53 for value in given.values()):
        return part
    whole = not _may_be(part, "number")
    low, high = _limits(given, whole=whole)
    most = _MOST if whole else _MOST_REAL
    if low > most or high < -most:
        raise _too_much("the numbers it allows are too large", max(low, -high), most)
    rest = {key: value for key, value in part.items() if key not in given}
    if low > -math.inf:
        rest["minimum"] = _inwards(max(low, -most), up=True) if whole else max(low, -most)
    if high < math.inf:
        rest["maximum"] = _inwards(min(high, most), up=False) if whole else min(high, most)
    return rest


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _limits(given: Mapping[str, Any], *, whole: bool) -> tuple[Any, Any]:
    """The closed range of some bounds. An open one of real numbers is closed a little further in."""
    low, high = given.get("minimum", -math.inf), given.get("maximum", math.inf)
    above, below = given.get("exclusiveMinimum"), given.get("exclusiveMaximum")
    if above is not None:
        low = max(low, math.floor(above) + 1 if whole else math.nextafter(above, math.inf))
    if below is not None:
        high = min(high, math.ceil(below) - 1 if whole else math.nextafter(below, -math.inf))
    return low, high


def _inwards(value: Any, *, up: bool) -> int:
    """The nearest whole number that a double can be, from `value` in one direction."""
    number = math.ceil(value) if up else math.floor(value)
    near = float(number)
    if (near < number) if up else (near > number):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


_DECIMAL = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)$"
_PYDANTIC = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"  # not of signs and points alone; then a sign and zeros
    r"(?:\\d\*\\\.\?\\d\*\$"
    r"|\\d\*\\\.\?\\d\{0,(?P<places>\d+)\}0\*\$"
    r"|\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<digits>\d+)\}0\*\$\)"
    r"(?:\\d\*\\\.\\d\*|\\d\{0,\d+\}\\\.\\d\{0,(?P<both>\d+)\})0\*\$\))"
)
"""What pydantic writes for a `Decimal`: without limits, with decimal places, with digits, and with both."""
_LOOK_AHEAD = re.compile(r"\^\(\?=")


def _without_look_ahead(pattern: str) -> list[str]:
    """Patterns that together say the same. The compiler refuses those with a look-ahead that is not known here."""
    decimal = _PYDANTIC.fullmatch(pattern)
    if decimal is not None:
        return [_decimal(*(None if group is None else int(group) for group in decimal.groups()))]
    patterns = []
    while _LOOK_AHEAD.match(pattern):  # `^(?=a)b` is what begins with a, and is b
        end = _closing(pattern, 1)
        if end is None:
            break
        patterns.append(f"^(?:{pattern[4:end]})")
        pattern = f"^{pattern[end + 1 :]}"
    return [*patterns, pattern]


def _closing(pattern: str, at: int) -> int | None:
    """Where the group that opens at `at` is closed."""
    depth, in_class = 0, False
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
            at += 2 if pattern[at + 1 : at + 3] == "^]" else pattern[at + 1 : at + 2] == "]"
        else:
            depth += (c == "(") - (c == ")")
            if depth == 0:
                return at
        at += 1
    return None


def _decimal(places: int | None, whole: int | None, digits: int | None, both: int | None) -> str:
    """A pattern of decimal numbers within the limits of one of pydantic's."""
    if places is None and whole is None:
        return _DECIMAL
    if both is not None or whole is None:  # decimal places are limited
        most = places if both is None else both
        integer = "[0-9]+" if whole is None else f"[0-9]{{1,{whole}}}" if whole else "0"
        if not most:
            return rf"^[+-]?{integer}$"
        return rf"^[+-]?({integer}(\.[0-9]{{0,{most}}})?|\.[0-9]{{1,{most}}})$"
    total = (digits or 1) - 1
    parted = "|".join(rf"[0-9]{{0,{left}}}\.[0-9]{{1,{total - left}}}" for left in range(min(total, 64)))
    return rf"^[+-]?([0-9]{{1,{total}}}|{parted})$"
