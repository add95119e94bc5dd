"""JSON schemas before a grammar is made of them: closed, translated, refused in time linear in their size."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from shoal.errors import InvalidRequestError
from shoal.runners.fake import ByteTokenizer
from shoal.sampling.grammar import Constraint, GrammarCompiler, json_options
from shoal.sampling.schema import check_schema, closed, translated, unchecked_formats
from shoal.types import SamplingParams

pytest.importorskip("llguidance", reason="llguidance is not installed")
COMPILER = GrammarCompiler(ByteTokenizer(), 259)


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether an output held to the schema can be this text."""
    constraint: Constraint = COMPILER.compile(SamplingParams(json_schema=schema)).start()
    matcher, tokens = constraint._matcher, list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


# -- closing ------------------------------------------------------------------------------------------------------

A, B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
SATISFIABLE: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": A, "required": ["a", "b"]}, '{"a":1,"b":[2]}'),
    ({"properties": A, "required": ["b"]}, '{"b":"x"}'),
    ({"type": "object", "properties": A, "minProperties": 3}, '{"a":1,"x":2,"y":3}'),
    ({"type": "object", "properties": A, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, '{"a":1,"b":2}'),
    ({"properties": A, "oneOf": [{"properties": B, "required": ["b"]}]}, '{"a":1,"b":2}'),
    ({"$ref": "#/$defs/base", "properties": B, "$defs": {"base": {"properties": A, "required": ["a"]}}}, '{"a":1}'),
    ({"allOf": [{"properties": A, "required": ["a"]}, {"properties": B, "required": ["b"]}]}, '{"a":1,"b":2}'),
    ({"type": "array", "items": {"properties": A, "required": ["z"]}}, '[{"z":1}]'),
    ({"type": "object", "properties": {"enum": {"properties": A, "required": ["z"]}}}, '{"enum":{"z":null}}'),
]


@pytest.mark.parametrize(("schema", "text"), SATISFIABLE, ids=lambda value: json.dumps(value)[:50])
def test_closing_leaves_a_schema_satisfiable_and_allows_no_more(schema: dict[str, Any], text: str) -> None:
    document = json.loads(text)
    jsonschema.validate(document, schema)
    jsonschema.validate(document, closed(schema))
    try:
        open_takes = takes(schema, text)
    except InvalidRequestError:  # the compiler does not know all of these; closing must not be why
        return
    assert takes(dict(closed(schema)), text) == open_takes


def test_closing_keeps_out_what_is_not_named() -> None:
    person = {"type": "object", "properties": {"name": {"type": "object", "properties": A}, "const": {"const": {}}}}
    told = closed(person)
    assert told["additionalProperties"] is told["properties"]["name"]["additionalProperties"] is False
    assert told["properties"]["const"] == {"const": {}}
    assert "additionalProperties" not in person
    said = {"type": "object", "properties": A, "additionalProperties": True}
    assert closed(said) == said


# -- numbers ------------------------------------------------------------------------------------------------------

