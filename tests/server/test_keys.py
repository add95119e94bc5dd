"""API keys: what each may do, and that none sees what another's prompts left in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.server.config import ServerConfig, read_keys
from tests.support.live import Live, chat_body, error_of, toy

KEYS = {"writer": frozenset({"generate"}), "boss": frozenset({"manage"}), "reader": frozenset({"history"})}
LONG = "a prompt that is longer than one block of the cache by a good many letters, so that it is found"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(toy(), keys=KEYS, api_key="master") as server:
        yield server


def as_(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


CALLS: list[tuple[str, str, Any, str | None]] = [
    ("POST", "/v1/chat/completions", chat_body(max_tokens=1), "generate"),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, "generate"),
    ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1}, "generate"),
    ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, "generate"),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}, "generate"),
    ("POST", "/tokenize", {"prompt": "x"}, "generate"),
    ("POST", "/models/load", {"model": "toy"}, "manage"),
    ("GET", "/v1/models", None, None),
    ("GET", "/stats", None, None),
    ("GET", "/metrics", None, None),
    ("GET", "/swarmbench/runs", None, "history"),
    ("DELETE", "/swarmbench/runs/none", None, "history"),
    ("GET", "/swarmbench/threads", None, "history"),
    ("GET", "/swarmbench/threads/none", None, "history"),
    ("DELETE", "/swarmbench/threads/none", None, "history"),
    ("PATCH", "/swarmbench/runs/none", {"title": "x"}, "history"),
    ("POST", "/swarmbench/graphs", {"file": "f", "text": "nodes: {a: {task: x}}"}, "generate"),
    ("POST", "/swarmbench/graphs/runs", {"file": "f", "text": "x"}, "generate"),
    ("POST", "/swarmbench/storage", {"name": "../x"}, "manage"),
    ("DELETE", "/swarmbench/storage/none", None, "manage"),
    ("POST", "/swarmbench/page", {"max_stall_ms": 100}, "manage"),
]


@pytest.mark.parametrize(("method", "path", "body", "scope"), CALLS, ids=lambda value: str(value)[:30])
def test_a_key_does_what_it_may_and_no_more(live: Live, method: str, path: str, body: Any, scope: str | None) -> None:
    for key, scopes in {**KEYS, "master": frozenset({"generate", "manage", "history"})}.items():
        answer = live.http.request(method, path, json=body, headers=as_(key))
        allowed = scope is None or scope in scopes
        assert (answer.status_code == 403) == (not allowed), (key, answer.text)
        if answer.status_code == 403 and not path.startswith("/v1/messages"):
            assert error_of(answer)["code"] == "missing_scope"
    assert live.http.request(method, path, json=body, headers=as_("other")).status_code == 401
    assert live.http.request(method, path, json=body).status_code == 401


def cached(live: Live, key: str, text: str) -> int:
    body = chat_body(text, max_tokens=1)
    usage = live.post("/v1/chat/completions", body, headers=as_(key)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_key_does_not_see_what_anothers_prompts_left(live: Live) -> None:
    cached(live, "writer", LONG)
    assert cached(live, "writer", LONG) > 32
    assert cached(live, "master", LONG) <= 1  # the turn mark that every chat of its own begins with
    assert cached(live, "master", LONG) > 32


def test_a_key_does_not_see_what_anothers_messages_left(live: Live) -> None:
    def found(key: str) -> int:
        body = {"messages": [{"role": "user", "content": f"messages: {LONG}"}], "max_tokens": 1}
        answer = live.post("/v1/messages", body, headers={"x-api-key": key})
        return int(answer.json()["usage"]["cache_read_input_tokens"])

    assert found("writer") < 32
    assert found("writer") > 32
    assert found("master") < 32
    assert found("master") > 32


@pytest.mark.parametrize("a_graph", [False, True])
def test_a_key_does_not_see_what_anothers_run_left(a_graph: bool) -> None:
    both = {"a": frozenset({"generate", "history"}), "b": frozenset({"generate", "history"})}

    agent = {"name": "One", "task": "Say one."}
    swarm = {"question": LONG, "agents": [agent], "max_tokens": 2, "synthesis": False}
    text = "namespace: {agent: a}\nshared: '{question}'\nnodes: {a: {task: Go., sampling: {max_tokens: 2}}}"
    graph = {"file": "f", "text": text, "inputs": {"question": LONG}}
    path, order = ("/swarmbench/graphs/runs", graph) if a_graph else ("/swarmbench/runs", swarm)

    def cached(live: Live, key: str) -> int:
        run = live.post(path, {**order, "seed": 1}, headers=as_(key)).json()["id"]
        live.http.get(f"/swarmbench/runs/{run}/events", headers=as_(key))
        told = live.http.get(f"/swarmbench/runs/{run}", headers=as_(key)).json()
        assert told["state"] == "done"
        assert "caller" not in told["settings"]
        return int(told["together"]["summary"]["cached_tokens"])

    for share in (False, True):
        with Live(toy(), keys=both, share_prefixes=share) as live:
            assert cached(live, "a") <= 1
            assert cached(live, "a") > 32
            assert (cached(live, "b") > 32) is share


def test_shared_prefixes_are_told_in_whole_blocks() -> None:
    with Live(toy(), keys={"a": frozenset({"generate"}), "b": frozenset({"generate"})}, share_prefixes=True) as live:
        cached(live, "a", LONG)
        seen = {cached(live, "b", LONG[:at] + "?") for at in range(40, 60)}
    assert seen == {32}, "a guess must not tell how many of its tokens were right"


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may what\nwriter generate\n\nboss manage,history\n")
    assert read_keys(path) == {"writer": frozenset({"generate"}), "boss": frozenset({"manage", "history"})}
    path.write_text("writer\n")
    with pytest.raises(ConfigError, match="keys:1 is no key"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="unknown scope"):
        ServerConfig(keys={"a": frozenset({"everything"})})


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://]x"])
def test_an_origin_that_is_no_address_is_a_400(live: Live, origin: str) -> None:
    headers = {**as_("writer"), "Origin": origin}
    answer = live.post("/v1/chat/completions", chat_body(), headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_origin")
