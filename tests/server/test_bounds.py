"""Work is bounded before it is done: bodies of wrong shapes cost their own call a 4xx, little memory, and nobody time.

Times are only told apart where they differ by orders of magnitude (the bars are in `scripts/server_fuzz.py`).
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal.server.body import check_shape
from shoal.server.errors import ApiError
from tests.support.live import Live, error_of, toy

SIZE = 4 * 2**20


def repeated(before: str, element: str, after: str, size: int = SIZE) -> bytes:
    """A body of about that size: one element again and again."""
    count = (size - len(before) - len(after)) // (len(element) + 1)
    return f"{before}{','.join([element] * count)}{after}".encode()


def counted(before: str, element: str, after: str, count: int = 60_000) -> bytes:
    """A body with an element again and again, each with a number in it."""
    return f"{before}{','.join(element.format(number) for number in range(count))}{after}".encode()


CHAT, TEXT, RESPONSE, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
ANTHROPIC, COUNT, UNTOKEN = "/v1/messages", "/v1/messages/count_tokens", "/detokenize"
MESSAGES = '{"messages": [{"role": "user", "content": "x"}], '
BLOCKS = '"messages": [{"role": "user", "content": [{"type": "tool_result", "content": ['
LONG = "x" * SIZE
LONG_TOOL = '"tools": [{"type": "function", "function": {"name": "f", "description": "' + LONG + '"}}]}'
BODIES: dict[str, tuple[str, bytes]] = {
    "floats for a prompt": (TEXT, repeated('{"prompt": [', "0.0", "]}")),
    "numbers for messages": (CHAT, repeated('{"messages": [', "0", "]}")),
    "lists for messages": (CHAT, repeated('{"messages": [', "[]", "]}")),
    "wrong messages, fewer": (CHAT, repeated('{"messages": [', "{}", "]}", 100_000)),
    "messages without content": (TOKENS, repeated('{"messages": [', '{"role": "user"}', "]}")),
    "numbers for input": (RESPONSE, repeated('{"input": [', "0", "]}")),
    "numbers for parts": (CHAT, repeated('{"messages": [{"role": "user", "content": [', "0", "]}]}")),
    "tools by the thousand": (CHAT, repeated(MESSAGES + '"tools": [', "{}", "]}", 200_000)),
    "biases by the thousand": (CHAT, counted(MESSAGES + '"logit_bias": {', '"{}":"x"', "}}")),
    "unknown fields": (CHAT, counted("{", '"f{}":0', "}")),
    "texts of wrong type": (TEXT, repeated('{"prompt": ["a",', "0", "]}", 400_000)),
    "tokens of wrong type": (TEXT, repeated('{"prompt": [1,', '"a"', "]}", 400_000)),
    "nested lists": (TEXT, repeated('{"prompt": [[1],', "[0.5]", "]}", 400_000)),
    "one very long prompt": (TEXT, f'{{"prompt": "{LONG}"}}'.encode()),
    "one very long message": (CHAT, f'{{"messages": [{{"role": "user", "content": "{LONG}"}}]}}'.encode()),
    "a long tool": (CHAT, (MESSAGES + LONG_TOOL).encode()),
    "a long input": (RESPONSE, f'{{"input": "{LONG}", "instructions": "y"}}'.encode()),
    "many token ids": (TEXT, repeated('{"prompt": [', "7", "]}", 800_000)),
    "strings of quotes": (CHAT, b'{"messages": "' + b'\\"' * (SIZE // 2) + b'"}'),
    "strings of backslashes": (CHAT, b'{"messages": "' + b"\\\\" * (SIZE // 2) + b'"}'),
    "brackets in a string": (CHAT, b'{"messages": "' + b"[{" * (SIZE // 2) + b'"}'),
    "closing brackets": (CHAT, b"]" * SIZE),
    "strings with escapes": (CHAT, repeated('{"messages": [', '"\\u00e9"', "]}", 3 * 2**20)),
    "numbers of many digits": (TEXT, repeated('{"prompt": [', "9" * 400, "]}")),
    "white space": (TEXT, b'{"prompt":' + b" " * (8 * 2**20 - 20) + b"1}"),
    "numbers for turns": (ANTHROPIC, repeated('{"max_tokens": 1, "messages": [', "0", "]}", 200_000)),
    "numbers for blocks": (COUNT, repeated('{"messages": [{"role": "user", "content": [', "0", "]}]}", 200_000)),
    "blocks in blocks": (ANTHROPIC, repeated(f'{{"max_tokens": 1, {BLOCKS}', '{"type": "text"}', "]}]}]}", 200_000)),
    "tools of Anthropic's": (ANTHROPIC, repeated('{"max_tokens": 1, "tools": [', "{}", "]}", 100_000)),
    "stops by the thousand": (ANTHROPIC, repeated('{"max_tokens": 1, "stop_sequences": [', '"a"', "]}", 100_000)),
    "a system of numbers": (ANTHROPIC, repeated('{"max_tokens": 1, "system": [', "0", "]}", 100_000)),
    "tokens that are none": (UNTOKEN, repeated('{"tokens": [', '"a"', "]}", 400_000)),
    "a label": (CHAT, (MESSAGES + f'"user": "{LONG}"}}').encode()),
}


class Ticker:
    """The longest that an event loop did nothing else."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._running = True

    async def run(self) -> None:
        while self._running:
            begin = time.perf_counter()
            await asyncio.sleep(0.002)
            self.worst = max(self.worst, time.perf_counter() - begin)

    def stop(self) -> None:
        self._running = False


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Live, Ticker]]:
    with Live(toy()) as live:
        ticker = Ticker()
        asyncio.run_coroutine_threadsafe(ticker.run(), live.loop)
        yield live, ticker
        ticker.stop()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_the_wrong_shape_costs_little_and_delays_nobody(watched: tuple[Live, Ticker], name: str) -> None:
    live, ticker = watched
    path, body = BODIES[name]
    ticker.worst = 0.0
    tracemalloc.start()
    answer = live.http.post(path, content=body, headers={"Content-Type": "application/json"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 400, answer.text[:300]
    assert len(answer.content) < 2000
    if path not in (ANTHROPIC, COUNT):  # whose errors have no codes
        assert error_of(answer)["code"] not in ("invalid_json", "internal_error")
    assert peak < 20 * len(body) + 30e6, f"{peak / 1e6:.0f} MB for {len(body) / 1e6:.1f} MB"
    assert ticker.worst < 10, f"the event loop stood still for {ticker.worst:.2f} s"  # it was half a minute


@pytest.mark.parametrize("path", [CHAT, RESPONSE, ANTHROPIC, COUNT])
def test_tools_have_a_count_in_every_api(watched: tuple[Live, Ticker], path: str) -> None:
    live, _ = watched
    said: dict[str, Any] = {"input": "x"} if path == RESPONSE else {"messages": [{"role": "user", "content": "x"}]}
    said |= {"max_tokens": 1} if path == ANTHROPIC else {}

    def tool(number: int) -> dict[str, Any]:
        if path in (ANTHROPIC, COUNT):
            return {"name": f"f{number}", "input_schema": {"type": "object"}}
        function = {"name": f"f{number}", "parameters": {"type": "object"}}
        return {"type": "function", **function} if path == RESPONSE else {"type": "function", "function": function}

    answer = live.post(path, {**said, "tools": [tool(number) for number in range(513)]})
    assert answer.status_code == 400
    assert "limit is 512" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "ok"),
    [
        (b"[" * 100 + b"]" * 100, True),
        (b"[" * 101 + b"]" * 101, False),
        (b'"' + b"[" * 200 + b'"', True),
        (b'"\\"' + b"[" * 200 + b'"', True),
        (b'"\\\\"' + b"[" * 200, False),
        (b'"' + b"\\" * (64 * 1024 + 1) + b'"' + b"[" * 200, True),  # the quote is escaped, beyond a cut
        (b'"' + b"\\" * (64 * 1024 + 2) + b'"' + b"[" * 200, False),
        (b'"' + b"a" * (64 * 1024 - 2) + b'\\"' + b"[" * 200, True),
        (b'{"a":"' * 200, True),  # a string, and in it
        (b"[" * 60 + b" " * 70_000 + b"[" * 60, False),
    ],
)
def test_depth_is_counted_outside_strings_however_they_are_cut(body: bytes, ok: bool) -> None:
    if ok:
        check_shape(body, 100)
    else:
        with pytest.raises(ApiError, match="deeper than 100"):
            check_shape(body, 100)


