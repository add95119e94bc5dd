"""What `import shoal` gives, and that both engines have the same verbs."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys

import pytest

import shoal
from shoal import AsyncEngine, Engine, FinishReason, Request, SamplingParams
from shoal.config import EngineConfig, Settings
from shoal.runners.fake import FakeRunner
from tests.support.engines import toy_engine

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
VERBS = ("complete", "generate", "submit", "run", "fan_out", "cache_prefix", "fork", "stats", "suspend", "resume")


def test_every_public_name_is_there_and_the_remote_engine_only_when_asked_for() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    code = "import sys, shoal; print('httpx' in sys.modules, 'shoal.engine.remote' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shoal.nothing


def test_both_engines_have_the_same_verbs() -> None:
    for verb in VERBS:
        assert callable(getattr(Engine, verb))
        assert callable(getattr(AsyncEngine, verb))


def test_the_typed_settings_are_those_of_the_config() -> None:
    assert list(Settings.__annotations__) == [field.name for field in dataclasses.fields(EngineConfig)]


def test_a_handle_left_early_ends_its_request() -> None:
    with toy_engine(FakeRunner(step_s=0.001)) as engine:
        with engine.submit(Request(prompt="x", sampling=LONG)) as handle:
            next(iter(handle))
        assert handle.result(60).finish_reason is FinishReason.ABORTED
        events = engine.generate(Request(prompt="x", id="left", sampling=LONG))
        next(events)
        events.close()
        assert engine.complete(Request(prompt="x", sampling=SHORT)).finish_reason is FinishReason.LENGTH
        while engine.stats().running:
            pass
        assert engine.stats().finished == 3


def test_what_is_printed_says_what_it_is() -> None:
    with toy_engine(FakeRunner(step_s=0.001)) as engine:
        assert repr(engine) == "<Engine fake on fake (u64), open>"
        handle = engine.submit(Request(prompt="abc", id="r", sampling=SHORT))
        assert repr(handle).startswith("<Handle 'r': ")
        assert repr(handle.result(60)).startswith("<Result 'r': 6 tokens, length, ")
        progress = handle.progress()
        assert (progress.state, progress.prompt_tokens, progress.output_tokens) == ("finished", 3, 6)
        prefix = engine.cache_prefix("abc")
        assert repr(prefix) == "<PrefixCache: 3 tokens, held>"
        prefix.release()
    assert repr(engine) == "<Engine fake on fake (u64), closed>"


def test_the_verbs_of_the_async_engine() -> None:
    async def main() -> None:
        runner = FakeRunner(step_s=0.001)
        async with AsyncEngine(toy_engine(runner)) as engine:
            report = await engine.run([Request(prompt=p, sampling=SHORT) for p in "ab"])
            assert [len(result.tokens) for result in report.results] == [6, 6]
            assert len((await engine.fan_out("shared", ["a", "b"], sampling=SHORT)).results) == 2
            prefix = await engine.cache_prefix("shared prefix")
            assert (await engine.complete(Request(prompt="shared prefix!", sampling=SHORT))).cached_tokens == 13
            prefix.release()
            runner.step_s = 0.1  # slow until the fork, so that the parent has not ended
            async with await engine.submit(Request(prompt="x", sampling=SHORT)) as handle:
                children = await handle.fork(2)
                runner.step_s = 0.001
                await engine.suspend()
                await engine.resume()
                results = [await each.result() for each in (handle, *children)]
                assert len({result.tokens for result in results}) == 1
            assert engine.stats().finished >= 7
            running = asyncio.create_task(engine.run([Request(prompt="x", sampling=LONG)]))
            await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while engine.stats().running:
                await asyncio.sleep(0.005)

    asyncio.run(main())
