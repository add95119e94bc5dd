"""Structured output: from a dataclass, a pydantic model or a JSON schema to what the engine and the graph need."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import GraphError
from shoal.sampling.schema import closed


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema, the names of its top-level fields (None: not told), and how its text becomes a value.

    `parse` raises `ValueError` for text that does not fit.
    """

    json_schema: Mapping[str, Any]
    fields: tuple[str, ...] | None
    parse: Callable[[str], Any]


def schema_of(source: object) -> Schema:
    """The schema behind a dataclass (or other type), a pydantic model, or a mapping that is one already.

    A dataclass's output is an instance of it, a pydantic model's too, a mapping's is plain JSON. GraphError for
    anything else.
    """
    if isinstance(source, Mapping):
        properties = source.get("properties")
        return Schema(source, tuple(properties) if isinstance(properties, Mapping) else None, json.loads)
    if hasattr(source, "model_json_schema") and hasattr(source, "model_validate_json"):
        document = closed(source.model_json_schema())
        return Schema(document, tuple(document.get("properties", ())), source.model_validate_json)
    return _of_type(source)


def _of_type(source: object) -> Schema:
    import msgspec

    try:
        document = closed(msgspec.json.schema(source))
    except TypeError as error:
        raise GraphError(
            f"no schema can be made of {source!r}", value=source, hint="give a dataclass, a pydantic model or a mapping"
        ) from error
    decoder = msgspec.json.Decoder(source)
    fields = tuple(f.name for f in dataclasses.fields(source)) if dataclasses.is_dataclass(source) else None
    return Schema(document, fields, decoder.decode)


def pick(value: Any, path: tuple[str, ...]) -> Any:
    """The part of `value` that the field names lead to. LookupError when there is none."""
    for name in path:
        if isinstance(value, Mapping):
            value = value[name]
        elif isinstance(value, list | tuple) and name.isdecimal():
            value = value[int(name)]
        elif not name.startswith("_") and hasattr(value, name):
            value = getattr(value, name)
        else:
            raise KeyError(name)
    return value


def as_text(value: Any) -> str:
    """A value as a prompt shows it: text as it is, a list of texts as paragraphs, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return "\n\n".join(value)
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
