"""`RemoteEngine` against our own server: what the local engine gives, from afar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.engine.aio import AsyncEngine
from shoal.engine.remote import RemoteEngine
from shoal.errors import (
    BackendError,
    EngineClosedError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    QueueFullError,
    RunnerError,
)
from shoal.types import Event, FinishReason, Namespace, Priority, Request, SamplingParams, Thinking
from tests.server.foreign import Foreign
from tests.server.test_stream import wait_for
from tests.support.live import Live, toy


def remote(live: Live | Foreign, work: Callable[[RemoteEngine], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with RemoteEngine(f"{live.url}/v1", **options) as engine:
            return await work(engine)

    return asyncio.run(run())


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {97: 5.0}},
    {"stop": ("a", "e"), "min_tokens": 3},
    {"ignore_eos": True, "stop_token_ids": (7,)},
    {"json_schema": {"type": "string", "maxLength": 9}, "temperature": 1.0, "seed": 2},
    {"regex": "[a-z]{6}", "temperature": 1.0, "seed": 2},
    {"grammar": 'start: "x"+', "max_tokens": 9},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda value: "-".join(value) or "plain")
def test_the_same_call_gives_the_same_here_and_there(live: Live, sampling: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 24, **sampling})
    kinds: list[Any] = [
        {"prompt": "abc"},
        {"prompt_tokens": [97, 98]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    requests = [Request(**kind, sampling=params) for kind in kinds]

    async def work(engine: AsyncEngine | RemoteEngine) -> list[Any]:
        results = await asyncio.gather(*(engine.complete(request) for request in requests))
        return [(r.text, r.tokens, r.finish_reason, r.prompt_tokens, r.error) for r in results]

    async def here() -> list[Any]:
        async with AsyncEngine(toy()) as engine:
            return await work(engine)

    assert remote(live, work) == asyncio.run(here())


def test_events_stream_and_end_with_the_result(live: Live) -> None:
    async def work(engine: RemoteEngine) -> list[Event]:
        fields: Any = {"priority": Priority.HIGH, "namespace": Namespace("t", "a", 2), "group": "g", "deadline_s": 20}
        request = Request(prompt="abc", id="mine", sampling=SamplingParams(max_tokens=10), **fields)
        return [event async for event in engine.generate(request)]

    events = remote(live, work)
    assert all(event.request_id == "mine" for event in events)
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    result = events[-1].result
    assert "".join(event.text for event in events) == result.text
    assert result.ttft_s <= result.latency_s
    assert result.prompt_tokens == 3


def test_leaving_early_stops_the_server() -> None:
    with Live(toy(step_s=0.01)) as live:

        async def work(engine: RemoteEngine) -> None:
            stream: Any = engine.generate(
                Request(prompt="abc", sampling=SamplingParams(max_tokens=2000, ignore_eos=True))
            )
            await anext(stream)
            await stream.aclose()

        remote(live, work)
        wait_for(lambda: live.idle)
        assert live.engine._loop.scheduler.idle
        assert live.engine.stats().steps < 1000, "it was left to its end"
        live.wait_idle()


def test_refusals_are_the_local_engines_errors(live: Live) -> None:
    cases: list[tuple[Request, type[Exception]]] = [
        (Request(prompt="a" * 5000), PromptTooLongError),
        (Request(prompt="a", sampling=SamplingParams(json_schema={"not": {}})), InvalidRequestError),
        (Request(prompt="a", sampling=SamplingParams(logit_bias={5000: 1.0})), InvalidRequestError),
        (Request(prompt="a", sampling=SamplingParams(logprobs=1)), InvalidRequestError),
        (Request(prompt="a", sampling=SamplingParams(prompt_logprobs=1)), InvalidRequestError),
        (Request(prompt="a", sampling=SamplingParams(thinking=Thinking(4, "", "."))), InvalidRequestError),
        (Request(prompt="a", timeout_s=1), InvalidRequestError),
    ]

    async def work(engine: RemoteEngine) -> None:
        for request, kind in cases:
            with pytest.raises(kind):
                await engine.complete(request)

    remote(live, work)
    with pytest.raises(ModelNotFoundError):
        remote(live, work, model="other")


def test_a_plain_server_gets_plain_fields(live: Live) -> None:
    async def work(engine: RemoteEngine) -> Any:
        with pytest.raises(InvalidRequestError, match="top_k"):
            await engine.complete(Request(prompt="a", sampling=SamplingParams(top_k=3)))
        schema = {"type": "string", "maxLength": 3}
        chat = [{"role": "user", "content": "x"}]
        return await engine.complete(Request(messages=chat, sampling=SamplingParams(json_schema=schema)))

    result = remote(live, work, extensions=False)
    assert result.text.startswith('"')
    assert result.tokens == ()


def test_full_queues_deadlines_and_failures() -> None:
    with Live(toy(step_s=0.02, max_batch=1, max_queue=1)) as live:

        async def work(engine: RemoteEngine) -> None:
            long = SamplingParams(max_tokens=2000, ignore_eos=True)
            held = [asyncio.ensure_future(engine.complete(Request(prompt=c, sampling=long))) for c in "ab"]
            while live.engine.stats().waiting < 1:
                await asyncio.sleep(0.01)
            with pytest.raises(QueueFullError) as full:
                await engine.complete(Request(prompt="c"))
            assert full.value.retry_after_s >= 1
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            while not live.idle:
                await asyncio.sleep(0.01)
            late = await engine.complete(Request(prompt="d", sampling=long, deadline_s=0.3))
            assert late.finish_reason is FinishReason.TIMEOUT
            while not live.idle:
                await asyncio.sleep(0.01)
            ending = asyncio.ensure_future(engine.complete(Request(prompt="e", sampling=long)))
            while live.engine.stats().running < 1:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(live.engine.close)
            cut = await ending
            assert cut.finish_reason is FinishReason.ERROR
            assert isinstance(cut.error, RunnerError)
            with pytest.raises(EngineClosedError):
                await engine.complete(Request(prompt="f"))

        remote(live, work)


def test_nobody_there_is_a_clear_error() -> None:
    async def work() -> None:
        async with RemoteEngine("http://127.0.0.1:9/v1", connect_timeout_s=2):
            pass

    with pytest.raises(BackendError, match="cannot be reached"):
        asyncio.run(work())


CHAT: Any = [{"role": "user", "content": "x"}]


def test_a_foreign_server_gets_only_what_it_knows_and_need_not_tell_usage() -> None:
    async def work(engine: RemoteEngine) -> list[Any]:
        hints: Any = {"priority": Priority.HIGH, "namespace": Namespace("t"), "group": "g"}
        every = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop=("!",), logit_bias={1: 2.0})
        chat = Request(messages=CHAT, sampling=every, **hints)
        return [await engine.complete(request) for request in (chat, Request(prompt="x"), Request(prompt="y"))]

    with Foreign() as foreign:
        results = remote(foreign, work)
    for result in results:
        assert (result.text, result.finish_reason, result.error) == ("Hellothere", "stop", None)
        assert (result.tokens, result.prompt_tokens, result.cached_tokens) == ((), 0, 0)
        assert result.ttft_s is not None
    assert ["stream_options" in body for body in foreign.bodies] == [True, False, False, False]  # refused once
    assert all(body["seed"] < 2**31 for body in foreign.bodies)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"ignore_eos": True}, {"regex": "a"}, {"grammar": "start: /a/"}, {"min_tokens": 2}]
)
def test_what_a_foreign_server_may_not_know_is_refused_before_it_is_sent(sampling: dict[str, Any]) -> None:
    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(InvalidRequestError, match=next(iter(sampling))):
            await engine.complete(Request(messages=CHAT, sampling=SamplingParams(**sampling)))
        with pytest.raises(InvalidRequestError, match="json_schema"):
            await engine.complete(Request(prompt="x", sampling=SamplingParams(json_schema={})))

    with Foreign() as foreign:
        remote(foreign, work)
        assert foreign.bodies == []


def test_a_schema_that_a_foreign_server_does_not_hold_to_is_an_error() -> None:
    request = Request(messages=CHAT, sampling=SamplingParams(json_schema={"type": "integer"}))

    async def work(engine: RemoteEngine) -> Any:
        return await engine.complete(request)

    with Foreign("4 2") as foreign:
        assert remote(foreign, work).text == "42"
        assert foreign.bodies[-1]["response_format"]["json_schema"]["schema"] == {"type": "integer"}
        foreign.answer = "Sure thing"
        ended = remote(foreign, work)
    assert ended.finish_reason is FinishReason.ERROR
    assert "schema" in str(ended.error)


@pytest.mark.parametrize(
    "words", ['{"error": "out of memory"}', '{"error": {"message": "out of memory"}}', "out of memory"]
)
def test_last_words_of_a_foreign_server_are_the_error(words: str) -> None:
    async def work(engine: RemoteEngine) -> Any:
        return await engine.complete(Request(messages=CHAT))

    with Foreign() as foreign:
        foreign.last_words = words
        ended = remote(foreign, work)
    assert isinstance(ended.error, RunnerError)
    assert "out of memory" in str(ended.error)


def test_a_field_that_a_strict_server_refuses_is_told() -> None:
    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(InvalidRequestError, match="top_k"):
            await engine.complete(Request(messages=CHAT, sampling=SamplingParams(top_k=3)))

    with Foreign() as foreign:
        remote(foreign, work, extensions=True)
        assert foreign.bodies


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_was_kept_and_closed_is_made_anew(reset: bool) -> None:
    async def work(engine: RemoteEngine) -> list[Any]:
        return [(await engine.complete(Request(messages=CHAT))).error for _ in range(4)]

    with Foreign() as foreign:
        foreign.dies_every = 2
        foreign.resets = reset
        assert remote(foreign, work) == [None] * 4


def test_a_server_that_dies_every_time_is_an_error_with_words() -> None:
    async def work(engine: RemoteEngine) -> Any:
        return (await engine.complete(Request(messages=CHAT))).error

    with Foreign() as foreign:
        foreign.dies_every = 1
        error = remote(foreign, work)
    assert isinstance(error, RunnerError)
    assert not str(error).rstrip().endswith(":")


SEPARATORS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\u00a0h 😀"


@pytest.mark.parametrize(
    "frame", ["data:{}\n\n", "data: {}\r\n\r\n", "data: {}\r\r", ": hm\nevent: x\ndata: {}\nid: 1\n\n"]
)
def test_a_line_of_an_event_ends_at_its_end_alone(frame: str) -> None:
    with Foreign(SEPARATORS) as foreign:
        foreign.frame, foreign.extra = frame, {"error": None}

        async def work(engine: RemoteEngine) -> Any:
            return await engine.complete(Request(messages=[{"role": "user", "content": "x"}]))

        result = remote(foreign, work)
    assert (result.error, result.text) == (None, SEPARATORS.replace(" ", ""))
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("data", ["[1]", "null", "no JSON", '{"error": "full"}', '{"error": {"message": "full"}}'])
def test_an_event_that_is_no_chunk_ends_the_request_with_an_error(data: str) -> None:
    with Foreign() as foreign:
        foreign.frame = "data: " + data.replace("{", "{{").replace("}", "}}") + "\n\n"

        async def work(engine: RemoteEngine) -> Any:
            return await engine.complete(Request(prompt="x"))

        result = remote(foreign, work)
    assert isinstance(result.error, RunnerError)
    assert ("full" if "full" in data else "not a JSON object") in str(result.error)


def test_a_deadline_ends_the_request_and_not_whoever_reads_it() -> None:
    with Live(toy(step_s=0.01)) as live:

        async def work(engine: RemoteEngine) -> list[FinishReason | None]:
            sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
            ends: list[FinishReason | None] = []
            async for event in engine.generate(Request(prompt="abc", sampling=sampling, deadline_s=0.3)):
                if not ends:
                    await asyncio.sleep(0.6)  # the deadline passes while the reader does something else
                ends.append(event.result.finish_reason if event.result else None)
            return ends

        assert remote(live, work)[-1] is FinishReason.TIMEOUT
        live.wait_idle()
