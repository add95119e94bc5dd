from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal import Request, SamplingParams
from shoal.engine.record import replay
from shoal.errors import ModelFormatError, StoreError
from shoal.runners.fake import FakeRunner
from tests.support.engines import toy_engine

SHARED = "the same beginning " * 8


def recorded(path: Path) -> None:
    with toy_engine(FakeRunner(num_blocks=24), max_batch=3, max_step_tokens=64, record=str(path)) as engine:
        pinned = engine.cache_prefix(SHARED)
        handle = engine.submit(Request(prompt="forked", sampling=SamplingParams(max_tokens=200, temperature=1.0)))
        next(iter(handle))
        handle.fork(1)[0].abort()
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
    (tmp_path / "broken").write_text('{"kind": "begin"}\n')
    with pytest.raises(ModelFormatError, match="is broken"):
        list(replay(tmp_path / "broken"))
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
