"""Endpoints and fields, on the toy model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepPlan
from shoal.sampling.grammar import GrammarCompiler
from shoal.types import SamplingParams
from tests.support.brake import Brake
from tests.support.live import LETTERS, Live, chat_body, error_of, toy


def test_a_chat_is_answered_in_the_documented_shape(live: Live) -> None:
    answer = live.chat()
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "toy"
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 8
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8


def test_the_same_prompt_again_is_reported_as_cached(live: Live) -> None:
    text = "a prompt that is longer than one block of the cache by a few letters"
    first = live.chat(text).json()["usage"]
    second = live.chat(text).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] <= 1  # the turn mark that every chat begins with
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


def test_a_cache_key_keeps_prefixes_apart(live: Live) -> None:
    text = "another prompt that is longer than one block of the cache by a few letters"
    assert live.chat(text, prompt_cache_key="a").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert live.chat(text, prompt_cache_key="b").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert live.chat(text, prompt_cache_key="a").json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_private_agent_shares_with_itself_alone_and_a_new_version_starts_anew(live: Live) -> None:
    text = "one more prompt that is longer than one block of the cache by a few letters"

    def cached(**fields: Any) -> int:
        usage = live.chat(text, task_id="t", **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(agent_id="a") <= 1  # the turn mark that every chat begins with
    assert cached(agent_id="b") > 1, "names alone keep nothing apart"
    for agent in ("a", "b"):
        assert cached(agent_id=agent, private=True) == 0
        assert cached(agent_id=agent, private=True) > 1
    assert cached(agent_id="a", private=True, agent_version=1) == 0
    assert cached(agent_id="a", private=True, agent_version=1) > 1
    assert cached(agent_id="a", private=True) == 0, "an older version neither finds nor leaves a prefix"
    for wrong in ({"private": True}, {"agent_version": 3}):
        refused = live.chat(text, **wrong)
        assert (refused.status_code, error_of(refused)["param"]) == (400, next(iter(wrong)))


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_roles_and_content_as_parts(live: Live, role: str) -> None:
    messages = [{"role": role, "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status_code == 200


def test_a_conversation_with_tools_and_null_content(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status_code == 200


def test_several_choices_have_seeds_of_their_own_and_the_first_is_the_callers(live: Live) -> None:
    one = live.chat(temperature=1, seed=7).json()["choices"]
    three = live.chat(temperature=1, seed=7, n=3).json()["choices"]
    assert [c["index"] for c in three] == [0, 1, 2]
    assert three[0]["message"]["content"] == one[0]["message"]["content"]
    assert len({c["message"]["content"] for c in three}) == 3


def test_stop_strings_end_the_answer(live: Live) -> None:
    text = live.chat().json()["choices"][0]["message"]["content"]
    for stop in (text[3:5], [text[3:5], "never"]):
        [choice] = live.chat(stop=stop).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(text[3:5])]


def test_logprobs_tell_of_every_token(live: Live) -> None:
    [choice] = live.chat(logprobs=True, top_logprobs=2).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] <= 0 and e["bytes"] for e in entries)
    assert live.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logit_bias_and_penalties_are_obeyed(live: Live) -> None:
    only = {str(ord("x")): 100}
    assert live.chat(logit_bias=only).json()["choices"][0]["message"]["content"] == "xxxxxxxx"
    text = live.chat(presence_penalty=2, frequency_penalty=2, max_tokens=20).json()["choices"][0]["message"]["content"]
    assert len(set(text)) == 20


def test_max_completion_tokens_comes_before_max_tokens(live: Live) -> None:
    body = live.chat(max_tokens=8, max_completion_tokens=3).json()
    assert body["usage"]["completion_tokens"] == 3


def test_harmless_fields_are_accepted(live: Live) -> None:
    fields: Any = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "priority": "high"}
    more: Any = {"timeout": 30, "parallel_tool_calls": True, "modalities": ["text"], "safety_identifier": "s"}
    assert live.chat(**fields, **more, stream_options=None, response_format={"type": "text"}).status_code == 200


def test_completions_take_texts_and_tokens_and_echo(live: Live) -> None:
    fields = {"max_tokens": 4, "temperature": 0, "logit_bias": LETTERS}
    body = live.post("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, **fields}).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert body["usage"]["prompt_tokens"] == 4
    assert live.post("/v1/completions", {"prompt": [97, 98], **fields}).json()["choices"][0]["text"] == texts[0]
    echoed = live.post("/v1/completions", {"prompt": [[97, 98]], "echo": True, **fields}).json()
    assert echoed["choices"][0]["text"] == "ab" + texts[0]
    probs = live.post("/v1/completions", {"prompt": "ab", "logprobs": 3, **fields}).json()["choices"][0]["logprobs"]
    assert probs["tokens"] == list(texts[0])
    assert probs["text_offset"] == [0, 1, 2, 3]
    assert all(len(top) == 3 for top in probs["top_logprobs"])


def streamed(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = live.post(path, {**body, "stream": True}).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("echo", [None, False])
@pytest.mark.parametrize("stop", [None, ["éz", "bé"], "zzzz"])
def test_offsets_are_of_the_whole_text_however_it_is_cut(live: Live, stop: Any, echo: bool | None) -> None:
    # "aé😀" again and again: characters of one, two and four tokens, some of them held back for a stop string.
    text = "aé😀"
    fields: Any = {"max_tokens": 14, "temperature": 0, "logprobs": 0, "stop": stop, "echo": echo}
    fields["structured_outputs"] = {"grammar": f'start: "{text * 2}"'}
    whole = live.post("/v1/completions", {"prompt": "x", **fields}).json()["choices"][0]
    assert whole["text"] == text * 2
    assert whole["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5]
    pieces = [
        chunk["choices"][0]["logprobs"]["text_offset"]
        for chunk in streamed(live, "/v1/completions", {"prompt": "x", **fields})
    ]
    assert [at for piece in pieces for at in piece] == whole["logprobs"]["text_offset"]


def test_offsets_count_text_that_is_held_back(live: Live) -> None:
    fields: Any = {"max_tokens": 6, "temperature": 0, "logprobs": 0, "logit_bias": {str(ord("a")): 100}, "stop": "aaab"}
    chunks = [chunk["choices"][0] for chunk in streamed(live, "/v1/completions", {"prompt": "x", **fields})]
    assert chunks[0]["text"] == ""  # held back
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == list(range(6))


def test_token_ids_come_when_asked_for(live: Live) -> None:
    [choice] = live.chat(return_token_ids=True).json()["choices"]
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]


def test_models_health_stats_metrics_tokenize(live: Live) -> None:
    [model, *_] = live.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["loaded"]) == ("toy", "model", True)
    assert live.http.get("/v1/models/toy").json()["id"] == "toy"
    assert live.http.get("/health").json()["status"] == "ok"
    assert live.http.get("/stats").json()["engine"]["running"] == 0
    page = live.http.get("/metrics").text
    assert "shoal_up 1.0" in page
    assert 'shoal_http_requests_total{path="/v1/chat/completions"' in page
    assert live.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}).json()
    assert chat["tokens"] == [257, 97, 98, 258]


def test_request_ids_are_returned(live: Live) -> None:
    assert live.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert live.http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")


# -- bad input ---------------------------------------------------------------------------------------------------

_MESSAGE = {"role": "user", "content": "hi"}
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [{"type": "browser"}]}, "tools.0"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"priority": "urgent"}, "priority"),
    ({"timeout": 0}, "timeout"),
    ({"audio": {}}, "audio"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:40])
def test_a_field_that_cannot_be_honoured_is_named(live: Live, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", {"messages": [_MESSAGE], **fields})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error


BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_body"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_body"),
    (b'"x"', 400, "invalid_body"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, ""),
    (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_value"),
    (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nesting_too_deep"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json"),
    (b'{"x": "' + b"a" * (9 * 2**20) + b'"}', 413, "body_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=lambda value: repr(value)[:30])
def test_a_body_that_cannot_be_read_is_refused(live: Live, body: bytes, status: int, code: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answer = live.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status
        assert error_of(answer)["code"].startswith(code)


def test_brackets_in_strings_are_not_nesting(live: Live) -> None:
    assert live.chat("[{" * 300).status_code == 200


def test_a_megabyte_of_one_character_is_too_long(live: Live) -> None:
    answer = live.chat("a" * 2**20)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert error_of(answer)["param"] == "messages"


def test_unknown_models_routes_and_methods(live: Live) -> None:
    answer = live.chat(model="gpt-9")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"
    assert error_of(live.http.get("/v1/models/gpt-9"))["code"] == "model_not_found"
    assert error_of(live.http.get("/nowhere"))["code"] == "not_found"
    assert live.http.get("/v1/chat/completions").status_code == 405
    for path, word in (("/v1/embeddings", "embeddings"), ("/v1/responses/compact", "compacts")):
        missing = live.post(path, {"input": "x"})
        assert missing.status_code == 404
        assert word in error_of(missing)["message"]


BAD_STRUCTURE: list[dict[str, Any]] = [
    {"not": {}},
    {"type": "integer", "minimum": 3, "maximum": 1},
    {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
    {"type": "string", "pattern": "(?=x)y"},
    {"$ref": "#/$defs/none"},
]


@pytest.mark.parametrize("schema", BAD_STRUCTURE, ids=lambda value: json.dumps(value)[:40])
def test_a_schema_that_cannot_be_honoured_is_refused(live: Live, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = live.post("/v1/chat/completions", {"messages": [_MESSAGE], "response_format": form})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "response_format"


@pytest.mark.parametrize("schema", BAD_STRUCTURE, ids=lambda value: json.dumps(value)[:40])
def test_a_tool_whose_parameters_cannot_be_honoured_is_named(live: Live, schema: dict[str, Any]) -> None:
    good = {"name": "good", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    bad = {"name": "bad", "parameters": schema}
    tools = [{"type": "function", "function": function} for function in (good, bad)]
    answer = live.post("/v1/chat/completions", {"messages": [_MESSAGE], "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tools.1.function.parameters"
    flat = [{"type": "function", **function} for function in (good, bad)]
    answer = live.post("/v1/responses", {"input": "hi", "tools": flat, "tool_choice": "required"})
    assert error_of(answer)["param"] == "tools.1.parameters"


def held(
    path: str, schema: dict[str, Any] | None = None, regex: str | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Bodies that hold an answer to a schema (or a regular expression in one), and the field that does."""
    schema = schema or {"type": "object", "properties": {"a": {"type": "string", "pattern": regex}}, "required": ["a"]}
    function = {"name": "f", "parameters": schema}
    fields: dict[str, Any] = {"max_tokens": 400, "temperature": 1, "seed": 1}
    if path == "/v1/responses":
        fields = {"input": "hi", "max_output_tokens": 400, "temperature": 1, "seed": 1}
        form = {"type": "json_schema", "name": "x", "schema": schema}
        yield {**fields, "text": {"format": form}}, "text.format"
        yield {**fields, "tools": [{"type": "function", **function}], "tool_choice": "required"}, "tools"
        return
    fields |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [_MESSAGE]}
    if path == "/v1/messages":
        yield {**fields, "output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config"
        tool = {"name": "f", "input_schema": schema, "strict": True}
        yield {**fields, "tools": [tool], "tool_choice": {"type": "any"}}, "tools"
        yield {**fields, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}, "tools"
        return
    yield {**fields, "structured_outputs": {"json": schema}}, "structured_outputs"
    if regex is not None:
        yield {**fields, "structured_outputs": {"regex": regex}}, "structured_outputs"
    if path == "/v1/chat/completions":
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield {**fields, "response_format": form}, "response_format"
        tools = [{"type": "function", "function": {**function, "strict": True}}]
        yield {**fields, "tools": tools, "tool_choice": "required"}, "tools"
        yield {**fields, "tools": tools}, "tools"


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
USUAL: list[dict[str, Any]] = [  # what libraries emit
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "undeclared"]},
    {"type": "object", "properties": {"id": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}},
    {"type": "object", "properties": {"price": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}}},
    {"type": "object", "properties": {"price": {"type": "string", "format": "decimal", "maxLength": 9}}},
    {"type": "object", "properties": {"call": {"type": "string", "format": "phone", "maxLength": 9}}},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("schema", USUAL, ids=lambda value: json.dumps(value)[32:60])
