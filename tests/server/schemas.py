"""Random JSON schemas of the kinds that agents use."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "age", "city", "tags", "items", "note", "state", "count", "kind", "ok", "größe", "名前")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values end soon: strings, lists and objects are bounded."""
    leaves = [_integer, _number, _boolean, _string, _enum, _const, _pattern]
    nested = [_object, _array, _any_of, _nullable]
    makers = leaves if depth >= 3 else [*leaves, *nested, *nested] if depth else [_object]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": -10, "maximum": 10}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": rng.randint(0, 12)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 'qu"ote', "new\nline", 1, 2.5, True, None], 3)}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, "ü"])}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-z]{1,8}$", "^[0-9]{4}-[0-9]{2}$", "^(on|off)$"])}
