"""Stored responses and conversations through the SDK; whose they are; what a stop of the server leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from shoal.server.openai.kept import Kept
from tests.support.live import Live, toy

FIELDS: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 6}


@pytest.fixture
def live() -> Iterator[Live]:
    with Live(toy(), keys={"one": frozenset({"generate"}), "two": frozenset({"generate"})}) as server:
        yield server


@pytest.fixture
def client_of(live: Live) -> Iterator[Callable[..., openai.OpenAI]]:
    """The client of a key; closed afterwards, since one that is only dropped leaves its sockets to the collector."""
    with ExitStack() as opened:
        yield lambda key="one": opened.enter_context(
            openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)
        )


def tokens_in(response: Any) -> int:
    return int(response.usage.input_tokens)


def tokens_out(document: Any) -> int:
    return int(document["usage"]["output_tokens"])


def test_a_response_goes_on_from_the_one_before(client_of: Callable[..., openai.OpenAI]) -> None:
    client = client_of()
    first = client.responses.create(**FIELDS, input="Hello there")
    second = client.responses.create(**FIELDS, input="And then?", previous_response_id=first.id)
    items: list[Any] = [{"role": "user", "content": "Hello there"}, *first.output]
    by_hand = client.responses.create(**FIELDS, input=[*items, {"role": "user", "content": "And then?"}], store=False)
    assert second.output_text == by_hand.output_text
    assert tokens_in(second) == tokens_in(by_hand)
    assert second.previous_response_id == first.id
    stored = client.responses.retrieve(second.id)
    assert (stored.output_text, stored.status) == (second.output_text, second.status)
    given = client.responses.input_items.list(second.id)
    assert [item.to_dict()["content"] for item in given] == [[{"type": "input_text", "text": "And then?"}]]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_hand.id)


def test_a_streamed_response_is_there_when_its_last_event_is(client_of: Callable[..., openai.OpenAI]) -> None:
    client = client_of()
    events = list(client.responses.create(**FIELDS, input="Stream", stream=True))
    name = events[-1].to_dict()["response"]["id"]
    assert client.responses.create(**FIELDS, input="On", previous_response_id=name).previous_response_id == name


def test_a_key_never_reads_what_another_stored(client_of: Callable[..., openai.OpenAI]) -> None:
    one, two = client_of(), client_of("two")
    response = one.responses.create(**FIELDS, input="A secret")
    talk = one.conversations.create(items=[{"type": "message", "role": "user", "content": "Another"}])
    item = next(iter(one.conversations.items.list(talk.id)))
    for forbidden in (
        lambda: two.responses.retrieve(response.id),
        lambda: two.responses.delete(response.id),
        lambda: two.responses.input_items.list(response.id),
        lambda: two.responses.create(**FIELDS, input="x", previous_response_id=response.id),
        lambda: two.responses.create(**FIELDS, input="x", conversation=talk.id),
        lambda: two.conversations.retrieve(talk.id),
        lambda: two.conversations.update(talk.id, metadata={"a": "b"}),
        lambda: two.conversations.delete(talk.id),
        lambda: two.conversations.items.list(talk.id),
        lambda: two.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}]),
        lambda: two.conversations.items.delete(str(item.id), conversation_id=talk.id),
    ):
        with pytest.raises(openai.NotFoundError):
            forbidden()
    assert one.responses.retrieve(response.id).id == response.id
    assert len(list(one.conversations.items.list(talk.id))) == 1


def test_a_deleted_response_is_gone_and_nothing_goes_on_from_it(client_of: Callable[..., openai.OpenAI]) -> None:
    client = client_of()
    first = client.responses.create(**FIELDS, input="One")
    second = client.responses.create(**FIELDS, input="Two", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        client.responses.create(**FIELDS, input="Three", previous_response_id=second.id)


def test_a_conversation_gathers_what_is_asked_and_answered(client_of: Callable[..., openai.OpenAI]) -> None:
    client = client_of()
    talk = client.conversations.create(metadata={"topic": "tea"})
    first = client.responses.create(**FIELDS, input="One", conversation=talk.id)
    assert first.conversation == openai.types.responses.response.Conversation(id=talk.id)
    second = client.responses.create(**FIELDS, input="Two", conversation=talk.id)
    assert tokens_in(second) > tokens_in(first) + 6
    items = list(client.conversations.items.list(talk.id, order="asc", limit=3))  # more than one page of them
    assert [item.type for item in items] == ["message"] * 4
    client.conversations.items.delete(str(items[0].id), conversation_id=talk.id)
    added = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Three"}])
    assert client.conversations.items.retrieve(str(added.data[0].id), conversation_id=talk.id).id == added.data[0].id
    assert len(list(client.conversations.items.list(talk.id))) == 4
    assert client.conversations.update(talk.id, metadata={"topic": "milk"}).metadata == {"topic": "milk"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)
    with pytest.raises(openai.BadRequestError, match="exclude"):
        client.responses.create(**FIELDS, input="x", conversation=talk.id, previous_response_id=first.id)


def kept_response(kept: Kept, name: str, previous: str | None = None, size: int = 10) -> None:
    document: dict[str, Any] = {
        "id": name,
        "previous_response_id": previous,
        "status": "completed",
        "output": [{"id": f"m{name}"}],
    }
    kept.begin("me", document, [{"id": f"in{name}", "text": "x" * size}], {})
    kept.finish(document)


def test_what_was_used_longest_ago_goes_and_a_chain_in_use_stays() -> None:
    kept = Kept(None, most=4, most_bytes=100_000)
    kept_response(kept, "a")
    for name in "bc":
        kept_response(kept, name)
    kept_response(kept, "d", previous="a")  # a is used again
    kept_response(kept, "e")
    kept_response(kept, "f", previous="d")
    assert [name for name in "abcdef" if kept.get("me", name)] == ["a", "d", "e", "f"]
    assert [item["id"] for item in kept.chain("me", "f") or []] == ["ina", "ma", "ind", "md", "inf", "mf"]
    for name in "ghi":
        kept_response(kept, name, size=30_000)
    assert sum(kept.get("me", name) is not None for name in "ghi") == 3
    kept_response(kept, "j", size=30_000)
    assert [name for name in "ghij" if kept.get("me", name)] == ["h", "i", "j"]  # the bytes are bounded as well
    kept.close()


def test_responses_in_flight_at_a_stop_go_on_after_the_next_start(tmp_path: Path) -> None:
    """Bound to time only in that the stop comes before so many tokens are written."""
    settings: dict[str, Any] = {"history": tmp_path / "history.db", "state": tmp_path / "state", "drain_s": 0.0}
    body = {"input": "Go on", "temperature": 0, "seed": 1, "max_output_tokens": 1500}
    with Live(toy(step_s=0.02), **settings) as first:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "stream": True}
        with (
            first.http.stream("POST", "/v1/chat/completions", json=chat) as talk,
            first.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as events,
        ):
            lines = events.iter_lines()
            name = next(
                line.split('"id":"')[1].split('"')[0] for line in lines if "response.created" in line and "id" in line
            )
            next(line for line in lines if "output_text.delta" in line)
            next(talk.iter_lines())
            first.server.should_exit = True
            assert "response.failed" in "".join(lines)
    with Live(toy(), **settings) as second:
        until = time.monotonic() + 30
        while (document := second.http.get(f"/v1/responses/{name}").json())["status"] == "in_progress":
            assert time.monotonic() < until
        whole = second.http.post("/v1/responses", json=body).json()
        assert (document["status"], tokens_out(document)) == (whole["status"], tokens_out(whole))
        assert document["output"][0]["content"] == whole["output"][0]["content"]
        assert tokens_out(document) > 30  # it was not over before the stop
        assert second.hub.served is not None
        assert second.hub.served.engine.stats().running == 0  # the chat was not taken up: nobody reads it
    assert not list((tmp_path / "state").iterdir())


def test_a_response_of_a_process_that_was_killed_is_failed_and_says_why(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "history.db", 10, 10_000)
    document: dict[str, Any] = {"id": "resp_1", "previous_response_id": None, "status": "in_progress", "output": []}
    kept.begin("", document, [], {"input": "x"})
    with kept._file.transaction() as db:
        db.execute("UPDATE responses SET owner = '999999999-1'")
    kept.close()
    with Live(toy(), history=tmp_path / "history.db", state=tmp_path / "state") as live:
        told = live.http.get("/v1/responses/resp_1").json()
        assert (told["status"], "stopped" in told["error"]["message"]) == ("failed", True)