RANGES: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62, 10**18], [2**63, -(2**63) - 1]),
    ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**53 + 1, 2**63 - 1025], [-1, 2**64]),
    ({"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, [0, -5], [2**63]),
    ({"minimum": -(10**30), "maximum": 10**30}, [0, -(2**60)], [10**31]),
    ({"minimum": 0, "maximum": 2**53 + 1}, [2**53, 0], [2**53 + 2, -1]),
    ({"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 8}, [2**53 + 2, 2**53 + 6], [2**53, 2**53 + 8]),
    ({"minimum": 0}, [0, 7], [-1]),
    ({"maximum": 2**70}, [-5, 2**62], [2**71]),
]


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
@pytest.mark.parametrize(("bounds", "inside", "outside"), RANGES, ids=lambda value: str(value)[:40])
def test_whole_numbers_of_64_bits_and_more(bounds: Any, inside: list[int], outside: list[int], kind: Any) -> None:
    schema = {"type": kind, **bounds}
    assert all(takes(schema, str(value)) for value in inside)
    assert not any(takes(schema, str(value)) for value in outside)


def test_real_numbers_with_far_bounds() -> None:
    for bounds in ({"minimum": -1.7e308, "maximum": 1.7e308}, {"minimum": -(2**63), "maximum": 2**63}):
        assert all(takes({"type": "number", **bounds}, text) for text in ("0", "-1.5", "123456789.25"))
    assert not takes({"type": "number", "exclusiveMaximum": 2**60, "minimum": 0}, "-1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**64},
        {"type": "number", "maximum": -1e300},
        {"enum": [1, 2**64]},
        {"const": -(2**63) - 1},
        {"type": "array", "minItems": 10**20},
        {"type": "string", "minLength": 10**19},
        {"type": "number", "minimum": float("inf")},
        {"type": "number", "minimum": float("nan")},
    ],
)
def test_numbers_that_cannot_be_honoured_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="json_schema cannot be honoured"):
        takes(schema, "0")


# -- patterns and formats -----------------------------------------------------------------------------------------

HEAD = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS: dict[str, tuple[list[str], list[str]]] = {  # what pydantic writes, what fits, what does not
    rf"{HEAD}\d*\.?\d*$": (["0", "-1.25", "+12", ".5", "7.", "007"], ["", "-", ".", "1e5", "a", "1.2.3"]),
    rf"{HEAD}\d*\.?\d{{0,2}}0*$": (["1.25", "-3", ".5", "12."], ["1.253", ".", ""]),
    rf"{HEAD}\d*\.?\d{{0,0}}0*$": (["12", "-3"], ["1.5", ""]),
    rf"{HEAD}(?:\d{{0,4}}|(?=[\d.]{{1,5}}0*$)\d*\.\d*0*$)": (["1234", "1.234", ".123"], ["12345", "12.345"]),
    rf"{HEAD}(?:\d{{0,4}}|(?=[\d.]{{1,7}}0*$)\d{{0,4}}\.\d{{0,2}}0*$)": (["1234.56", "-.5", "9"], ["12345", "1.234"]),
    rf"{HEAD}(?:\d{{0,0}}|(?=[\d.]{{1,7}}0*$)\d{{0,0}}\.\d{{0,6}}0*$)": (["0.123456", ".5"], ["1.5", ".1234567"]),
}  # fmt: skip


@pytest.mark.parametrize("pattern", DECIMALS)
def test_patterns_that_pydantic_writes_for_decimals(pattern: str) -> None:
    right, wrong = DECIMALS[pattern]
    for text in right:
        assert re.search(pattern, text), text  # the list is right itself
        assert takes({"type": "string", "pattern": pattern}, json.dumps(text)), text
        Decimal(text)
    assert not any(takes({"type": "string", "pattern": pattern}, json.dumps(text)) for text in wrong)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]{4,}$", ["aB3d", "99Zz"], ["abcd", "aB3", "ABCD"]),
        (r"^(?=[(]|a[]x)]b).{2,}$", ["a)b", "(x"], ["xx", "b("]),
        (r"^(?=a\))a.*$", ["a)", "a)b"], ["ab"]),
    ],
)
def test_look_ahead_at_the_begin_is_said_in_other_words(pattern: str, right: list[str], wrong: list[str]) -> None:
    for schema in ({"pattern": pattern}, {"pattern": pattern, "maxLength": 9, "allOf": [{"minLength": 1}]}):
        assert all(takes({"type": "string", **schema}, json.dumps(text)) for text in right)
        assert not any(takes({"type": "string", **schema}, json.dumps(text)) for text in wrong)


@pytest.mark.parametrize("pattern", ["(?=x)y", "^(?!x)y$", "^a(?=b)b$", "(?<=a)b", "^(?=a", "^(?=[a)b$"])
def test_other_look_around_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="json_schema cannot be honoured"):
        takes({"type": "string", "pattern": pattern}, '"x"')