def test_what_is_large_and_right_is_served(watched: tuple[Live, Ticker]) -> None:
    live, _ = watched
    long: Any = {"messages": [{"role": "user", "content": "word " * 180}], "max_tokens": 1}
    for extra in (
        {"metadata": {f"k{i}": "x" * 4000 for i in range(60)}},
        {"logit_bias": {str(i): 1 for i in range(250)}},
    ):
        assert live.post(CHAT, {**long, **extra}).status_code == 200
    assert live.post(TEXT, {"prompt": [[97, 98]] * 64, "max_tokens": 1}).status_code == 200
    assert live.post(TEXT, {"prompt": list(range(97, 122)) * 40, "max_tokens": 1}).status_code == 200
    many = [{"role": "user", "content": "x"}] * 1000
    assert live.post(TOKENS, {"messages": many}).json()["count"] == 2001


def test_many_large_bodies_at_once_do_not_pile_up(watched: tuple[Live, Ticker]) -> None:
    live, ticker = watched
    body = BODIES["lists for messages"][1]

    async def crowd() -> list[int]:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as http:
            calls = (http.post(CHAT, content=body, headers={"Content-Type": "application/json"}) for _ in range(8))
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    ticker.worst = 0.0
    assert asyncio.run(crowd()) == [400] * 8
    assert ticker.worst < 10
    live.wait_idle()