def test_schemas_that_libraries_emit_are_honoured_everywhere(live: Live, path: str, schema: dict[str, Any]) -> None:
    for body, _ in held(path, schema):
        answer = live.post(path, body)
        assert answer.status_code == 200, (answer.text, body)
        told = answer.headers.get("x-shoal-note")
        assert told == ("format not checked: 'phone'" if "phone" in str(schema) else None)
        streamed = live.post(path, {**body, "stream": True})
        assert streamed.headers.get("x-shoal-note") == told


@pytest.mark.parametrize("path", PATHS)
def test_what_is_too_large_for_the_compiler_is_a_400_everywhere(live: Live, path: str) -> None:
    for body, param in held(path, regex="^(a?){300}a{9999}$"):
        if "tool_choice" not in body and "tools" in body:
            continue  # no call may come
        answer = live.post(path, body)
        assert answer.status_code == 400, (answer.text, body)
        error = answer.json()["error"]
        assert (error.get("param") or error["message"]).startswith(param)  # Anthropic's shape has the message alone
        assert "a{9999}" in error["message"]
        [last] = [line for line in live.post(path, {**body, "stream": True}).text.split("\n") if '"error"' in line][-1:]
        assert "a{9999}" in last


def test_of_many_tools_the_one_at_fault_is_found_with_few_grammars(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[SamplingParams] = []
    compile_ = GrammarCompiler.compile

    def counting(self: GrammarCompiler, sampling: SamplingParams) -> Any:
        compiled.append(sampling)
        return compile_(self, sampling)

    monkeypatch.setattr(GrammarCompiler, "compile", counting)
    good = {"type": "object", "properties": {"a": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"type": "string"}}}
    for at in (0, 77, 127):
        compiled.clear()
        bad = {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}},
            "required": ["a"],
        }
        functions = [{"name": f"f{i}", "parameters": bad if i == at else good} for i in range(128)]
        tools = [{"type": "function", "function": function} for function in functions]
        answer = live.post(PATHS[0], {"messages": [_MESSAGE], "tools": tools, "tool_choice": "required"})
        assert error_of(answer)["param"] == f"tools.{at}.function.parameters"
        assert len(compiled) <= 10


