from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from shoal import FinishReason, Namespace, Priority, Request, SamplingParams
from shoal.core.commands import (
    Abort,
    Add,
    CancelExpectation,
    Command,
    Commit,
    Defer,
    Expect,
    Fail,
    Forget,
    Hold,
    JudgedTokens,
    Keep,
    KeepCached,
    PreemptAll,
    PreemptLow,
    Restore,
    Schedule,
    SetMaxRunning,
    SetMaxStall,
    Share,
    Unpin,
)
from shoal.core.request import RequestSpec
from shoal.core.tiers import Tier
from shoal.engine.record import replay
from shoal.errors import InvalidRequestError, ModelFormatError, RunnerError, StoreError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.wire import from_json, to_json
from tests.support.engines import toy_engine

SHARED = "the same beginning " * 8


def recorded(path: Path) -> None:
    runner = FakeRunner(num_blocks=24, step_s=0.05)  # slow enough that the parent still writes when it is forked
    with toy_engine(runner, max_batch=3, max_step_tokens=64, record=str(path)) as engine:
        pinned = engine.cache_prefix(SHARED)
        forked = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True)
        handle = engine.submit(Request(prompt="forked", sampling=forked))
        next(iter(handle))
        handle.fork(1)[0].abort()
        runner.step_s = 0.0
        sampling = SamplingParams(max_tokens=30, temperature=0.7, stop=("e",))
        engine.run([Request(prompt=f"{SHARED}{i}", sampling=sampling) for i in range(6)])
        engine.set_max_stall(1.0)
        engine.submit(Request(prompt="decoding while", sampling=SamplingParams(max_tokens=40)))
        engine.run([Request(prompt="a long prompt joins " * 20, sampling=sampling)])
        engine.suspend(drop_kv=True)
        engine.resume()
        pinned.release()
        engine.run([Request(prompt="last")])
        handle.abort()


def test_a_replay_plans_every_step_the_same(tmp_path: Path) -> None:
    recorded(tmp_path / "log")
    steps = list(replay(tmp_path / "log"))
    assert len(steps) > 40
    assert all(step.same for step in steps)
    assert sum(len(step.joined) for step in steps) >= 9
    assert {reason for step in steps for _, reason in step.left} >= {"stop"}


def test_every_command_comes_back_from_its_line(tmp_path: Path) -> None:
    """A command that the record could not tell would be lost to the replay."""
    sampling = SamplingParams(max_tokens=3, temperature=0.5, logit_bias={7: -1.5}, stop=("a", "b"), stop_token_ids=(4,))
    space = Namespace("task", "agent", 3)
    spec = RequestSpec(prompt=(1, 2), sampling=sampling, id="r", priority=Priority.LOW, namespace=space, deadline_s=2.5)
    item = ScheduledSequence(1, (1, 2), 0, (3, 4), Want.TOP, 1, load=None, save=2, top=5)
    plan = StepPlan(9, (item,), copies=((1, 2),), chain=2)
    commands: list[Command] = [
        Add(1, spec, 0.25, (5, 6), 1),
        Abort(1, FinishReason.TIMEOUT),
        Schedule(1.5),
        Commit(plan, {1: JudgedTokens((7, 8), 1, FinishReason.STOP), 2: JudgedTokens((1,), 1)}, 2.5, 3.5),
        Share(1),
        Unpin(1),
        Expect((1, 2), space, 4),
        CancelExpectation((1, 2), space, 4),
        Keep((1, 2), space, 9.5),
        Hold(1, held=True),
        Restore(1, 2, 3, Tier.DISK, state=True),
        Forget((4, 5)),
        PreemptAll(drop_cached=True),
        PreemptLow(),
        KeepCached(False),
        Defer(True),
        SetMaxRunning(3),
        SetMaxStall(20.0),
    ]
    for command in commands:
        assert from_json(json.loads(json.dumps(to_json(command))), type(command)) == command
    fail = Fail((1, 2), RunnerError("device lost", hint="load it again"))
    assert str(from_json(to_json(fail), Fail).error) == "device lost: load it again"
    assert {type(command) for command in [*commands, fail]} == set(get_args(Command))


def test_what_comes_back_is_checked() -> None:
    assert from_json({"max_tokens": 3}, SamplingParams) == SamplingParams(max_tokens=3)
    with pytest.raises(ValueError, match="max_tokens"):
        from_json({"max_tokens": "3"}, SamplingParams)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        from_json({"max_tokens": -3}, SamplingParams)
    with pytest.raises(ValueError, match="prompt"):
        from_json({"sampling": {}}, RequestSpec)


def test_a_replay_notices_another_schedule(tmp_path: Path) -> None:
    recorded(tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    begin = json.loads(lines[0])
    begin["config"]["max_step_tokens"] = 48
    (tmp_path / "log").write_text("\n".join([json.dumps(begin), *lines[1:]]))
    assert not all(step.same for step in list(replay(tmp_path / "log"))[:6])


def test_broken_and_missing_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no record can be read"):
        list(replay(tmp_path / "none"))
    recorded(tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    for damage in (
        ['{"kind": "begin", "version": 2}'],
        [],
        [*lines[:3], '{"kind": "Sing"}'],
        [*lines[:3], lines[3][:-9]],
    ):
        (tmp_path / "broken").write_text("\n".join(damage))
        with pytest.raises(ModelFormatError, match="is broken"):
            list(replay(tmp_path / "broken"))
    (tmp_path / "old").write_text('{"kind": "begin", "spec": {}, "config": {}}\n')
    with pytest.raises(ModelFormatError, match="has version 1 and this release reads version 2"):
        list(replay(tmp_path / "old"))
    with pytest.raises(StoreError, match="cannot be written"):
        toy_engine(record=str(tmp_path / "no" / "dir" / "log"))


def test_the_command_shows_a_recording_step_by_step(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from shoal.cli.main import app

    recorded(tmp_path / "log")
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "log"), "--limit", "5"])
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert len(lines) == 6
    assert "+1:64@0" in lines[0]
    assert lines[-1].endswith("0 planned otherwise than recorded")


def test_a_log_on_a_full_disk_ends_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    with toy_engine(record="/dev/full") as engine:
        results = engine.run([Request(prompt="x", sampling=SamplingParams(max_tokens=5))]).results
        assert results[0].error is None
    assert engine.failure is None
    assert caplog.text.count("the record cannot be written") == 1
