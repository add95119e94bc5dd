"""Switching models while calls are in flight, and stopping: everybody finishes or is told."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from shoal.engine.engine import Engine
from shoal.errors import ModelNotFoundError
from tests.server.conftest import MODEL
from tests.server.test_stream import events, raw_call, wait_for
from tests.support.live import Live, chat_body, error_of, toy


def load(name: str) -> Engine:
    if name == "missing":
        raise ModelNotFoundError(f"there is no model {name!r}", value=name)
    return toy(step_s=0.005)


def in_background(live: Live, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """A call on a thread of its own; its answer will be in the list."""
    answers: list[httpx.Response] = []

    def work() -> None:
        with httpx.Client(base_url=live.url, timeout=60) as http:
            answers.append(http.post("/v1/chat/completions", json=body))

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: live.engine.stats().running > 0)
    return thread, answers


def test_calls_in_flight_finish_before_the_switch() -> None:
    with Live(load("a"), load, name="a") as live:
        thread, answers = in_background(live, chat_body(max_tokens=60))
        loaded = live.post("/models/load", {"model": "b"})
        assert loaded.json()["id"] == "b"
        thread.join(60)
        assert answers[0].status_code == 200
        assert answers[0].json()["model"] == "a"
        assert live.chat(model="b").status_code == 200
        assert error_of(live.chat(model="a"))["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [True, False])
def test_calls_that_take_too_long_are_told(stream: bool) -> None:
    with Live(load("a"), load, name="a") as live:
        thread, answers = in_background(live, chat_body(max_tokens=3000, stream=stream))
        assert live.post("/models/load", {"model": "b", "drain_s": 0.05}).is_success
        thread.join(60)
        [answer] = answers
        error = events(answer)[-1]["error"] if stream else error_of(answer)
        assert answer.status_code == (200 if stream else 503)
        assert error["code"] == "engine_unavailable"
        assert live.chat().status_code == 200


def test_new_calls_during_a_switch_are_told_to_come_back() -> None:
    gate = threading.Event()

    def slow(name: str) -> Engine:
        gate.wait(60)
        return toy()

    with Live(toy(), slow, name="a") as live:
        switch = threading.Thread(target=lambda: httpx.post(f"{live.url}/models/load", json={"model": "b"}))
        switch.start()
        wait_for(lambda: live.http.get("/health").status_code == 503)
        answer = live.chat()
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert live.post("/models/load", {"model": "c"}).status_code == 409
        gate.set()
        switch.join(60)
        assert live.chat(model="b").is_success


def test_a_model_that_cannot_be_loaded_leaves_the_old_one() -> None:
    with Live(load("a"), load, name="a") as live:
        answer = live.post("/models/load", {"model": "missing"})
        assert answer.status_code == 404
        assert error_of(answer)["param"] == "model"
        assert live.chat(model="a").is_success


def test_a_name_that_may_not_be_loaded_disturbs_nobody() -> None:
    def check(name: str) -> None:
        raise ModelNotFoundError(f"{name} is not in the store", value=name)

    with Live(load("a"), load, name="a") as live:
        live.hub._check = check
        thread, answers = in_background(live, chat_body(max_tokens=100))
        for name in ("b", "../../etc/passwd"):
            assert live.post("/models/load", {"model": name, "drain_s": 0}).status_code == 404
        thread.join(60)
        assert answers[0].status_code == 200


@pytest.mark.parametrize("kinds", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM")])
def test_a_second_signal_does_not_wait(kinds: tuple[str, str]) -> None:
    live = Live(load("a"), load, name="a", drain_s=30)
    thread, answers = in_background(live, chat_body(max_tokens=3900, stream=True))
    live.server.handle_exit(getattr(signal, kinds[0]), None)
    time.sleep(0.3)
    assert not answers
    live.server.handle_exit(getattr(signal, kinds[1]), None)
    begin = time.monotonic()
    live.stop()
    assert time.monotonic() - begin < 15
    thread.join(60)


def test_unload_and_load_again() -> None:
    with Live(load("a"), load, name="a") as live:
        assert live.post("/models/unload", {"model": "z"}).status_code == 404
        assert live.post("/models/unload", {}).json() == {"unloaded": "a"}
        assert live.http.get("/health").status_code == 503
        assert error_of(live.chat())["code"] == "no_model"
        assert live.http.get("/stats").json()["healthy"] is False
        assert live.post("/models/load", {"model": "a"}).is_success
        assert live.chat().is_success


def test_a_stop_lets_calls_finish() -> None:
    live = Live(load("a"), load, name="a", drain_s=10)
    thread, answers = in_background(live, chat_body(max_tokens=100))
    live.stop()
    thread.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 100


def test_a_stop_cuts_calls_at_the_deadline_and_says_so() -> None:
    live = Live(load("a"), load, name="a", drain_s=0.3)
    thread, answers = in_background(live, chat_body(max_tokens=3900, stream=True))
    begin = time.monotonic()
    live.stop()
    assert time.monotonic() - begin < 15
    thread.join(60)
    assert events(answers[0])[-1]["error"]["code"] == "engine_unavailable"


def test_two_servers_in_one_process() -> None:
    with Live(toy(), name="one") as one, Live(toy(), name="two") as two:
        assert one.chat(model="one").is_success
        assert two.chat(model="one").status_code == 404
        assert 'path="/v1/chat/completions",status="404"' not in one.http.get("/metrics").text


COMMAND = [sys.executable, "-c", "import typer; from shoal.cli.serve import serve; typer.run(serve)"]


def test_the_command_prints_its_port_serves_and_ends_with_status_0(real: Live) -> None:
    """`real` says whether there is a model; the command loads its own."""
    command = [*COMMAND, "--port", "0", "--drain", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().split()[-1]
            assert url.startswith("http://127.0.0.1:")
            body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 60, "stream": True}
            with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert process.wait(60) == 0
            logged = [json.loads(line) for line in process.stderr.read().splitlines()]
        finally:
            process.kill()
    [call] = [entry for entry in logged if entry["event"] == "call"]
    wanted = {"request_id", "task_id", "agent_id", "cache_hit", "prefix_tokens", "generated_tokens", "latency_ms"}
    assert wanted | {"kv_mb", "process_mb", "status", "path"} <= set(call)
    assert call["model"] == MODEL
    assert "hello" not in json.dumps(logged)


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = "import typer; from shoal.cli.serve import serve; typer.run(serve)"
        ran = subprocess.run([sys.executable, "-c", code, "--port", port], capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in ran.stderr


def test_raw_garbage_is_answered_with_400(real: Live) -> None:
    with socket.create_connection(("127.0.0.1", real.port), 10) as wire:
        wire.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert wire.recv(4096).startswith(b"HTTP/1.1 400")
    with raw_call(real, "/v1/chat/completions", chat_body(logit_bias=None, max_tokens=2)) as wire:
        assert wire.recv(4096).startswith(b"HTTP/1.1 200")
