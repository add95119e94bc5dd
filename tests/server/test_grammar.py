"""Structured output in the engine: what comes out, beside whom, and what is refused."""

from __future__ import annotations

import ctypes
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import Want
from shoal.sampling.grammar import MAX_TEXT, Constraint, GrammarCompiler, _mask_of
from shoal.types import FinishReason, Request, SamplingParams
from tests.server.schemas import random_schema
from tests.support.live import Live, toy

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def request(seed: int = 0, **fields: Any) -> Request:
    given = {"max_tokens": 400, "temperature": 1.0, "seed": seed, **fields}
    return Request(prompt=f"number {seed}", sampling=SamplingParams(**given))


def texts(engine: Engine, requests: list[Request]) -> list[str]:
    results = engine.run(requests).results
    assert [r.finish_reason for r in results if r.error is not None] == []
    return [r.text for r in results]


def white_runs(text: str) -> list[int]:
    """How long each run of white space outside strings is."""
    return [len(run) for run in re.findall(r"\s+", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))]


def test_json_follows_its_schema_and_its_white_space_is_bounded() -> None:
    with toy() as engine:
        for text in texts(engine, [request(seed, json_schema=PERSON) for seed in range(12)]):
            document = json.loads(text)
            jsonschema.validate(document, PERSON)
            assert text[0] + text[-1] == "{}"
            assert max(white_runs(text), default=0) <= 1


def test_expressions_and_grammars() -> None:
    with toy() as engine:
        requests = [request(seed, regex="[0-9]{3}-[a-f]{2,4}") for seed in range(5)]
        for text in texts(engine, requests):
            assert len(text.split("-")[0]) == 3
        requests = [request(seed, grammar='start: "yes" | "no" ", " /[a-z]{3}/') for seed in range(5)]
        for text in texts(engine, requests):
            assert text == "yes" or text.startswith("no, ")


def test_a_plain_row_beside_a_constrained_one_writes_what_it_writes_alone() -> None:
    with toy() as engine:
        plain = [request(1, max_tokens=60), Request(prompt="greedy", sampling=SamplingParams(max_tokens=60))]
        alone = texts(engine, plain)
        mixed = texts(engine, [*plain, *(request(seed, json_schema=PERSON) for seed in range(4))])
        assert mixed[:2] == alone
        assert texts(engine, plain) == alone


def test_a_constrained_row_writes_the_same_whoever_is_beside_it() -> None:
    with toy() as engine:
        requests = [request(seed, json_schema=PERSON) for seed in range(6)]
        together = texts(engine, requests)
        assert [texts(engine, [one])[0] for one in requests] == together


def test_forced_tokens_take_no_pass_of_their_own() -> None:
    runner = FakeRunner(keep_plans=True)
    with toy(runner=runner) as engine:
        [text] = texts(engine, [request(regex="Hello, world! [0-9]")])
        assert text.startswith("Hello, world! ")
        assert runner.plans is not None
        wanted = [plan for plan in runner.plans if any(s.want is Want.LOGITS for s in plan.sequences)]
        assert len(wanted) == 2  # the first letter is chosen among one, the digit among ten; the end is forced


def test_forced_tokens_count_as_output_in_the_records_of_steps() -> None:
    with toy() as engine:
        report = engine.run([request(1, regex="[a-z]{3}forced by the grammar[a-z]{3}"), request(2, max_tokens=9)])
        fed = sum(result.prompt_tokens for result in report.results)
        assert sum(step.prefill_tokens for step in report.steps) == fed
        # The last token of an output is never fed.
        assert sum(step.decode_tokens for step in report.steps) == report.output_tokens - len(report.results)


def test_forced_tokens_are_computed_as_any_others() -> None:
    """What follows a forced part depends on its KV: with one pass per token the same comes out."""
    with toy() as engine:
        pattern = "[a-z]{4}forced by the grammar[a-z]{30}"
        quick = engine.run([request(3, regex=pattern)]).results[0]
        slow = engine.run([request(3, regex=pattern, logprobs=0)]).results[0]
        assert quick.text == slow.text
        assert len(slow.logprobs) == len(slow.tokens)


def test_penalties_count_forced_tokens() -> None:
    with toy() as engine:
        fields = {"regex": "aaaa[a-c]{8}", "frequency_penalty": 2.0, "temperature": 0.0}
        quick = engine.run([request(3, **fields)]).results[0]
        slow = engine.run([request(3, logprobs=0, **fields)]).results[0]
        assert quick.text == slow.text
        assert quick.text.count("a", 4) <= 3


def test_a_fork_and_a_preemption_go_on_in_the_grammar() -> None:
    runner = FakeRunner(step_s=0.1)  # slow until the fork, so that the parent has not ended
    with toy(runner=runner) as engine:
        handle = engine.submit(request(2, json_schema=PERSON))
        next(iter(handle))
        children = handle.fork(2)
        runner.step_s = 0.005
        engine.suspend(drop_kv=True)
        engine.resume()
        for one in (handle, *children):
            jsonschema.validate(json.loads(one.result(30).text), PERSON)


