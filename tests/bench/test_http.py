"""The HTTP client of the benchmarks against the real server on the toy model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.bench.systems.base import Measured, Setup
from shoal.bench.systems.http import AnyServer
from shoal.bench.timeline import metrics
from shoal.bench.workloads import Job
from shoal.errors import BackendError, BenchmarkError
from tests.support.engines import toy_engine
from tests.support.live import Live

JOBS = [Job(tuple(range(40, 80)), 6), Job(tuple(range(90, 120)), 4, arrival_s=0.05)]


@pytest.fixture(scope="module")
def server() -> Iterator[AnyServer]:
    with Live(toy_engine(max_batch=4), name="toy") as live:
        yield AnyServer(Measured("toy", Path("none"), 1, Path(), url=f"http://127.0.0.1:{live.port}/v1"))


def test_tokens_are_those_of_the_engine_and_stamped(server: AnyServer) -> None:
    server.prepare(Setup(4, 64, 0, 0))
    timeline = server.run(JOBS)
    assert [len(trace.tokens) for trace in timeline.traces] == [6, 4]
    assert all(token >= 0 for trace in timeline.traces for token in trace.tokens)
    again = server.run(JOBS)
    assert [t.tokens for t in again.traces] == [t.tokens for t in timeline.traces]
    found = metrics(JOBS, again)
    assert found["hit_rate"] > 0.5, "the server tells what it had cached"
    assert all(trace.times[0] >= trace.arrival_s for trace in again.traces)
    assert all(a <= b for trace in again.traces for a, b in zip(trace.times, trace.times[1:], strict=False))
    assert server.describe()["model"] == "toy"


def test_a_refusal_is_an_error_with_what_the_server_said(server: AnyServer) -> None:
    server.prepare(Setup(4, 64, 0, 0))
    with pytest.raises(BenchmarkError, match="400") as caught:
        server.run([Job((10**9,), 2)])
    assert "prompt" in str(caught.value.value)


class TextOnly(BaseHTTPRequestHandler):
    """A server that knows OpenAI's API and nothing beside it: text in, two pieces of text out."""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "plain"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            self._answer(400, b'{"error": {"message": "text only"}}')
            return
        pieces = [{"choices": [{"text": text}]} for text in (body["prompt"][:2], "!", "")]
        self._answer(200, b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces))

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


def test_a_server_that_refuses_token_ids_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnyServer, "_text", lambda self, job: "hello")
    with ThreadingHTTPServer(("127.0.0.1", 0), TextOnly) as plain:
        thread = threading.Thread(target=plain.serve_forever)
        thread.start()
        try:
            system = AnyServer(Measured("toy", Path("none"), 1, Path(), url=f"http://127.0.0.1:{plain.server_port}/v1"))
            system.prepare(Setup(1, 64, 0, 0))
            timeline = system.run([Job((1, 2), 2)])
            assert timeline.traces[0].tokens == [-1, -1]
            assert (system.describe()["model"], system.describe()["prompts"]) == ("plain", "text")
        finally:
            plain.shutdown()
            thread.join(60)


def test_a_server_tells_no_logits(server: AnyServer) -> None:
    with pytest.raises(BackendError, match="logits"):
        server.logits([1])
