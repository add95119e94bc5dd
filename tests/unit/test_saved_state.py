"""Saved state: what it deletes, who may read it, and what comes back."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from shoal import AsyncEngine, Engine, Request, SamplingParams
from shoal.core.audit import check_integrity
from shoal.engine.state import restore
from shoal.errors import EngineClosedError, ModelFormatError, StoreError
from shoal.runners.fake import FakeRunner
from tests.support.engines import toy_engine

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def saved(path: Path, *requests: Request, runner: FakeRunner | None = None) -> None:
    with toy_engine(runner or FakeRunner(step_s=0.03)) as engine:  # none ends before it is stopped
        handles = [engine.submit(request) for request in requests]
        for handle in handles:
            next(iter(handle))
        engine.suspend()
        engine.save(path)


def test_nothing_of_the_users_is_deleted(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("tokens-of-mine.txt", "tokens-0badcafe.safetensors", "state.txt")]
    for path in mine:
        path.write_text("mine")
    saved(tmp_path, Request(prompt="a", sampling=LONG))
    saved(tmp_path, Request(prompt="b", sampling=LONG))
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert len(list(tmp_path.iterdir())) == 4  # two saves, one state


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    saved(tmp_path / "new" / "dir", Request(prompt="a", sampling=LONG))
    for path in (tmp_path / "new" / "dir").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "dir").stat().st_mode) == 0o700


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, Request(prompt="a", id="kept", sampling=LONG))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with toy_engine() as engine:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            engine.save(tmp_path)
        monkeypatch.undo()
        restore(engine, tmp_path)
        assert [handle.id for handle in engine.restored_handles] == ["kept"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_new_request_without_a_name_gets_another_than_a_restored_one(tmp_path: Path) -> None:
    saved(tmp_path, *(Request(prompt=f"{n}", sampling=LONG) for n in range(3)))
    with toy_engine(FakeRunner(step_s=0.001)) as engine:
        restore(engine, tmp_path)
        fresh = [engine.submit(Request(prompt="new", sampling=LONG)) for _ in range(3)]
        handles = [*engine.restored_handles, *fresh]
        assert len({handle.id for handle in handles}) == 6
        assert all(handle.result(60).error is None for handle in handles)


def test_a_prefill_under_way_comes_back_as_the_prefix_it_was_to_be(tmp_path: Path) -> None:
    prompt = "rules that all of them share " * 20
    with toy_engine(FakeRunner(step_s=0.03), max_step_tokens=16) as engine:
        engine.prefill(Request(prompt=prompt))
        while engine.stats().steps < 2:
            pass
        engine.suspend()
        engine.save(tmp_path)
    with toy_engine() as engine:
        restore(engine, tmp_path)
        assert not engine.restored_handles
        (prefix,) = engine.restored_prefixes
        assert prefix.tokens == tuple(prompt.encode())
        assert engine.stats().kv_held_bytes > 0
        result = engine.run([Request(prompt=prompt + "?", sampling=LONG)], prefix=prefix).results[0]
        assert result.cached_tokens == len(prompt)
        prefix.release()
        engine.call(lambda: check_integrity(engine._loop.scheduler))
        assert engine.stats().kv_held_bytes == 0


def test_log_probabilities_from_before_are_kept(tmp_path: Path) -> None:
    request = Request(prompt="x", id="r", sampling=SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True))
    with toy_engine() as engine:
        expected = engine.run([request]).results[0].logprobs
    saved(tmp_path, request)
    with toy_engine() as engine:
        restore(engine, tmp_path)
        assert engine.restored_handles[0].result(60).logprobs == expected


def test_the_state_of_an_older_version_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"version": 1}')
    with toy_engine() as engine, pytest.raises(ModelFormatError, match="version 1"):
        restore(engine, tmp_path)


def test_loading_closes_the_engine_when_the_state_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Engine] = []

    class Watched(Engine):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(lambda: FakeRunner())
            made.append(self)

    class Opened:
        make_runner = codec = None

    monkeypatch.setattr("shoal.engine.loading.open_model", lambda model, config, progress=None: Opened)
    with pytest.raises(StoreError, match="no state can be read"):
        Watched.load("x", state=tmp_path)
    assert made[0].closed
    assert not made[0]._thread.runs


def test_an_interrupted_cache_prefix_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    with toy_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr("shoal.engine.handles.Handle.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.cache_prefix("a prefix that somebody grew tired of " * 5)
        while engine.stats().finished < 1:  # aborted, or finished and let go
            time.sleep(0.001)
        engine.suspend()
        assert engine.stats().kv_held_bytes == 0
        assert not engine._loop.scheduler.pinned


def test_an_async_engine_that_is_not_open_says_so() -> None:
    import asyncio

    async def main() -> None:
        waiting = AsyncEngine.load("smollm2-135m")
        with pytest.raises(EngineClosedError, match="async with"):
            await waiting.complete(Request(prompt="x"))
        with pytest.raises(EngineClosedError, match="async with"):
            _ = waiting.spec
        await waiting.close()

    asyncio.run(main())


def test_an_async_engine_that_is_cancelled_while_it_loads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    import threading

    made: list[Engine] = []
    entered, go_on = threading.Event(), threading.Event()

    def load(model: str, **settings: object) -> Engine:
        entered.set()
        assert go_on.wait(60)
        made.append(toy_engine())
        return made[0]

    monkeypatch.setattr("shoal.engine.aio.Engine.load", load)

    async def main() -> None:
        async def use() -> None:
            async with AsyncEngine.load("x"):
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(use())
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())  # waits for its threads
    assert made[0].closed
    assert not made[0]._thread.runs
