"""vLLM and SGLang as replicas: what they are sent and what they say, in shapes written down from their documents."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from shoal.cluster.links import ServerLink, read_batch
from shoal.core.request import RequestSpec
from shoal.engine.inflight import NOTHING
from shoal.errors import InvalidRequestError
from shoal.types import Event, Namespace, Priority, SamplingParams

GOLDEN = Path(__file__).parent / "golden"


class Recorded:
    """A server that says what is written down, and keeps what it was sent. Refuses `refuses`, as vLLM does priority."""

    def __init__(self, golden: dict[str, Any], refuses: str = "") -> None:
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

            def _send(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                known = {"/health": {}, "/v1/models": golden["models"]}
                document = known.get(self.path.partition("?")[0])
                self._send(404 if document is None else 200, "application/json", json.dumps(document or {}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if refuses and refuses in body:
                    error = {
                        "error": {"message": f"Got {refuses} but scheduling by it is off", "type": "BadRequestError"}
                    }
                    self._send(400, "application/json", json.dumps(error).encode())
                    return
                lines = [f"data: {json.dumps(each)}\n\n" for each in golden["stream"]]
                self._send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(params=["vllm", "sglang"])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((GOLDEN / f"{request.param}.json").read_text())
    return told


@pytest.fixture
def recorded(golden: dict[str, Any]) -> Iterator[Recorded]:
    server = Recorded(golden)
    yield server
    server.close()


def spec(**sampling: Any) -> RequestSpec:
    fields = {"max_tokens": 4, "temperature": 0.5, "top_k": 20, "regex": "[a-z ]+", **sampling}
    return RequestSpec(
        prompt=(5, 6, 7),
        sampling=SamplingParams(**fields),
        seed=7,
        priority=Priority.HIGH,
        group="fleet",
        namespace=Namespace("task", "agent", 2),
    )


async def ask(server: Recorded, wanted: RequestSpec) -> list[Event]:
    link = ServerLink("there", server.url, None, None)
    try:
        await link.ping(5.0)
        assert (await link.card()).context_length == 8192
        assert [batch async for batch in link.batches(None)] == []
        return [event async for event in link.run(wanted, NOTHING)]
    finally:
        await link.close()


def test_requests_and_answers_are_as_written_down(golden: dict[str, Any], recorded: Recorded) -> None:
    events = asyncio.run(ask(recorded, spec()))
    assert recorded.bodies == [golden["body"]]
    result = events[-1].result
    assert result is not None
    assert result.error is None
    assert (result.text, list(result.tokens)) == (" one two", golden["tokens"])
    assert (result.finish_reason, result.prompt_tokens, result.cached_tokens) == ("length", 3, 2)


def test_a_server_without_priorities_is_asked_again_without(golden: dict[str, Any]) -> None:
    server = Recorded(golden, refuses="priority")
    try:
        events = asyncio.run(ask(server, spec()))
    finally:
        server.close()
    assert [("priority" in body) for body in server.bodies] == [True, False]
    assert events[-1].result is not None
    assert events[-1].result.error is None


@pytest.mark.parametrize(("keep_s", "kept"), [(60.0, "in-memory"), (5000.0, "24h")])
def test_a_graphs_hints_reach_a_server_of_ours_and_no_other(golden: dict[str, Any], keep_s: float, kept: str) -> None:
    hinted = {"nvext": {"agent_hints": {"osl": 900}}, "prompt_cache_retention": kept}
    wanted = dataclasses.replace(spec(), critical_path=900, keep_s=keep_s)
    ours = {**golden, "models": {"data": [{**golden["models"]["data"][0], "owned_by": "shoal"}]}}
    for shape, expected in ((golden, {}), (ours, hinted)):
        server = Recorded(shape)
        try:
            asyncio.run(ask(server, wanted))
        finally:
            server.close()
        assert {name: value for name, value in server.bodies[0].items() if name in hinted} == expected


def test_what_a_server_cannot_be_asked_is_refused_by_name(recorded: Recorded) -> None:
    with pytest.raises(InvalidRequestError, match="logprobs"):
        asyncio.run(ask(recorded, spec(logprobs=1)))
    assert recorded.bodies == []


@pytest.mark.parametrize("value", [-1, 2**64, "a5"])
def test_hashes_of_another_kind_are_no_batch(value: Any) -> None:
    """They are logged, and the router goes on with what it knows (`follow`)."""
    removed = {"type": "BlockRemoved", "block_hashes": [1, value]}
    with pytest.raises((ValueError, TypeError)):
        read_batch(1, {"ts": 0.0, "events": [removed]})
    assert read_batch(1, {"ts": 0.0, "events": [{**removed, "block_hashes": [2**64 - 1]}]}).changes
