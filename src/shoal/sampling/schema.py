"""JSON schemas that are refused before a grammar is made of them: too large, too deep, or without a finite value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import InvalidRequestError

MAX_SCHEMA_NODES = 5_000
MAX_SCHEMA_DEPTH = 64
_MAX_REFS = 500


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
    if not _Ends(schema, references).ends(schema):
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
        pending += [(depth + 1, child) for child in children]


class _Ends:
    """Which schemas have a finite value: the least fixed point over the references in them.

    Wrong only in the direction of letting a schema pass: what other keywords make impossible is the compiler's to say.
    """

    def __init__(self, root: Mapping[str, Any], references: set[str]) -> None:
        self._finite: set[str] = set()
        targets = {reference: _resolve(root, reference) for reference in references}
        changed = True
        while changed:
            changed = False
            for reference, target in targets.items():
                if reference not in self._finite and (target is None or self.ends(target)):
                    self._finite.add(reference)
                    changed = True

    def ends(self, schema: Any) -> bool:
        """True when a value of the schema can be finite."""
        if not isinstance(schema, Mapping):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._finite:
            return False
        if not all(map(self.ends, _list(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            choices = _list(schema.get(key))
            if choices and not any(map(self.ends, choices)):
                return False
        return self._object_ends(schema) and self._array_ends(schema)

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        properties, required = schema.get("properties"), _list(schema.get("required"))
        if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
            return True
        return all(self.ends(properties[name]) for name in required if isinstance(name, str) and name in properties)

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        fewest = schema.get("minItems", 0)
        if schema.get("type") != "array" or not isinstance(fewest, int) or fewest < 1:
            return True
        first = _list(schema.get("prefixItems"))[:fewest]
        return all(map(self.ends, first)) and (len(first) >= fewest or self.ends(schema.get("items")))


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
