"""What people see of KV outside the device: `shoal models kv`, the server's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.doctor import _kv_cache, _show_kv_cache
from shoal.cli.main import app
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.kv.opening import kv_root
from shoal.engine.pressure import MemoryWatch
from shoal.power.readings import Level
from shoal.power.sensors import SimulatedSensor
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.types import Request, SamplingParams
from tests.support.engines import toy_engine

TEXT = "what was asked before " * 20


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))


def shoal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", "kv", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_kept_is_listed_and_cleared() -> None:
    assert "no KV is kept" in shoal()
    with toy_engine(kv_cache="1MiB") as engine:
        engine.complete(Request(prompt=TEXT, sampling=SamplingParams(max_tokens=2)))
    told = json.loads(shoal("--json"))
    assert [(one["model"], one["runner"], one["blocks"]) for one in told["kept"]] == [("fake", "fake", 13)]
    assert "fake (fake, u64)" in shoal()
    assert "13 blocks" in shoal()
    facts = _kv_cache()
    assert facts["writable"]
    assert "fake" in _show_kv_cache(facts)
    assert TEXT[:20].encode() not in b"".join(f.read_bytes() for f in kv_root().rglob("*") if f.is_file())
    assert "freed" in shoal("--clear")
    assert json.loads(shoal("--json"))["kept"] == []


def test_a_server_tells_where_cached_tokens_came_from() -> None:
    pytest.importorskip("fastapi")
    from tests.support.live import Live

    for before in (0, 13):
        sensor = SimulatedSensor()
        watch = MemoryWatch([sensor])
        engine = Engine(FakeRunner, ByteTokenizer(), EngineConfig(kv_cache="1MiB"), memory=watch)
        with Live(engine) as server:
            answer = server.post("/v1/completions", {"model": "toy", "prompt": TEXT, "max_tokens": 2})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == before * 32
            told = server.http.get("/stats").json()
            assert told["engine"]["tiers"]["restored_disk_blocks"] == before
            assert told["memory"]["level"] == "nominal"
            page = server.http.get("/metrics").text
            assert f"shoal_kv_restored_disk_blocks_total {before}.0" in page
            assert f'shoal_restored_tokens_total{{tier="disk"}} {before * 32}.0' in page
            assert "shoal_kv_disk_fault 0.0" in page
            sensor.level = Level.CRITICAL
            watch.sample()
            refused = server.post("/v1/completions", {"model": "toy", "prompt": TEXT, "max_tokens": 2})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_pressure")
            assert int(refused.headers["retry-after"]) == 10
            assert "shoal_memory_level 3.0" in server.http.get("/metrics").text
