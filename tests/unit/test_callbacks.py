"""A sink, a listener or a callback that raises ends what it belongs to, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

import shoal.errors
from shoal import AsyncEngine, Engine, Event, FinishReason, Request, SamplingParams
from shoal.core.audit import check_integrity
from shoal.runners.fake import FakeRunner
from shoal.types import StepRecord
from tests.support.engines import toy_engine

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


class Sink:
    """Keeps events, and raises at the one with that number, or at the last one."""

    def __init__(self, raises_at: int | None = None, *, at_the_end: bool = False) -> None:
        self.events: list[Event] = []
        self._raises_at, self._at_the_end = raises_at, at_the_end

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == self._raises_at or (self._at_the_end and event.finished):
            raise KeyError("the sink's own fault")

    def ended(self, within_s: float = 60.0) -> Event:
        end = time.monotonic() + within_s
        while not (self.events and self.events[-1].finished):
            assert time.monotonic() < end, "no terminal event"
            time.sleep(0.002)
        assert [event.finished for event in self.events].count(True) == 1
        return self.events[-1]


def serves(engine: Engine) -> None:
    assert engine.run([Request(prompt="after", sampling=SHORT)]).results[0].finish_reason is FinishReason.LENGTH
    engine.call(lambda: check_integrity(engine._loop.scheduler))
    assert not engine.closed
    assert engine.stats().kv_held_bytes == 0


@pytest.mark.parametrize("at", [1, 3, 11])
def test_a_sink_that_raises_ends_its_own_request_alone(at: int, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Sink(raises_at=at), Sink()
    with toy_engine() as engine:
        expected = engine.run([Request(prompt="b", sampling=SHORT)]).results[0].tokens
        with caplog.at_level(logging.ERROR, "shoal.engine"):
            engine.submit(Request(prompt="a", id="bad", sampling=SHORT), sink=bad)
            engine.submit(Request(prompt="b", id="good", sampling=SHORT), sink=good)
            result = bad.ended().result
            assert result is not None
            assert result.finish_reason is FinishReason.ERROR
            assert isinstance(result.error, shoal.errors.CallbackError)
            assert isinstance(result.error.__cause__, KeyError)
            assert len(result.tokens) == at
            assert (told := good.ended().result) is not None
            assert told.tokens == expected
        assert [r.name for r in caplog.records] == ["shoal.engine"]
        assert "bad" in caplog.text
        assert "the sink's own fault" in caplog.text
        serves(engine)


def test_a_sink_that_raises_at_the_end_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Sink(at_the_end=True), Sink()
    with toy_engine() as engine:
        engine.submit(Request(prompt="a", sampling=SHORT), sink=bad)
        engine.submit(Request(prompt="b", sampling=SHORT), sink=good)
        for sink in (bad, good):
            result = sink.ended().result
            assert result is not None
            assert result.finish_reason is FinishReason.LENGTH
        serves(engine)
    assert "the sink's own fault" in caplog.text


@pytest.mark.parametrize("how", ["close", "hang"])
def test_sinks_that_raise_while_everything_ends_keep_no_end_from_the_others(how: str) -> None:
    def fault(plan: object) -> None:
        time.sleep(0.7 if how == "hang" else 0.01)

    sinks = [Sink(at_the_end=number % 2 == 0) for number in range(6)]
    engine = toy_engine(FakeRunner(fault=fault), watchdog_s=0.2 if how == "hang" else 60, max_batch=2)
    for sink in sinks:
        engine.submit(Request(prompt="x", sampling=SamplingParams(max_tokens=2000, ignore_eos=True)), sink=sink)
    if how == "close":
        engine.close()
    for sink in sinks:
        result = sink.ended().result
        assert result is not None
        assert result.finish_reason is (FinishReason.ABORTED if how == "close" else FinishReason.ERROR)
    engine.close()


def test_a_listener_that_raises_is_dropped_and_the_rest_are_told(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def bad(record: StepRecord) -> None:
        calls.append(record.step)
        raise ValueError("the listener's own fault")

    def bad_start() -> bool:
        raise ValueError("the starter's own fault")

    with toy_engine() as engine:
        heard: list[StepRecord] = []
        engine.listen(bad)
        engine.listen(heard.append)
        engine.on_step_start(bad_start)
        result = engine.run([Request(prompt="a", sampling=SHORT)]).results[0]
        assert result.finish_reason is FinishReason.LENGTH
        assert len(calls) == 1
        assert len(heard) == 12
        serves(engine)
    assert "the listener's own fault" in caplog.text
    assert "the starter's own fault" in caplog.text


def test_a_command_that_raises_is_raised_to_who_asked_and_to_nobody_else() -> None:
    def own_fault() -> None:
        raise ZeroDivisionError("mine")

    with toy_engine() as engine:
        with pytest.raises(ZeroDivisionError, match="mine"):
            engine.call(own_fault)
        serves(engine)


def test_a_receiver_that_raises_on_an_event_loop_keeps_nothing_from_the_next() -> None:
    from shoal.engine.aio import Outbox

    async def main() -> None:
        outbox = Outbox.of_running_loop(None)
        received: list[Event] = []

        def bad(event: Event) -> None:
            raise ValueError("mine")

        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        outbox.sink(bad)(Event("a"))
        outbox.sink(received.append)(Event("b"))
        outbox.wake()
        await asyncio.sleep(0.05)
        assert [event.request_id for event in received] == ["b"]
        assert len(told) == 1

    asyncio.run(main())


def test_an_async_request_beside_a_sink_that_raises() -> None:
    async def main() -> None:
        async with AsyncEngine(toy_engine()) as shared:
            shared.engine.submit(Request(prompt="a", sampling=SHORT), sink=Sink(raises_at=2))
            result = await shared.complete(Request(prompt="b", sampling=SHORT))
            assert result.finish_reason is FinishReason.LENGTH

    asyncio.run(main())
