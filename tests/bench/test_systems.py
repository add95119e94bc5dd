"""Systems on the toy model: what they run is what the jobs say, and ways that must agree do."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.systems import agents, ours
from shoal.bench.systems.agents import Agents
from shoal.bench.systems.base import Measured, Setup
from shoal.bench.systems.http import LlamaServer
from shoal.bench.systems.ours import Shoal, _where
from shoal.bench.timeline import metrics
from shoal.bench.workloads import TEXT, Job, Workload, make_jobs
from shoal.engine.loading import OpenedModel
from shoal.errors import BenchmarkError
from shoal.runners.fake import ByteTokenizer, FakeRunner

SOURCE = Measured("toy", Path("none"), 1, Path())
TOKENS = ByteTokenizer().encode(TEXT.read_text("utf-8"), add_special=False)


class Decoding(ByteTokenizer):
    """Decodes too."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenedModel(Decoding(), lambda: FakeRunner(num_blocks=1024, context_length=8192))
    monkeypatch.setattr(ours, "open_model", lambda model, config: opened)
    monkeypatch.setattr(agents, "load_tokenizer", lambda files: Decoding())
    monkeypatch.setattr("shoal.models.Store.resolve", lambda self, name: None)


@pytest.fixture
def shoal() -> Iterator[Shoal]:
    system = Shoal(SOURCE)
    yield system
    system.close()


def setup(workload: Workload, variant: str = "") -> Setup:
    return Setup(workload.batch, workload.length, workload.trunk, 1 << 20, variant)


def test_sharing_changes_counts_and_nothing_else(shoal: Shoal) -> None:
    workload = Workload("fanout", "64", 8, (20, 20), 6, 8, trunk=64)
    jobs = make_jobs(workload, TOKENS, 0)
    lines = {}
    for variant in ("", "unshared"):
        shoal.prepare(setup(workload, variant))
        lines[variant] = shoal.run(jobs)
    assert [t.tokens for t in lines[""].traces] == [t.tokens for t in lines["unshared"].traces]
    assert lines[""].facts["computed_tokens"] == 64 + 8 * 25
    assert lines["unshared"].facts["computed_tokens"] == 8 * (64 + 25)
    assert metrics(jobs, lines[""])["hit_rate"] == pytest.approx(7 * 64 / (8 * 84))
    assert shoal.run(jobs).facts["cached_tokens"] == 0, "each run begins cold"


def test_the_static_batch_writes_what_the_engine_writes(shoal: Shoal) -> None:
    workload = Workload("overhead", "3", 3, (10, 10), 8, 4)
    jobs = make_jobs(workload, TOKENS, 0)
    shoal.prepare(setup(workload))
    engine = shoal.run(jobs)
    shoal.prepare(setup(workload, "static"))
    static = shoal.run(jobs)
    assert [t.tokens for t in static.traces] == [t.tokens for t in engine.traces]
    assert [len(t.times) for t in static.traces] == [8, 8, 8]
    assert engine.facts["outside_ms"] > 0


def test_arrivals_and_schemas_are_honoured(shoal: Shoal) -> None:
    workload = Workload("x", "3", 3, (10, 10), 4, 4, rate=20.0, joining=50)
    shoal.prepare(setup(workload))
    jobs = make_jobs(workload, TOKENS, 0)
    timeline = shoal.run(jobs)
    assert all(t.times[0] >= job.arrival_s for t, job in zip(timeline.traces, jobs, strict=True))
    assert [len(t.tokens) for t in timeline.traces] == [4, 4, 4, 1]
    assert "valid" not in timeline.facts
    held = [Job(job.prompt, 80, schema={"enum": ["a", "b"]}) for job in jobs]
    assert shoal.run(held).facts["valid"] == 1


def test_an_engine_that_is_not_loaded_says_so(shoal: Shoal) -> None:
    with pytest.raises(BenchmarkError, match="not loaded"):
        shoal.run([Job((1,), 1)])


def test_a_graph_writes_the_same_in_all_its_ways() -> None:
    workload = Workload("agents", "x", 6, (60, 60), 5, 8, trunk=300, dependent=True)
    jobs = make_jobs(workload, TOKENS, 0)
    lines = {}
    for variant in Agents.VARIANTS:
        system = Agents(SOURCE)
        try:
            system.prepare(setup(workload, variant))
            assert len(system.run([jobs[0]]).traces) == 6, "one job, as for warming up, is a whole graph too"
            lines[variant] = system.run(jobs)
        finally:
            system.close()
    for line in lines.values():
        assert len(line.traces) == 6
        assert sorted(len(trace.tokens) for trace in line.traces) == [5, 5, 5, 20, 20, 20]
        assert all(trace.times[0] >= trace.arrival_s >= 0 for trace in line.traces)
    assert lines["graph"].facts["hit_rate"] > 0.5
    assert lines["independent"].facts["hit_rate"] == 0
    assert [t.tokens for t in lines["independent"].traces] == [t.tokens for t in lines["serial"].traces]
    assert [t.tokens for t in lines["graph"].traces] == [t.tokens for t in lines["serial"].traces]


FAKE_SERVER = """#!{python}
import sys
from tests.support.live import toy
from shoal.server.config import ServerConfig
from shoal.server.hub import ModelHub
from shoal.server.run import run
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
engine = toy(max_batch=int(arguments["-np"]))
run(ModelHub(lambda name: engine, arguments["-m"], engine), ServerConfig(), "127.0.0.1", int(arguments["--port"]))
"""


def test_llama_server_is_started_measured_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of that name on the PATH, which takes its options and serves the toy model."""
    program = tmp_path / "llama-server"
    program.write_text(FAKE_SERVER.format(python=sys.executable), "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert LlamaServer.missing() is None
    system: Any = LlamaServer(SOURCE)
    try:
        system.prepare(Setup(2, 64, 0, 0))
        timeline = system.run([Job(tuple(range(40, 60)), 3), Job(tuple(range(60, 70)), 2)])
        process = system._process
        assert system.pid == process.pid
    finally:
        system.close()
    assert [len(t.tokens) for t in timeline.traces] == [3, 2]
    assert process.poll() is not None


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n", "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    system = LlamaServer(SOURCE)
    with pytest.raises(BenchmarkError, match="did not start"):
        system.prepare(Setup(2, 64, 0, 0))
    system.close()


def test_threads_are_set_only_where_the_runner_reads_them() -> None:
    """`shoal bench --runner mlx` was refused for a setting that nobody had asked for."""
    for runner, sets in {"native": True, "auto": True, "mlx": False, "cuda": False}.items():
        found = _where(Measured("toy", Path("none"), 3, Path(), options={"runner": runner}), 3)
        assert found == ({"runner": runner, "threads": 3} if sets else {"runner": runner})
