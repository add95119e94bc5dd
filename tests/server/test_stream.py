"""Streams: their transcripts, and what happens when the client goes away or stops reading."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.runners.fake import FakeRunner
from shoal.runners.plan import StepPlan
from tests.support.live import LETTERS, Live, chat_body, toy

GOLDEN = Path(__file__).parent / "golden"
_VOLATILE = [
    (re.compile(r'"(id|item_id|call_id)":"(chatcmpl|cmpl|resp|msg|fc|call)[-_][0-9a-f]+"'), r'"\1":"\2"'),
    (re.compile(r'"(created|created_at|completed_at)":\d+'), r'"\1":0'),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"const": "sea"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
TRANSCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat_body(max_tokens=3, stream_options={"include_usage": True})),
    "chat_tool": (
        "/v1/chat/completions",
        chat_body(max_tokens=200, tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
    ),
    "completion": (
        "/v1/completions",
        {"prompt": "ab", "max_tokens": 3, "temperature": 0, "logit_bias": LETTERS, "stream_options": None},
    ),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "seed": 5, "top_k": 1}),
    "response_tool": (
        "/v1/responses",
        {
            "input": "Hello",
            "top_k": 1,
            "tools": [{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
            "tool_choice": {"type": "function", "name": "look"},
        },
    ),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_transcript_is_the_golden_one(name: str) -> None:
    path, body = TRANSCRIPTS[name]
    with Live(toy()) as live:  # of its own: what is cached is in the transcript too
        answer = live.post(path, {**body, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = answer.text
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    golden = GOLDEN / f"{name}.txt"
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
        pytest.fail(f"{golden} is new: look at it")
    assert text == golden.read_text()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 3}, {"logprobs": True, "top_logprobs": 1}])
def test_joined_deltas_are_the_whole_answer(live: Live, fields: dict[str, Any]) -> None:
    whole = live.chat(max_tokens=30, logit_bias=None, **fields).json()["choices"]
    streamed = events(live.chat(max_tokens=30, logit_bias=None, stream=True, **fields))
    for choice in whole:
        mine = [c for e in streamed for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if fields.get("logprobs"):
            entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]


SEVERAL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"enum": ["a", "b c", "\u00e9"]}, "maxItems": 4}},
            "required": ["words"],
        },
    },
}


@pytest.mark.parametrize("most", [2000, 60])
@pytest.mark.parametrize("seed", range(4))
def test_streamed_calls_are_the_whole_answers_calls(live: Live, seed: int, most: int) -> None:
    fields: Any = {
        "tools": [TOOL, SEVERAL],
        "tool_choice": "required",
        "temperature": 1,
        "seed": seed,
        "logit_bias": None,
    }
    [choice] = live.chat(max_tokens=most, **fields).json()["choices"]
    calls: list[dict[str, Any]] = []
    content, reason = "", None
    for chunk in events(live.chat(max_tokens=most, stream=True, **fields)):
        [told] = chunk["choices"]
        content += told["delta"].get("content") or ""
        reason = told["finish_reason"] or reason
        for delta in told["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                assert delta["type"] == "function"
                calls.append(delta["function"])
            else:
                assert delta["index"] == len(calls) - 1
                assert set(delta["function"]) == {"arguments"}
                calls[-1]["arguments"] += delta["function"]["arguments"]
    assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
    assert reason == choice["finish_reason"]
    assert content == (choice["message"]["content"] or "")
    if most == 2000:
        assert reason == "tool_calls"
        assert all(json.loads(call["arguments"]) for call in calls)


@pytest.mark.parametrize("most", [2000, 60])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_items_of_a_response_are_the_whole_ones(live: Live, seed: int, most: int) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in (TOOL, SEVERAL)]  # type: ignore[dict-item]
    body = {"input": "x", "tools": tools, "tool_choice": "required", "seed": seed, "max_output_tokens": most}
    whole = live.post("/v1/responses", body).json()
    told = events(live.post("/v1/responses", {**body, "stream": True}))

    def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert plain(told[-1]["response"]["output"]) == plain(whole["output"])
    assert plain([e["item"] for e in told if e["type"] == "response.output_item.done"]) == plain(whole["output"])
    for number, item in enumerate(whole["output"]):
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.delta"
            mine = [e["delta"] for e in told if e["type"] == kind and e["output_index"] == number]
            assert "".join(mine) == item["arguments"]
    assert [e["sequence_number"] for e in told] == list(range(len(told)))


def test_comments_keep_a_silent_stream_alive() -> None:
    gate = threading.Event()

    def fault(plan: StepPlan) -> None:
        gate.wait(60)

    with Live(toy(runner=FakeRunner(fault=fault)), keepalive_s=0.05) as live:
        with live.http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            gate.set()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"


# -- clients that go away ----------------------------------------------------------------------------------------


@contextmanager
def raw_call(live: Live, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a socket of our own, so that we can vanish."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as wire:
        wire.sendall(head.encode() + data)
        yield wire


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, "it did not happen"
        time.sleep(0.002)
    return time.monotonic() - begin


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_client_that_vanishes_while_decoding_frees_its_row_at_once(path: str, stream: bool) -> None:
    bodies = {
        "/v1/chat/completions": chat_body(max_tokens=2000),
        "/v1/completions": {"prompt": "ab", "max_tokens": 2000, "ignore_eos": True},
        "/v1/responses": {"input": "ab", "top_k": 1, "max_output_tokens": 2000},
    }
    with Live(toy(step_s=0.01)) as live:
        if path == "/v1/responses":  # no bias here: keep the toy model from ending by chance
            bodies[path] |= {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}}}
        with raw_call(live, path, {**bodies[path], "stream": stream}):
            wait_for(lambda: live.engine.stats().running == 1)
        wait_for(lambda: live.idle)
        live.wait_idle()
        assert live.engine.stats().finished == 1
        assert 'shoal_generations_total{reason="aborted"} 1.0' in live.http.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_in_the_queue_leaves_the_queue(stream: bool) -> None:
    with Live(toy(step_s=0.01, max_batch=1)) as live:
        with raw_call(live, "/v1/chat/completions", chat_body(max_tokens=3000, stream=True)):
            wait_for(lambda: live.engine.stats().running == 1)
            with raw_call(live, "/v1/chat/completions", chat_body("second", stream=stream)):
                wait_for(lambda: live.engine.stats().waiting == 1)
            wait_for(lambda: live.engine.stats().waiting == 0)
            assert live.engine.stats().running == 1  # the other one was not touched
        live.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_in_prefill_stops_it(stream: bool) -> None:
    engine = toy(step_s=0.05, max_step_tokens=16)
    with Live(engine) as live:
        with raw_call(live, "/v1/chat/completions", chat_body("long " * 400, stream=stream)):
            wait_for(lambda: live.engine.stats().running == 1)
        wait_for(lambda: live.idle)
        assert live.engine.stats().steps < 60  # of the 125 that the prompt would take
        live.wait_idle()


def test_a_client_that_never_reads_is_given_up() -> None:
    with Live(toy(max_batch=4), write_timeout_s=0.5) as live:
        # Many small tokens with all that can be told of them: more than the buffers between us hold.
        fields: Any = {"max_tokens": 3000, "logprobs": True, "top_logprobs": 20, "stream": True, "n": 4}
        with raw_call(live, "/v1/chat/completions", chat_body(**fields)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wait_for(lambda: live.engine.stats().running > 0)
            wait_for(lambda: live.idle, timeout_s=60)
            assert live.chat("a neighbour").status_code == 200
        live.wait_idle()


def test_a_body_that_never_comes_is_408() -> None:
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with Live(toy(), body_timeout_s=0.2) as live, socket.create_connection(("127.0.0.1", live.port), 10) as wire:
        wire.sendall(begin)
        assert wire.recv(4096).startswith(b"HTTP/1.1 408")


_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A"
_PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(("before", "sent"), [(b"", b""), (b"", _HEAD), (_PROBE, _HEAD)])
def test_a_head_that_never_comes_ends_the_connection(before: bytes, sent: bytes) -> None:
    with Live(toy(), body_timeout_s=0.3) as live, socket.create_connection(("127.0.0.1", live.port), 10) as wire:
        wire.sendall(before)
        answer = b""
        while before and not answer.endswith(b"}"):
            answer += wire.recv(4096)
        wire.sendall(sent)
        begin = time.monotonic()
        assert wire.recv(4096) == b""
        assert time.monotonic() - begin < 20


def test_more_connections_than_allowed_are_hung_up_on() -> None:
    with Live(toy(), max_connections=2) as live:
        here = ("127.0.0.1", live.port)
        with socket.create_connection(here, 10) as first, socket.create_connection(here, 10) as second:
            wait_for(lambda: len(live.server.server_state.connections) == 2)
            # Some systems tell of the end as a reset.
            with socket.create_connection(here, 10) as third, suppress(ConnectionResetError):
                assert third.recv(10) == b""
            for wire in (first, second):
                wire.sendall(_PROBE)
                assert wire.recv(4096).startswith(b"HTTP/1.1 200")
        wait_for(lambda: not live.server.server_state.connections)
        assert live.chat().status_code == 200


def test_a_run_that_nobody_reads_is_not_streamed_for_ever() -> None:
    with Live(toy(), write_timeout_s=0.3) as live:
        order = {"question": "Why? " * 3000, "agents": [{"name": "One", "task": "Say one."}], "max_tokens": 4}
        run = live.post("/swarmbench/runs", order).json()["id"]
        path = f"/swarmbench/runs/{run}/events"
        live.http.get(path, headers={"Connection": "close"})
        with socket.create_connection(("127.0.0.1", live.port), 10) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wait_for(lambda: len(live.server.server_state.connections) == 1)
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            wire.sendall(head * 4000)  # the same again and again, and not one answer read
            wait_for(lambda: not live.server.server_state.connections)
        assert live.http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/page/main.js"])
def test_a_small_answer_that_nobody_reads_does_not_hold_its_socket(path: str) -> None:
    with Live(toy(), write_timeout_s=0.2) as live:
        # Buffers of the system so small that part of an answer stays in the server, which alone can give it up.
        live._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            wire.connect(("127.0.0.1", live.port))
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            wire.sendall(head * 20)
            wait_for(lambda: len(live.server.server_state.connections) == 1)
            wait_for(lambda: not live.server.server_state.connections)
        assert live.http.get(path).status_code in (200, 404)
        live.wait_idle()


def test_a_long_call_outlives_the_limit_on_heads() -> None:
    with Live(toy(step_s=0.02), body_timeout_s=0.1) as live:
        assert live.chat(max_tokens=40).json()["usage"]["completion_tokens"] == 40
        assert live.chat(max_tokens=4).status_code == 200  # the same connection
