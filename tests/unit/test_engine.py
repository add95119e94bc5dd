"""The engine on the toy model: threads, ends, failures, and what a user does with it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncEngine, Engine, Event, FinishReason, Namespace, PrefixCache, Request, Result, SamplingParams
from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.core.commands import PreemptAll
from shoal.engine.batch import smallest_batch
from shoal.engine.handles import Handle
from shoal.engine.loading import OpenedModel
from shoal.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    KVBudgetError,
    ModelFormatError,
    PromptTooLongError,
    QueueFullError,
    RunnerError,
    StoreError,
    UnsupportedModelError,
)
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepPlan
from shoal.types import StepRecord
from tests.support.engines import toy_engine, toy_loop

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


def sound(engine: Engine) -> None:
    engine.call(lambda: check_integrity(engine._loop.scheduler))


def test_results_come_in_the_order_of_the_requests_with_their_own_text() -> None:
    with toy_engine(FakeRunner(step_s=0.005), max_batch=3) as engine:  # all are there before the first has ended
        prompts = [f"prompt {i}" for i in range(7)]
        report = engine.run([Request(prompt=p, id=p, sampling=SHORT) for p in prompts])
        assert [r.id for r in report.results] == prompts
        assert len({r.tokens for r in report.results}) == 7
        alone = [engine.run([Request(prompt=p, sampling=SHORT)]).results[0] for p in prompts]
        assert [r.tokens for r in report.results] == [r.tokens for r in alone]
        assert report.output_tokens == 84
        assert max(s.batch for s in report.steps) == 3
        assert report.decode_tokens_per_s > 0
        sound(engine)


def test_streamed_text_is_the_text() -> None:
    heard: dict[str, list[str]] = {"a": [], "b": []}
    finished = []

    def on_tokens(request_id: str, tokens: tuple[int, ...], text: str, done: bool) -> None:
        heard[request_id].append(text)
        finished.extend([request_id] * done)

    with toy_engine() as engine:
        requests = [Request(prompt=n, id=n, sampling=SamplingParams(max_tokens=60, temperature=1)) for n in "ab"]
        report = engine.run(requests, on_tokens)
    assert ["".join(heard[r.id]) for r in report.results] == [r.text for r in report.results]
    assert sorted(finished) == ["a", "b"]


def test_one_bad_request_leaves_the_others_alone() -> None:
    with toy_engine() as engine:
        report = engine.run(
            [
                Request(prompt="good", sampling=SHORT),
                Request(prompt_tokens=[1, 9999], sampling=SHORT),
                Request(prompt="also good", sampling=SHORT),
            ]
        )
    assert [r.finish_reason for r in report.results] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert isinstance(report.results[1].error, InvalidRequestError)
    assert (report.results[1].error.value, report.results[1].error.limit) == (9999, 259)


def test_max_tokens_beyond_the_kv_memory_ends_where_that_does() -> None:
    with toy_engine(FakeRunner(num_blocks=4, context_length=300)) as engine:  # room for 128 tokens
        for max_tokens, min_tokens in ((50, 0), (2**31, 0), (50, 40)):
            sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, logit_bias={120: 100.0})
            result = engine.submit(Request(prompt="x" * 104, sampling=sampling)).result()
            assert (len(result.tokens), result.finish_reason) == (24, FinishReason.LENGTH)
            # The second time all but the last block is there; the copy of the last would be a block too many.
            assert result.cached_tokens in (0, 96)
        assert len(engine.submit(Request(prompt="x" * 127)).result().tokens) == 1


def test_requests_that_cannot_be_served_are_refused_by_name() -> None:
    runner = FakeRunner(num_blocks=4, context_length=300)
    with toy_engine(runner) as engine:
        with pytest.raises(PromptTooLongError, match="300 tokens and the model's context takes 299"):
            engine.submit(Request(prompt="x" * 300))
        with pytest.raises(KVBudgetError, match="raise kv_memory"):
            engine.submit(Request(prompt="x" * 128))
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            engine.submit(Request(prompt="x", sampling=SamplingParams(stop_token_ids=(5000,))))
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            engine.submit(Request(prompt="x", sampling=SamplingParams(logit_bias={5000: 1.0})))
        engine.suspend()  # or it might have ended
        engine.submit(Request(prompt="x", id="same", sampling=SHORT))
        with pytest.raises(InvalidRequestError, match="in flight already"):
            engine.submit(Request(prompt="x", id="same", sampling=SHORT))
    with pytest.raises(EngineClosedError):
        engine.submit(Request(prompt="x"))


def test_without_a_tokenizer_only_tokens_are_taken() -> None:
    with Engine(lambda: FakeRunner()) as engine:
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            engine.submit(Request(prompt="x"))
        result = engine.run([Request(prompt_tokens=[1, 2], sampling=SHORT)]).results[0]
        assert (len(result.tokens), result.text) == (12, "")


def test_the_context_ends_an_output() -> None:
    with toy_engine(FakeRunner(context_length=64)) as engine:
        result = engine.run([Request(prompt="x" * 60, sampling=LONG)]).results[0]
    assert (result.finish_reason, len(result.tokens)) == (FinishReason.LENGTH, 4)


def test_a_full_queue_is_refused_with_a_hint() -> None:
    with toy_engine(FakeRunner(step_s=0.01), max_batch=1, max_queue=2) as engine:
        handles = [engine.submit(Request(prompt="x", sampling=LONG)) for _ in range(3)]
        with pytest.raises(QueueFullError) as caught:
            engine.submit(Request(prompt="x", sampling=LONG))
        assert caught.value.retry_after_s > 0
        for handle in handles:
            handle.abort()
        assert {h.result(60).finish_reason for h in handles} == {FinishReason.ABORTED}
        assert engine.submit(Request(prompt="x", sampling=SHORT)).result(60).finish_reason is FinishReason.LENGTH


def test_the_queue_counts_tokens_too() -> None:
    with toy_engine(FakeRunner(step_s=0.01, num_blocks=8), max_batch=1, max_queue_tokens=300) as engine:  # KV of 256
        handles = [engine.submit(Request(prompt="x" * 200, sampling=LONG)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="144 prompt tokens") as caught:
            engine.submit(Request(prompt="x" * 200, sampling=LONG))
        assert (caught.value.param, caught.value.limit) == ("max_queue_tokens", 300)
        handles.append(engine.submit(Request(prompt="x" * 100, sampling=LONG)))
        for handle in handles:
            handle.abort()
        assert {h.result(60).finish_reason for h in handles} == {FinishReason.ABORTED}
        assert engine.submit(Request(prompt="x" * 250, sampling=SHORT)).result(60).finish_reason is FinishReason.LENGTH
    with toy_engine(max_queue_tokens=0) as engine:  # one that fits is taken whatever its length
        assert engine.run([Request(prompt="x" * 250, sampling=SHORT)]).results[0].error is None


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised_whole() -> None:
    class Counting(ByteTokenizer):
        seen = 0

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            self.seen += len(text)
            return super().encode(text, add_special=add_special)

    codec = Counting()
    with Engine(lambda: FakeRunner(context_length=1000), codec, EngineConfig()) as engine:
        for request in (
            Request(prompt="x" * 8_000_000),
            Request(messages=[{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "y" * 8_000_000}]),
        ):
            with pytest.raises(PromptTooLongError, match="the prompt has over"):
                engine.submit(request)
        assert codec.seen < 200_000


def test_arrivals_are_replayed() -> None:
    with toy_engine(FakeRunner(step_s=0.002)) as engine:
        late = Request(prompt="b", id="late", sampling=SHORT, arrival_s=0.15)
        report = engine.run([late, Request(prompt="a", id="early", sampling=SHORT)])
    assert [r.id for r in report.results] == ["late", "early"]
    assert report.wall_s >= 0.15
    late_s = report.results[0].ttft_s
    assert late_s is not None
    assert late_s <= report.wall_s - 0.15, "counted from its arrival"


def test_abort_while_it_streams_and_when_it_is_over() -> None:
    aborted = threading.Event()

    def fault(plan: StepPlan) -> None:
        if plan.step > 6:
            assert aborted.wait(60)

    with toy_engine(FakeRunner(fault=fault), speculation=False) as engine:
        handle = engine.submit(Request(prompt="x", sampling=LONG))
        seen = 0
        for event in handle:
            seen += len(event.tokens)
            if seen >= 5 and not aborted.is_set():
                handle.abort()
                aborted.set()
        result = handle.result()
        assert result.finish_reason is FinishReason.ABORTED
        assert 5 <= len(result.tokens) < 40
        handle.abort()
        sound(engine)
        assert engine.stats().kv_held_bytes == 0


def test_closing_ends_what_is_in_flight() -> None:
    engine = toy_engine(FakeRunner(step_s=0.001), max_batch=1)
    handles = [engine.submit(Request(prompt="x", sampling=LONG)) for _ in range(4)]
    engine.close()
    engine.close()
    assert {h.result(60).finish_reason for h in handles} == {FinishReason.ABORTED}


def test_an_engine_closed_before_its_first_request() -> None:
    with toy_engine() as engine:
        pass
    assert engine.closed


def test_what_the_runner_raises_at_load_is_raised_to_the_caller() -> None:
    def broken() -> FakeRunner:
        raise ModelFormatError("no such tensor")

    with pytest.raises(ModelFormatError, match="no such tensor"):
        Engine(broken)


def test_a_failed_pass_ends_its_requests_and_the_engine_goes_on() -> None:
    def fault(plan: StepPlan) -> None:
        if plan.step == 3:
            raise ValueError("device lost")

    with toy_engine(FakeRunner(fault=fault)) as engine:
        results = engine.run([Request(prompt=p, sampling=SHORT) for p in "ab"]).results
        for result in results:
            assert result.finish_reason is FinishReason.ERROR
            assert isinstance(result.error, RunnerError)
            assert isinstance(result.error.__cause__, ValueError)
            assert len(result.tokens) == 2
        assert engine.run([Request(prompt="c", sampling=SHORT)]).results[0].finish_reason is FinishReason.LENGTH
        sound(engine)


@pytest.mark.parametrize("step", range(1, 8))
def test_a_runner_that_raises_at_any_step_leaves_nobody_waiting(step: int) -> None:
    def fault(plan: StepPlan) -> None:
        if plan.step == step:
            raise RuntimeError("now")

    with toy_engine(FakeRunner(fault=fault), max_batch=2, max_step_tokens=32) as engine:
        results = engine.run([Request(prompt="x" * 50 + str(i), sampling=SHORT) for i in range(5)]).results
        assert any(r.error for r in results)
        good = engine.run([Request(prompt="fine", sampling=SHORT)]).results[0]
        assert good.error is None
        sound(engine)


def test_a_runner_that_always_fails_closes_the_engine_by_name() -> None:
    def fault(plan: StepPlan) -> None:
        raise RuntimeError("dead device")

    engine = toy_engine(FakeRunner(fault=fault), max_batch=1)
    handles = [engine.submit(Request(prompt="x", sampling=SHORT)) for _ in range(6)]
    results = [handle.result(60) for handle in handles]
    assert all(r.finish_reason is FinishReason.ERROR for r in results)
    assert engine.closed
    with pytest.raises(EngineClosedError, match="failed in a row"):
        engine.submit(Request(prompt="x"))
    engine.close()


def test_a_row_of_nan_ends_alone() -> None:
    runner = FakeRunner()
    runner.nan_for.update({1, 3})  # the first and the third request
    with toy_engine(runner) as engine:
        handles = [engine.submit(Request(prompt=p, sampling=dataclasses.replace(SHORT, temperature=t)))
                   for p, t in (("a", 0.0), ("b", 0.0), ("c", 1.0), ("d", 1.0))]  # fmt: skip
        results = [h.result(60) for h in handles]
    assert [r.finish_reason for r in results] == [FinishReason.ERROR, FinishReason.LENGTH] * 2
    assert "not finite" in str(results[0].error)


def test_a_hung_pass_is_noticed_and_nobody_waits_for_ever() -> None:
    hang = threading.Event()

    def fault(plan: StepPlan) -> None:
        if plan.step == 3:
            hang.wait(60)

    engine = toy_engine(FakeRunner(fault=fault), watchdog_s=1.0, max_batch=1)
    handles = [engine.submit(Request(prompt="x", sampling=SHORT)) for _ in range(3)]
    results = [handle.result(60) for handle in handles]
    assert {r.finish_reason for r in results} == {FinishReason.ERROR}
    assert "has not returned for" in str(results[0].error)
    assert len(results[0].tokens) == 2
    with pytest.raises(EngineClosedError, match="has not returned"):
        engine.submit(Request(prompt="x"))
    hang.set()
    engine.close()


def test_two_engines_in_one_process() -> None:
    with toy_engine() as one, toy_engine() as two:
        handles = [e.submit(Request(prompt="same", sampling=SHORT)) for e in (one, two, one, two)]
        assert len({h.result(60).tokens for h in handles}) == 1


def test_reading_one_request_loses_nothing_of_another() -> None:
    with toy_engine() as engine:
        handles = [engine.submit(Request(prompt=str(i), sampling=SHORT)) for i in range(4)]
        for handle in reversed(handles):
            events = list(handle)
            assert sum(len(e.tokens) for e in events) == 12
            assert events[-1].result is not None


def test_seeds_are_drawn_reported_and_repeatable() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    with toy_engine(seed=5) as engine:
        first = engine.run([Request(prompt="x", sampling=sampling) for _ in range(3)]).results
        assert len({r.tokens for r in first}) == 3
        seeded = dataclasses.replace(sampling, seed=first[1].seed)
        again = engine.run([Request(prompt=p, sampling=seeded) for p in ("x", "y", "x")]).results
        assert again[0].tokens == again[2].tokens == first[1].tokens


def test_logprobs_follow_the_output() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=1.0, logprobs=2, ignore_eos=True)
    with toy_engine() as engine:
        handle = engine.submit(Request(prompt="x", sampling=sampling))
        streamed = [p for event in handle for p in event.logprobs]
        result = handle.result()
    assert [p.token for p in result.logprobs] == list(result.tokens)
    assert streamed == list(result.logprobs)
    assert all(len(p.top) == 2 and p.logprob <= 0 for p in result.logprobs)


def test_fan_out_computes_the_shared_part_once() -> None:
    shared = "All of these agents begin alike, and at some length. " * 4
    with toy_engine(max_step_tokens=64) as engine:
        report = engine.fan_out(shared, ["one", "two", "three"], sampling=SHORT)
        computed = sum(r.receipt.computed_tokens for r in report.results)
        assert computed == len(shared) + len("onetwothree") + 3 * 11
        by_tokens = engine.fan_out(list(shared.encode()), [list(b"one"), list(b"two")], sampling=SHORT)
        assert [r.tokens for r in by_tokens.results] == [r.tokens for r in report.results[:2]]
        chat = engine.fan_out(
            [{"role": "user", "content": shared}], [[{"role": "user", "content": c}] for c in "ab"], sampling=SHORT
        )
        assert chat.results[1].cached_tokens > len(shared)
        with pytest.raises(InvalidRequestError, match="different kinds"):
            engine.fan_out("text", [[1, 2]])


def test_forks_share_everything_so_far_and_go_their_own_ways() -> None:
    sampling = SamplingParams(max_tokens=300, temperature=1.0, ignore_eos=True, seed=1, stop=("\x00\x00",))
    runner = FakeRunner(step_s=0.02)  # slow until the fork: most tokens are left to the parent
    with toy_engine(runner) as engine:
        parent = engine.submit(Request(prompt="x" * 104, sampling=sampling))
        events = iter(parent)
        for _ in range(10):
            next(events)
        children = parent.fork(3)
        runner.step_s = 0.0
        results = [h.result(60) for h in (parent, *children)]
        assert len({r.tokens for r in results}) == 4
        assert len({r.tokens[:10] for r in results}) == 1
        assert all(len(r.tokens) == 300 for r in results)
        assert all(r.receipt.cached_tokens >= 40 for r in results[1:])
        with pytest.raises(InvalidRequestError, match="finished"):
            parent.fork(1)
        sound(engine)


@pytest.mark.parametrize("splits", [False, True])
def test_the_next_turn_of_a_chat_writes_what_it_writes_alone(splits: bool) -> None:
    """It finds the last answer in the tree, except where generated tokens leave other KV than prompt tokens do."""
    first = Request(prompt="q" * 50, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
    with toy_engine(FakeRunner(splits_decode=splits)) as engine:
        answer = engine.run([first]).results[0].tokens
        second = Request(prompt_tokens=[*b"q" * 50, *answer, *b"and?"], sampling=SHORT)
        result = engine.run([second]).results[0]
    with toy_engine(FakeRunner(splits_decode=splits)) as engine:
        assert result.tokens == engine.run([second]).results[0].tokens
    assert result.cached_tokens == (50 if splits else 109)


def test_a_pinned_prefix_survives_pressure_and_can_be_released() -> None:
    prefix = "rules that everybody has " * 6
    with toy_engine(FakeRunner(num_blocks=16)) as engine:
        with engine.cache_prefix(prefix) as pinned:
            for i in range(12):
                engine.run([Request(prompt=f"{i} " * 60, sampling=SHORT)])
            result = engine.run([Request(prompt=prefix + "?", sampling=SHORT)], prefix=pinned).results[0]
            assert result.cached_tokens == len(prefix)
            with pytest.raises(InvalidRequestError, match="does not begin with the prefix"):
                engine.run([Request(prompt="other", sampling=SHORT)], prefix=pinned)
            sound(engine)
        with pytest.raises(InvalidRequestError, match="released"):
            engine.run([Request(prompt=prefix, sampling=SHORT)], prefix=pinned)
        engine.suspend()
        assert engine.stats().kv_held_bytes == 0
        engine.resume()


def test_the_longest_common_prefix_of_prompts() -> None:
    longest = PrefixCache.longest_common_prefix
    assert longest([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == (1, 2)
    assert longest([[1, 2, 3]]) == (1, 2, 3)
    assert longest([[1], [2]]) == longest([]) == ()


def test_namespaces_keep_agents_apart() -> None:
    prompt = "z" * 100
    with toy_engine() as engine:

        def ask(namespace: Namespace) -> Result:
            return engine.run([Request(prompt=prompt, sampling=SHORT, namespace=namespace)]).results[0]

        assert ask(Namespace("a")).cached_tokens == 0
        assert ask(Namespace("b")).receipt.miss == "cold"
        assert ask(Namespace("a")).cached_tokens == 99
        assert ask(Namespace("a", version=1)).cached_tokens == 0
        assert ask(Namespace("a")).receipt.miss == "stale"


def test_suspend_stops_at_a_token_and_resume_goes_on_with_the_same_tokens() -> None:
    request = Request(prompt="x" * 50, sampling=SamplingParams(max_tokens=80, temperature=0.8, seed=3, ignore_eos=True))
    with toy_engine() as engine:
        expected = engine.run([request]).results[0].tokens
    for drop in (False, True):
        with toy_engine(FakeRunner(step_s=0.001)) as engine:
            handle = engine.submit(request)
            next(iter(handle))
            engine.suspend(drop_kv=drop)
            steps = engine.stats().steps
            time.sleep(0.05)
            assert engine.stats().steps == steps
            if drop:
                assert engine.stats().kv_held_bytes == engine.stats().kv_cached_bytes == 0
            engine.resume()
            assert handle.result(60).tokens == expected


def test_state_goes_on_in_another_engine(tmp_path: Path) -> None:
    sampling = SamplingParams(
        max_tokens=80, temperature=0.8, ignore_eos=True, frequency_penalty=0.3, logit_bias={7: -5.0}, stop=("@@",)
    )
    requests = [Request(prompt=f"{i}" * 50, id=f"r{i}", sampling=dataclasses.replace(sampling, seed=i)) for i in (0, 1)]
    with toy_engine() as engine:
        expected = [r.tokens for r in engine.run(requests).results]
    with toy_engine(FakeRunner(step_s=0.05)) as engine:  # neither ends before it is stopped
        engine.cache_prefix("pinned " * 10)
        handles = [engine.submit(request) for request in requests]
        next(iter(handles[0]))
        engine.suspend()
        engine.save(tmp_path / "state")
        engine.save(tmp_path / "state")
    assert len(list((tmp_path / "state").iterdir())) == 1
    from shoal.engine.state import restore

    with toy_engine() as engine:
        restore(engine, tmp_path / "state")
        assert [h.result(60).tokens for h in engine.restored_handles] == expected
        assert [h.id for h in engine.restored_handles] == ["r0", "r1"]
        assert engine.run([Request(prompt="pinned " * 10 + "?", sampling=SHORT)]).results[0].cached_tokens == 70
        sound(engine)


def test_broken_state_is_refused_by_name(tmp_path: Path) -> None:
    from shoal.engine.state import restore

    with toy_engine() as engine:
        with pytest.raises(StoreError, match="no state can be read"):
            restore(engine, tmp_path)
        engine.save(tmp_path / "s")
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"):
            engine.save(tmp_path / "file" / "s")
    with Engine(lambda: FakeRunner(vocab_size=300), ByteTokenizer()) as other, pytest.raises(UnsupportedModelError):
        restore(other, tmp_path / "s")
    (tmp_path / "s" / "state.safetensors").write_text("{")
    with toy_engine() as engine, pytest.raises(ModelFormatError, match="broken"):
        restore(engine, tmp_path / "s")


def test_deadline_and_timeout_end_with_what_there_is() -> None:
    with toy_engine(FakeRunner(step_s=0.005)) as engine:
        result = engine.submit(Request(prompt="x", sampling=LONG, timeout_s=0.5)).result(60)
        assert result.finish_reason is FinishReason.TIMEOUT
        assert 3 < len(result.tokens) < 2000
        late = engine.submit(Request(prompt="x", sampling=LONG, deadline_s=0.1)).result(60)
        assert late.finish_reason is FinishReason.TIMEOUT
        assert late.latency_s >= 0.1


def test_settings_are_checked_and_unknown_ones_named() -> None:
    with pytest.raises(ConfigError, match="did you mean max_batch"):
        EngineConfig.of(max_batc=3)
    for bad in ({"max_batch": 0}, {"kv_memory": "lots"}, {"kv_memory": -1}, {"max_stall_ms": 0}, {"precision": "i8"}):
        with pytest.raises(ConfigError):
            EngineConfig.of(**bad)
    assert EngineConfig(kv_memory="1.5GiB").kv_memory == 3 * 2**29


def test_callbacks_that_raise_stop_the_run_and_leave_nothing_behind() -> None:
    def on_tokens(request_id: str, tokens: tuple[int, ...], text: str, done: bool) -> None:
        raise KeyError("mine")

    with toy_engine() as engine:
        with pytest.raises(KeyError, match="mine"):
            engine.run([Request(prompt="x", sampling=LONG)], on_tokens)
        engine.suspend()
        assert engine.stats().running == engine.stats().waiting == 0
        engine.resume()


async def _collect(engine: AsyncEngine, request: Request) -> list[Event]:
    return [event async for event in engine.generate(request)]


def test_async_generate_and_cancel() -> None:
    import asyncio

    async def main() -> None:
        async with AsyncEngine(toy_engine(FakeRunner(step_s=0.001))) as engine:
            batches = await asyncio.gather(*(_collect(engine, Request(prompt=p, sampling=SHORT)) for p in "abc"))
            assert [b[-1].finished for b in batches] == [True] * 3
            task = asyncio.create_task(_collect(engine, Request(prompt="x", sampling=LONG)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):
                while engine.engine.stats().running:
                    await asyncio.sleep(0.01)
            with pytest.raises(InvalidRequestError):
                await _collect(engine, Request(prompt_tokens=[-1]))
            assert (await engine.complete(Request(prompt="q", sampling=SHORT))).finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_async_loading_happens_on_entry() -> None:
    import asyncio

    async def main() -> None:
        waiting = AsyncEngine.load("no-such-model-anywhere")
        with pytest.raises(Exception, match="no-such-model-anywhere"):
            async with waiting:
                pass

    asyncio.run(main())


def test_what_is_computed_again_after_a_preemption_is_not_counted_as_new_output() -> None:
    loop = toy_loop(FakeRunner())
    records: list[StepRecord] = []
    loop.on_step = [records.append]
    ended: list[Event] = []
    loop.add(
        "a",
        loop.inputs.prepare(Request(prompt="abcdef", sampling=SamplingParams(max_tokens=9, ignore_eos=True))),
        ended.append,
    )
    for _ in range(4):
        loop.step()
    loop.scheduler.apply(PreemptAll(drop_cached=True))
    while not loop.idle:
        loop.step()
    assert sum(record.decode_tokens for record in records) == 9 - 1  # the last is never fed
    assert sum(record.prefill_tokens for record in records) == 6 + 6 + 3  # again: the prompt and the tokens fed before


def test_who_listens_is_roused_once_a_step_and_before_the_device_computes() -> None:
    order: list[str] = []

    def start_step() -> bool:
        order.append("start_step")
        return True

    with toy_engine(FakeRunner(fault=lambda plan: order.append("pass"))) as engine:
        engine.on_step_start(start_step)
        engine.on_step_start(start_step)
        requests = [Request(prompt=text, sampling=SamplingParams(max_tokens=4, ignore_eos=True)) for text in "abc"]
        handles = [engine.submit(request, sink=lambda event: order.append("event")) for request in requests]
        end = time.monotonic() + 20
        while not ("event" in order and order[-1] == "start_step" and engine.stats().finished == len(handles)):
            assert time.monotonic() < end, "the last events have roused nobody"
            time.sleep(0.005)
    passes = [at for at, what in enumerate(order) if what == "pass"]
    assert all(
        order[at - 1] == "start_step" and order[at - 2 : at] != ["start_step", "start_step"] for at in passes[1:]
    )
    last = max(at for at, what in enumerate(order) if what == "event")
    assert "start_step" in order[last:]
    assert order.count("event") >= 12


def test_one_engine_serves_one_event_loop_after_another() -> None:
    async def ask() -> str:
        return (await shared.complete(Request(prompt="abc", sampling=SHORT))).text

    with toy_engine() as engine:
        shared = AsyncEngine(engine)
        texts = [asyncio.run(ask()) for _ in range(5)]
        assert len(set(texts)) == 1
        assert len(engine._loop.step_starters) <= 2  # loops that are closed are forgotten


def test_a_task_cancelled_while_it_submits_leaves_no_request() -> None:
    async def ask(shared: AsyncEngine) -> None:
        asking = asyncio.ensure_future(shared.complete(Request(prompt="abc", sampling=LONG)))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        go_on.set()

    entered, go_on = threading.Event(), threading.Event()
    with toy_engine(FakeRunner(step_s=0.002)) as engine:
        submit = engine.submit

        def slow(request: Request, **options: Any) -> Handle:
            entered.set()
            go_on.wait(60)
            return submit(request, **options)

        engine.submit = slow  # type: ignore[method-assign]
        asyncio.run(ask(AsyncEngine(engine)))
        end = time.monotonic() + 60
        while engine.stats().finished < 1:
            assert time.monotonic() < end, "the request was left running"
            time.sleep(0.005)
        sound(engine)


def test_a_warm_up_runs_every_shape_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[StepPlan] = []
    monkeypatch.setattr(
        "shoal.engine.loading.open_model",
        lambda *_, **__: OpenedModel(ByteTokenizer(), lambda: FakeRunner(fault=plans.append)),
    )
    with Engine.load("toy", max_batch=6, max_step_tokens=64, warmup=True) as engine:
        assert engine.warmup_s is not None
        assert max(plan.num_tokens for plan in plans) == 64
        decoding = [len(plan.sequences) for plan in plans if all(len(item.tokens) == 1 for item in plan.sequences)]
        assert {1, 2, 4, 6} <= set(decoding)
        stats = engine.stats()
        assert (stats.kv_held_bytes, stats.kv_cached_bytes, stats.running) == (0, 0, 0)
        engine.call(lambda: check_integrity(engine._loop.scheduler))
    with Engine.load("toy", max_batch=6, kv_memory="4KiB", max_step_tokens=16, warmup=True) as small:
        assert small.warmup_s is not None, "what does not fit is left out"
    with Engine.load("toy") as cold:
        assert cold.warmup_s is None


def test_the_smallest_batch_that_is_worth_it() -> None:
    assert smallest_batch({1: 103.0, 2: 168.0, 8: 199.0}) == 2, "84 % of the most"
    assert smallest_batch({1: 103.0, 2: 160.0, 8: 199.0}) == 8
    assert smallest_batch({1: 5.0}) == 1


def test_an_engine_whose_load_is_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that loads goes on; what it has made by then is closed."""
    loading, go_on, made = threading.Event(), threading.Event(), []

    def load(*_: Any, **__: Any) -> Engine:
        loading.set()
        assert go_on.wait(60)
        made.append(toy_engine())
        return made[0]

    monkeypatch.setattr("shoal.engine.aio.Engine.load", load)

    async def enter() -> None:
        async with AsyncEngine.load("toy"):
            raise AssertionError("it was cancelled before")

    async def main() -> None:
        entering = asyncio.create_task(enter())
        await asyncio.to_thread(loading.wait, 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        go_on.set()

    asyncio.run(main())  # ends its threads before it returns
    assert made[0].closed


def test_a_request_that_the_books_have_lost_ends_with_an_error() -> None:
    loop = toy_loop(FakeRunner())
    log: list[Event] = []
    request = Request(prompt_tokens=[1, 2, 3], sampling=SamplingParams(max_tokens=50, ignore_eos=True))
    state = loop.add("lost", loop.inputs.prepare(request), log.append)
    loop.step()
    state.seq.computed = len(state.seq.tokens)  # as if a fault of the engine had done so
    assert loop.step() is None
    assert loop.idle
    result = log[-1].result
    assert result is not None
    assert isinstance(result.error, RunnerError)
