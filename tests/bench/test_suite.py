"""The whole path on the real model in small: processes, levels, fidelity, document, command line, report."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from typer.testing import CliRunner

from shoal.bench import report, tables
from shoal.bench.results import Results, figure
from shoal.bench.shapes import write_shape
from shoal.bench.systems.base import Measured
from shoal.bench.worker import Worker
from shoal.cli.main import app
from shoal.errors import BenchmarkError, ModelNotFoundError
from shoal.models import Store


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`shoal bench --scenario fanout --quick`, and what it prints last."""
    try:
        Store().resolve("smollm2-135m", pull=False)
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")
    out = tmp_path_factory.mktemp("bench") / "fanout.json"
    options = ["--scenario", "fanout", "--runs", "1", "--quick", "--peers", "", "--margin", "100", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.bench.harness._PAUSE_S", 0.0)
        made = CliRunner().invoke(app, ["bench", *options])
    assert made.exit_code == 0, made.output
    told: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    assert told == json.loads(out.read_text("utf-8"))
    return told


def test_sharing_computes_the_trunk_once_and_changes_no_output(document: dict[str, Any]) -> None:
    level = Results(document).level("fanout", "1000")
    assert level is not None
    trunk, branches = 125, 8
    on, off = figure(level, "shoal", "computed_tokens"), figure(level, "shoal:unshared", "computed_tokens")
    assert on is not None
    assert off is not None
    fed = branches * (8 + 4 - 1)  # prompts of 8 behind the trunk, 4 written, the last not fed
    assert (on.median, off.median) == (trunk + fed, branches * trunk + fed)
    assert level["equality"]["shoal:unshared"] == {"equal": 8, "of": 8, "common_tokens": 4.0}


def test_the_document_holds_machine_model_and_fidelity(document: dict[str, Any]) -> None:
    assert document["machine"]["read_bytes_per_s"] > 1e8
    assert document["machine"]["versions"]["shoal"]
    assert len(document["model"]["sha256"]) == 64
    shoal = document["systems"]["shoal"]
    assert shoal["fidelity"]["mean_kl"] < 0.01
    assert shoal["configuration"]["max_step_tokens"] == 512
    assert shoal["cold"]["load_s"] > 0
    assert document["quick"] is True


def test_a_report_of_it_says_that_it_was_quick(document: dict[str, Any]) -> None:
    results = Results(document)
    assert "This is a quick run" in report.markdown(results, "x.json")
    assert "A quick run" in tables.readme(results)


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    worker = Worker("shoal", Measured("no-such-model", tmp_path / "none.gguf", 1, tmp_path))
    try:
        with pytest.raises(BenchmarkError, match="no-such-model"):
            worker.ask("fidelity", exact="none", tokens=[1])
        worker.kill()
        with pytest.raises(BenchmarkError, match="ended"):
            worker.ask("describe")
    finally:
        worker.close()


def test_a_worker_that_is_killed_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has started would run for ever: nobody else knows of it."""
    waits = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (tmp_path / "worker.py").write_text(f"{waits}; print('{{}}', flush=True); input(); input()", "utf-8")
    real = subprocess.Popen
    made: list[subprocess.Popen[str]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        made.append(real([sys.executable, str(tmp_path / "worker.py")], **options))
        return made[0]

    monkeypatch.setattr("shoal.bench.worker.subprocess.Popen", start)
    worker = Worker("shoal", Measured("any", tmp_path / "none.gguf", 1, tmp_path))
    (server,) = psutil.Process(made[0].pid).children()
    worker.kill()
    assert psutil.wait_procs([server], 10) == ([server], [])
    worker.close()


def test_a_shape_is_measured_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr("shoal.bench.harness._PAUSE_S", 0.0)
    monkeypatch.setattr("shoal.bench.suite.write_shape", partial(write_shape, layers=1))
    options = ["--shape", "smollm2-135m", "--format", "q4_0", "--scenario", "serve", "--runs", "1", "--quick"]
    made = CliRunner().invoke(app, ["bench", *options, "--margin", "100"])
    assert made.exit_code == 0, made.output
    told: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    assert (told["model"]["file"], told["model"]["random_weights"]) == ("smollm2-135m-q4_0.gguf", True)
    assert told["systems"]["shoal"]["fidelity"] == {}
    level = Results(told).level("serve", "1")
    assert level is not None
    assert figure(level, "shoal", "tokens_per_s") is not None
    assert "## Over HTTP" in made.stderr
    assert set(told["systems"]) <= {"shoal", "shoal-http", "shoal-agents"}  # no peer takes part in this scenario
    both = CliRunner().invoke(app, ["bench", "--shape", "smollm2-135m", "--model", "other"])
    assert both.exit_code != 0
    assert "two models" in both.output
