"""JSON schemas whose objects have the properties that they name, and no others."""

from __future__ import annotations

import json
from typing import Any

_SAYS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"}
_VALUES = ("const", "enum", "default", "examples")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without properties that it does not name: a small model would make them up without end.

    What it allows, the given schema allows too. Objects that say themselves what else they take are left as they are,
    and so is a schema with `allOf`, whose parts add up.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: child if key in _VALUES else _closed(child) for key, child in value.items()}
    is_object = isinstance(value.get("properties"), dict) and value.get("type", "object") == "object"
    if is_object and not _SAYS & value.keys():
        inner["additionalProperties"] = False
    return inner