def test_formats_are_followed_or_ignored_and_told() -> None:
    decimal = {"type": "string", "format": "decimal"}
    assert takes(decimal, '"-1.25"')
    assert not takes(decimal, '"one"')
    assert takes({"type": "string", "format": "phone number"}, '"anything"')
    assert takes({"type": "integer", "format": "int64"}, "5")
    assert not takes({"type": "string", "format": "date"}, '"anything"')
    schema: dict[str, Any] = {
        "properties": {
            "format": {"type": "string", "format": "phone"},
            "b": {"type": "integer", "format": "int64"},
            "c": {"enum": [{"format": "no format"}]},
            "d": {"anyOf": [{"type": "string", "format": "phone"}, decimal, {"format": "color"}]},
        }
    }
    assert unchecked_formats(schema) == ["phone", "color"]
    assert translated(schema)["properties"]["c"] == {"enum": [{"format": "no format"}]}
    assert schema["properties"]["format"]["format"] == "phone"


@pytest.mark.parametrize(
    ("schema", "space"),
    [
        ({"type": "object", "properties": A}, False),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": ["null", "array"]}]}}}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/l"}}, "$defs": {"l": {"prefixItems": [A]}}}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"enum": ["a", [1, 2]]}, False),
    ],
)
def test_one_space_may_stand_where_lists_may_be_and_no_more(schema: dict[str, Any], space: bool) -> None:
    options = json_options(schema)
    assert (options["whitespace_pattern"] is not None) == space
    listed = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    assert takes(listed, '{ "a": [ 1, 2 ] }')
    assert takes(listed, '{"a":[1,2]}')
    assert not any(takes(listed, text) for text in ('{  "a":[1]}', '{"a":[1 , 2]} ', '{\n"a":[1]}', '{"a":\t[]}'))


# -- bounds of work -----------------------------------------------------------------------------------------------


class Counting(dict[str, Any]):
    """A schema that counts how often it is looked at."""

    looked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counting.looked += 1
        return super().get(key, default)


def chain(length: int) -> dict[str, Any]:
    """References of which each leads to the next, named so that they are met in the worst order; the last one ends."""
    parts = {
        f"d{i:04}": Counting(
            {
                "properties": Counting({"x": Counting({"$ref": f"#/$defs/d{i - 1:04}"})}),
                "required": ["x"],
                "type": "object",
            }
        )
        for i in range(1, length)
    }
    return Counting(
        {
            "$ref": f"#/$defs/d{length - 1:04}",
            "$defs": Counting({**dict(reversed(parts.items())), "d0000": Counting({"type": "string"})}),
        }
    )


def test_the_work_on_references_grows_with_their_number_and_not_faster() -> None:
    looked = []
    for length in (100, 200, 400):
        Counting.looked = 0
        check_schema(chain(length))
        looked.append(Counting.looked)
    assert looked[2] < 2.2 * looked[1] < 2.2 * 2.2 * looked[0]


def test_a_schema_of_a_million_parts_is_refused_before_they_are_looked_at() -> None:
    parts = [{"type": "string"}] * 1_000_000
    with pytest.raises(InvalidRequestError, match="too many parts"):
        check_schema({"anyOf": parts})
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        check_schema(json.loads('{"items":' * 90 + "{}" + "}" * 90))


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#"}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"anyOf": [{"$ref": "#"}]}, False),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"properties": {"a": {"$ref": "#"}}}, True),
        ({"properties": {"a": {"anyOf": [True, {"$ref": "#"}]}}, "required": ["a"]}, True),
        ({"properties": {"a": {"oneOf": [{"$ref": "#"}]}}, "required": ["a", 5, "b"]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, False),
        ({"$ref": "#/$defs/missing"}, True),  # the compiler's to say
    ],
)  # fmt: skip
def test_which_schemas_have_a_finite_value(schema: dict[str, Any], ends: bool) -> None:
    if ends:
        check_schema(schema)
    else:
        with pytest.raises(InvalidRequestError, match="without end"):
            check_schema(schema)
