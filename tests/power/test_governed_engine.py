"""An engine under a governor: its pace, its queue, its refusals, and nothing where there is none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncEngine, Engine, EngineConfig, FinishReason, Priority, Request, SamplingParams
from shoal.agents import Agent, Graph, Trace, retry
from shoal.core.audit import check_integrity
from shoal.engine.record import replay
from shoal.errors import ConfigError, PowerLimitError
from shoal.power import Action, Governor, Level, PowerPolicy, SimulatedSensor
from shoal.runners.fake import ByteTokenizer, FakeRunner

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


def governed(sensor: SimulatedSensor, step_s: float = 0.004, settings: Any = None, **policy: Any) -> Engine:
    governor = Governor([sensor], PowerPolicy(**{"sample_s": 0.02, "hold_s": 0.05, **policy}))
    config = EngineConfig(**(settings or {}))
    return Engine(lambda: FakeRunner(step_s=step_s), ByteTokenizer(), config, governor=governor)


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_a_hot_engine_is_slower_and_its_batch_as_wide() -> None:
    def run(level: Level) -> tuple[float, int, list[tuple[int, ...]]]:
        with governed(SimulatedSensor(level), duty=(1.0, 0.5, 0.25, 0.25), max_pause_s=30) as engine:
            report = engine.run([Request(prompt=str(i), sampling=SHORT) for i in range(8)])
            computed_s = sum(step.ms for step in report.steps[:-1]) / 1e3  # after the last one nobody waits
            return (
                report.wall_s / computed_s,
                max(step.batch for step in report.steps),
                [r.tokens for r in report.results],
            )

    cool, hot = run(Level.NOMINAL), run(Level.SERIOUS)
    assert hot[0] >= 3.9  # a quarter of the time it computes
    assert hot[1] == cool[1] == 8
    assert hot[2] == cool[2]


def test_background_agents_wait_while_it_is_hot_and_deadlines_still_count() -> None:
    sensor = SimulatedSensor(Level.SERIOUS)
    with governed(sensor, duty=(1, 1, 1, 1)) as engine:
        low = [engine.submit(Request(prompt=p, priority=Priority.LOW, sampling=SHORT)) for p in "ab"]
        late = engine.submit(Request(prompt="c", priority=Priority.LOW, sampling=SHORT, deadline_s=0.1))
        normal = engine.submit(Request(prompt="d", sampling=SHORT))
        assert normal.result(60).finish_reason is FinishReason.LENGTH
        assert late.result(60).finish_reason is FinishReason.TIMEOUT
        assert [handle.state for handle in low] == ["queued", "queued"]
        assert (engine.stats().running, engine.stats().waiting) == (0, 2)
        low[1].abort()
        assert low[1].result(60).finish_reason is FinishReason.ABORTED
        sensor.level = Level.NOMINAL
        assert low[0].result(60).finish_reason is FinishReason.LENGTH
        engine.call(lambda: check_integrity(engine._loop.scheduler))
        assert engine.governor is not None
        assert [d.action for d in engine.governor.decisions] == [Action.DEFER, Action.RELEASE]


def test_an_engine_with_nothing_but_deferred_work_does_not_spin() -> None:
    with governed(SimulatedSensor(Level.SERIOUS), sample_s=0.05) as engine:
        engine.submit(Request(prompt="a", priority=Priority.LOW, sampling=SHORT))
        wait_for(lambda: engine.stats().waiting == 1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.3


def test_what_runs_goes_on_when_it_gets_critical_and_new_requests_are_refused() -> None:
    sensor = SimulatedSensor()
    with governed(sensor, duty=(1, 1, 1, 1)) as engine:
        running = engine.submit(Request(prompt="a", priority=Priority.LOW, sampling=SHORT))
        next(iter(running))  # or it would wait until it is cool again
        sensor.level = Level.CRITICAL
        assert engine.governor is not None
        governor = engine.governor
        wait_for(lambda: governor.refusing)
        with pytest.raises(PowerLimitError) as caught:
            engine.submit(Request(prompt="b", id="b", sampling=SHORT))
        assert caught.value.retry_after_s > 0
        report = engine.run([Request(prompt="c", sampling=SHORT)])
        assert isinstance(report.results[0].error, PowerLimitError)
        assert running.result(60).finish_reason is FinishReason.LENGTH
        assert "b" in {decision.request_id for decision in governor.decisions}
        sensor.level = Level.NOMINAL
        wait_for(lambda: not governor.refusing)
        assert engine.submit(Request(prompt="d", sampling=SHORT)).result(60).finish_reason is FinishReason.LENGTH


def test_commands_are_obeyed_during_a_rest() -> None:
    with governed(SimulatedSensor(Level.CRITICAL), refuse_from=None, duty=(1, 1, 1, 0.001), max_pause_s=30) as engine:
        handle = engine.submit(Request(prompt="a", sampling=LONG))
        next(iter(handle))
        began = time.monotonic()
        handle.abort()
        assert handle.result(60).finish_reason is FinishReason.ABORTED
        assert engine.stats().kv_held_bytes == 0
        engine.suspend()
        engine.resume()
    assert time.monotonic() - began < 15  # closing waits for no rest either


def test_a_recorded_deferral_is_replayed(tmp_path: Path) -> None:
    sensor = SimulatedSensor(Level.SERIOUS)
    path = tmp_path / "run.jsonl"
    with governed(sensor, settings={"record": str(path)}) as engine:
        low = engine.submit(Request(prompt="a", priority=Priority.LOW, sampling=SHORT))
        engine.submit(Request(prompt="b", sampling=SHORT)).result(60)
        sensor.level = Level.NOMINAL
        low.result(60)
    steps = list(replay(path))
    assert len(steps) > 20
    assert all(step.same for step in steps)


def test_a_policy_may_hold_the_batch_narrow_and_the_tokens_are_the_same(tmp_path: Path) -> None:
    def run(level: Level, record: str | None = None) -> tuple[int, list[tuple[int, ...]]]:
        policy: dict[str, Any] = {"duty": (1, 1, 1, 1), "batch": (1, 1, 0.25, 0.25)}
        with governed(SimulatedSensor(level), settings={"record": record}, **policy) as engine:
            report = engine.run([Request(prompt=str(i), sampling=SHORT) for i in range(8)])
            return max(step.batch for step in report.steps), [r.tokens for r in report.results]

    path = str(tmp_path / "run.jsonl")
    cool, hot = run(Level.NOMINAL), run(Level.SERIOUS, path)
    assert (cool[0], hot[0]) == (8, 2)
    assert cool[1] == hot[1]
    assert all(step.same for step in replay(Path(path)))


def test_the_setting_power_makes_a_governor(monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = SimulatedSensor(Level.FAIR)
    monkeypatch.setattr("shoal.power.governor.find_sensors", lambda **_: [sensor])
    config = EngineConfig(power={"duty": (1, 0.5, 0.4, 0.1), "sample_s": 0.01})
    with Engine(FakeRunner, ByteTokenizer(), config) as engine:
        assert engine.governor is not None
        assert (engine.governor.level, engine.governor.duty) == (Level.FAIR, 0.5)
        before = sensor.reads
        wait_for(lambda: sensor.reads > before)  # the sensors are read as long as the engine lives
    with pytest.raises(ConfigError, match="unknown field 'joule'"):
        Engine(FakeRunner, ByteTokenizer(), EngineConfig(power={"joule": 3}))
    with pytest.raises(ConfigError, match="power is 'hot'"):
        EngineConfig(power="hot")  # type: ignore[arg-type]


def test_two_engines_share_a_governor() -> None:
    governor = Governor([SimulatedSensor(Level.CRITICAL)])
    engines = [Engine(FakeRunner, ByteTokenizer(), governor=governor) for _ in range(2)]
    for engine in engines:
        with engine, pytest.raises(PowerLimitError):
            engine.submit(Request(prompt="a"))
    assert [d.action for d in governor.decisions].count(Action.REFUSED) == 2


def test_without_a_governor_nothing_of_it_is_imported() -> None:
    code = "import shoal, sys; from shoal.runners.fake import FakeRunner; shoal.Engine(FakeRunner).close();"
    code += "print([m for m in sys.modules if m.startswith('shoal.power')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"


def test_agents_try_again_when_the_machine_has_cooled() -> None:
    sensor = SimulatedSensor(Level.CRITICAL)
    trace = Trace()
    graph = Graph()
    graph.add(Agent("one", task="say", sampling=SHORT, on_failure=retry(9, backoff_s=0.01)))

    async def run(engine: Engine) -> None:
        running = asyncio.ensure_future(graph.run(AsyncEngine(engine), trace=trace))
        while not any(record["kind"] == "attempt" for record in trace.records):
            await asyncio.sleep(0.01)
        sensor.level = Level.NOMINAL
        assert (await running).ok

    with governed(sensor) as engine:
        assert engine.governor is not None
        engine.governor.listen(lambda decision: trace.write(decision.record()))
        asyncio.run(run(engine))
    attempts = [record for record in trace.records if record["kind"] == "attempt"]
    assert (attempts[0]["outcome"], attempts[-1]["outcome"]) == ("failed", "ok")
    assert "the machine is at its limit" in attempts[0]["cause"]
    assert "refused" in {record["action"] for record in trace.records if record.get("decision") == "governor"}