def test_catastrophic_expressions_do_no_harm(live: Live) -> None:
    for regex in ("(a+)+b", "(a|a)*c", "((a{1,100}){1,100}){1,100}"):
        fields: Any = {"structured_outputs": {"regex": regex}, "max_tokens": 20, "logit_bias": None}
        assert live.chat(**fields).status_code == 200
    answer = live.chat(structured_outputs={"regex": "(" * 50})
    assert error_of(answer)["param"] == "structured_outputs"


# -- the states of a server --------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_health_is_open() -> None:
    with Live(toy(), api_key="secret") as live:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = live.post("/v1/chat/completions", chat_body(), headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
        assert live.post("/v1/chat/completions", chat_body(), headers={"Authorization": "Bearer secret"}).is_success
        assert live.http.get("/health").is_success
        assert live.http.get("/v1/models").status_code == 401


def test_no_cors_unless_asked() -> None:
    origin = {"Origin": "http://here.test"}
    with Live(toy()) as live:
        assert "access-control-allow-origin" not in live.http.get("/health", headers=origin).headers
    with Live(toy(), cors_origins=("http://here.test",)) as live:
        assert live.http.get("/health", headers=origin).headers["access-control-allow-origin"] == "http://here.test"


def test_a_full_queue_is_429_with_retry_after() -> None:
    brake = Brake()
    engine = brake.fitted(toy(max_batch=1, max_queue=1))
    with Live(engine) as live, httpx.Client(base_url=live.url, timeout=60) as other:
        brake.set(after=4)
        with other.stream("POST", "/v1/chat/completions", json=chat_body(n=2, max_tokens=200, stream=True)) as held:
            next(held.iter_lines())
            end = time.monotonic() + 60
            while len(engine._admission) < 2:  # both choices, or the call would take the second one's place
                assert time.monotonic() < end
                time.sleep(0.01)
            answer = live.chat()
            brake.release()
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert error_of(answer)["type"] == "rate_limit_error"
        live.wait_idle()


def test_a_deadline_that_passes_is_504() -> None:
    with Live(toy(step_s=0.02)) as live:
        answer = live.chat(max_tokens=500, timeout=0.2)
        assert answer.status_code == 504
        assert error_of(answer)["param"] == "timeout"
        streamed = live.chat(max_tokens=500, timeout=0.2, stream=True)
        last = [line for line in streamed.text.splitlines() if line.startswith("data:")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_a_failed_pass_is_500_and_a_dead_engine_503() -> None:
    failing = False

    def fault(plan: StepPlan) -> None:
        if failing:
            raise OSError("the device is gone")

    with Live(toy(runner=FakeRunner(fault=fault))) as live:
        whole = {"prompt": "Hello", "max_tokens": 4}  # a chat has its next turn prepared, a pass more
        assert live.post("/v1/completions", whole).status_code == 200
        failing = True
        for _ in range(3):
            answer = live.chat()
            assert answer.status_code == 500
            assert "the device is gone" in error_of(answer)["message"]
        assert live.http.get("/health").status_code == 503
        answer = live.chat()
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        failing = False
        assert live.post("/models/load", {"model": "toy"}).status_code == 200
        assert live.chat().status_code == 200


def test_one_bad_request_harms_nobody(live: Live) -> None:
    good = live.chat("the neighbour").json()["choices"][0]["message"]["content"]
    for fields, _ in BAD_FIELDS[:12]:
        live.post("/v1/chat/completions", {"messages": [_MESSAGE], **fields})
    assert live.chat("the neighbour").json()["choices"][0]["message"]["content"] == good
    live.wait_idle()


LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in LENGTHS.items() for field in fields])
def test_more_tokens_than_fit_are_cut_to_what_fits_in_every_api(path: str, field: str) -> None:
    text = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": [_MESSAGE]})
    with Live(toy(kv_memory=2**16, max_batch=2)) as live:
        answer = live.post(path, {**text, field: 10**6})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        ended = {"length", "incomplete", "max_tokens", "stop", "completed", "end_turn"}
        assert (told.get("stop_reason") or told.get("status") or told["choices"][0]["finish_reason"]) in ended
        refused = live.post(path, {**text, field: 0})
        assert refused.status_code == 400
        assert field in refused.json()["error"]["message"]
        live.wait_idle()


