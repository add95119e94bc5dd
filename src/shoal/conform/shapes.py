"""Structured output, in the manner of JSONSchemaBench: schemas of many features, answers checked by `jsonschema`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shoal.conform.outcome import CaseOutcome, Target, attempt

_TEXT = {"type": "string", "maxLength": 12}
_PAIR = {"type": "object", "properties": {"a": _TEXT, "b": {"type": "integer"}}, "required": ["a", "b"]}
SAMPLE: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["yes", "no"]},
    "const": {"const": {"version": 2}},
    "boolean": {"type": "boolean"},
    "null or integer": {"type": ["null", "integer"]},
    "integer bounds": {"type": "integer", "minimum": -5, "maximum": 17},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "number bounds": {"type": "number", "minimum": 0, "maximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "64 bits": {"type": "integer", "minimum": 2**62, "maximum": 2**63 - 1},
    "length": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "object": _PAIR,
    "optional": {
        "type": "object",
        "properties": {"a": _TEXT, "b": _TEXT},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required but not declared": {"type": "object", "properties": {"a": _TEXT}, "required": ["a", "b"]},
    "additional by schema": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    },
    "nested": {"type": "object", "properties": {"in": _PAIR}, "required": ["in"]},
    "array": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 4},
    "array of objects": {"type": "array", "items": _PAIR, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, _TEXT], "items": False, "minItems": 2},
    "anyOf": {"anyOf": [{"type": "integer"}, {"enum": ["none"]}]},
    "oneOf by a tag": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "v": {"type": "integer"}}, "required": ["t", "v"]},
            {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"], "additionalProperties": False},
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "reference": {"$ref": "#/$defs/p", "$defs": {"p": _PAIR}},
    "recursive": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
                "required": ["v", "next"],
            }
        },
    },
    "other alphabets": {"enum": ["žluťoučký kůň", "红色", "🙂"]},
    "keys with quotes": {"type": "object", "properties": {'a"b\\c': {"const": 1}}, "required": ['a"b\\c']},
    "what pydantic emits for Decimal": {
        "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "maxLength": 9}]
    },
}
_SEEDS = (1, 2)


def shapes(target: Target) -> Iterator[CaseOutcome]:
    """Each schema of the sample: two answers at temperature 1 must follow it to the letter."""
    import httpx

    with httpx.Client(base_url=target.url, timeout=120) as client:
        for name, schema in SAMPLE.items():
            yield attempt(name, lambda schema=schema: _follows(client, target.model, schema))  # type: ignore[misc]


def _follows(client: Any, model: str, schema: dict[str, Any]) -> None:
    import jsonschema

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in _SEEDS:
        body = {"model": model, "messages": [{"role": "user", "content": "Answer in JSON."}], "seed": seed}
        body |= {"max_tokens": 400, "temperature": 1, "response_format": form}
        answer = client.post("/chat/completions", json=body)
        if answer.status_code != 200:
            raise AssertionError(f"status {answer.status_code}: {answer.text}")
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            raise AssertionError(f"no end in 400 tokens: {choice['message']['content'][:80]}")
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