def test_a_limit_may_cut_the_output_short() -> None:
    with toy() as engine:
        result = engine.run([request(json_schema=PERSON, max_tokens=5)]).results[0]
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.tokens) == 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
    ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema"),
    ({"json_schema": {"enum": []}}, "json_schema"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "json_schema"),
    ({"json_schema": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}, "json_schema"),
    ({"json_schema": {"anyOf": [{"$ref": "#"}]}}, "json_schema"),
    ({"json_schema": {"enum": list(range(20_000))}}, "json_schema"),
    ({"regex": "("}, "regex"),
    ({"regex": "[^\\s\\S]"}, "regex"),
    ({"regex": "a" * 300_000}, "regex"),
    ({"grammar": "start: nothing"}, "grammar"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_honoured_is_refused_before_generation(fields: dict[str, Any], param: str) -> None:
    with toy() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(request(**fields))
        assert caught.value.param == param
        assert engine.stats().steps == 0


def test_recursion_that_can_end_is_honoured() -> None:
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}},
        "required": ["kids"],
        "additionalProperties": False,
    }
    with toy() as engine:
        result = engine.run([request(json_schema=tree, max_tokens=3000)]).results[0]
        if result.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(result.text), tree)


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}, {"regex": "a"}])
def test_contradictions_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams(**{"json_schema": PERSON, **fields})


def test_a_grammar_that_gives_up_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = FakeRunner().spec.vocab_size
    fill = Constraint.fill

    def broken(self: Constraint) -> None:
        fill(self)
        probe = np.zeros(vocab_size, np.float32)
        self.mask(probe)
        if self.error is None and probe[ord("!")] == 0:
            self.error = "too complex"
            self._mask = _mask_of(np.zeros(-(-vocab_size // 8), np.uint8), vocab_size)

    monkeypatch.setattr(Constraint, "fill", broken)
    with toy() as engine:
        bad, good = engine.run([request(regex="[!-~]{5}"), request(regex="[a-z]{5}")]).results
        assert isinstance(bad.error, InvalidRequestError)
        assert bad.error.param == "regex"
        assert "too complex" in str(bad.error)
        assert good.finish_reason is FinishReason.STOP


def test_white_space_options_inside_a_schema_change_nothing() -> None:
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": True, "key_separator": " = ", "item_separator": ";"}}
    with toy() as engine:
        for text in texts(engine, [request(seed, json_schema=schema) for seed in range(4)]):
            jsonschema.validate(json.loads(text), PERSON)


def test_random_schemas_on_the_toy_model() -> None:
    """The small form of `scripts/schema_sweep.py`."""
    rng = random.Random(4)
    schemas = [random_schema(rng) for _ in range(60)]
    with toy(runner=FakeRunner(num_blocks=2048)) as engine:
        report = engine.run([request(seed, json_schema=schema) for seed, schema in enumerate(schemas)])
    finished = 0
    for schema, result in zip(schemas, report.results, strict=True):
        assert result.error is None, (schema, result.error)
        if result.finish_reason is FinishReason.STOP:
            finished += 1
            jsonschema.validate(json.loads(result.text), schema)
    assert finished > 40


def test_the_real_model_fills_a_schema(real: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    fields = {"response_format": form, "max_tokens": 120, "logit_bias": None}
    answers = real.chat("Describe a sailor named Ann, 30 years old.", **fields).json()["choices"]
    jsonschema.validate(json.loads(answers[0]["message"]["content"]), PERSON)
    anything = real.chat("Give me JSON.", response_format={"type": "json_object"}, logit_bias=None, max_tokens=120)
    [choice] = anything.json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    assert max(white_runs(text), default=0) <= 1
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("size", [7, 259, 49_152, 50_001])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.5, 0.9995, 1.0])
def test_every_form_of_a_mask_forbids_the_same(size: int, share: float) -> None:
    class Matcher:
        def unsafe_compute_mask_ptr(self, place: int, count: int) -> None:
            ctypes.memmove(place, packed.ctypes.data, count)

        def is_error(self) -> bool:
            return False

    rng = np.random.default_rng(size)
    allowed = rng.random(-(-size // 32) * 32) < share  # bits beyond the vocabulary may be set
    packed = np.packbits(allowed, bitorder="little")
    constraint = Constraint(Matcher(), 0, size)  # type: ignore[arg-type]
    logits = rng.standard_normal(size, np.float32)
    for _ in range(2):
        constraint.fill()
        z = logits.copy()
        constraint.mask(z)
        assert (z == np.where(allowed[:size], logits, -np.inf)).all()


TOO_LARGE: dict[str, dict[str, Any]] = {
    "a{99999999}": {"regex": "x*a{99999999}"},
    "{300}": {"regex": "b{1,20}(a?){300}a{300}"},
    "b{100000}": {"regex": "(a{2,}){2,}b{100000}"},
    "{1000}": {"grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'},
    "make it smaller": {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(20_000))},
}


@pytest.mark.parametrize("part", TOO_LARGE)
def test_what_is_too_large_for_the_compiler_is_the_callers_fault_and_the_part_is_named(part: str) -> None:
    [kind] = TOO_LARGE[part]
    with toy() as engine:
        result = engine.run([request(**TOO_LARGE[part])]).results[0]
    assert isinstance(result.error, InvalidRequestError)
    assert result.error.param == kind
    assert part in str(result.error)


def test_compiled_grammars_are_kept_up_to_a_size_as_well_as_a_count() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 259)
    large = [" | ".join(f'"{number}{word * 100}"' for number in range(300)) for word in "abcdefghijklmn"]
    for text in large:
        compiler.compile(SamplingParams(grammar=f"start: {text}"))
    kept = [len(key) for key in compiler._compiled]
    assert sum(kept) <= 2 * MAX_TEXT
    assert 1 < len(kept) < len(large)
    again = SamplingParams(grammar=f"start: {large[-1]}")
    assert compiler.compile(again) is compiler.compile(again)