def test_a_prompt_far_too_long_is_refused_before_it_is_tokenised_in_every_api(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[int] = []
    encode = ByteTokenizer.encode

    def heard(self: ByteTokenizer, text: str, **settings: Any) -> list[int]:
        longest.append(len(text))
        return encode(self, text, **settings)

    monkeypatch.setattr(ByteTokenizer, "encode", heard)
    long = "word " * 400_000
    said = {"role": "user", "content": long}
    result = {"type": "function_call_output", "call_id": "c", "output": long}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [said]}),
        ("/v1/chat/completions", {"messages": [{**said, "content": [{"type": "text", "text": long}]}]}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": ["x", long]}),
        ("/v1/responses", {"input": long}),
        ("/v1/responses", {"input": "x", "instructions": long}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f"}, result]}),
        ("/v1/messages", {"messages": [said], "max_tokens": 1}),
        ("/v1/messages", {"messages": [_MESSAGE], "system": long, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [said]}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [said]}),
    ]
    for path, body in bodies:
        answer = live.post(path, body)
        assert answer.status_code == 400, (path, list(body), answer.text[:200])
        assert "tokens" in answer.json()["error"]["message"]
    assert max(longest, default=0) < len(long)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("path", PATHS)
def test_a_number_that_json_does_not_have_is_a_400_wherever_callers_put_their_own(
    live: Live, path: str, number: str
) -> None:
    for body, param in held(path, {"type": "object", "properties": {"a": {"default": "HERE"}}}):
        text = json.dumps(body).replace('"HERE"', number)
        answer = live.http.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert param in (error.get("param") or error["message"])
        assert "no number" in error["message"]
