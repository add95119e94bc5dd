"""What clients of a governed server see."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from shoal import Engine, Request, SamplingParams
from shoal.engine.remote import RemoteEngine
from shoal.errors import PowerLimitError
from shoal.power import Governor, Level, SimulatedSensor
from shoal.runners.fake import ByteTokenizer, FakeRunner
from tests.support.live import Live, error_of


def test_stats_tell_of_the_governor_and_a_refusal_is_a_503_that_says_when() -> None:
    governor = Governor([SimulatedSensor(Level.CRITICAL)])
    with Live(Engine(FakeRunner, ByteTokenizer(), governor=governor)) as live:
        refused = live.chat()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert error_of(refused)["code"] == "power_limit"
        told = live.http.get("/stats").json()["power"]
        assert (told["level"], told["refusing"], told["decisions"][-1]["action"]) == ("critical", True, "refused")
        page = live.http.get("/metrics").text
        assert 'shoal_power_level{level="critical"} 1.0' in page
        assert "shoal_power_refusing 1.0" in page
        assert 'shoal_power_cause{sensor="simulated"} 1.0' in page
        paced = live.http.get("/swarmbench/state").json()["power"]
        assert paced["summary"].startswith(
            "power critical: 10% speed, background agents wait, new requests are refused"
        )
        assert (paced["level"], paced["duty"]) == ("critical", 0.1)
        assert f"shoal_power_duty {told['duty']}" in page
        for reading in told["readings"]:
            assert f'sensor="{reading["sensor"]}",unit="{reading["unit"]}"}} {float(reading["value"])}' in page

        async def work() -> None:
            async with RemoteEngine(f"{live.url}/v1") as engine:
                with pytest.raises(PowerLimitError) as caught:
                    await engine.complete(Request(prompt="x", sampling=SamplingParams(max_tokens=1)))
                assert caught.value.retry_after_s == 10

        asyncio.run(work())


def test_stats_of_an_engine_without_one_have_no_such_part() -> None:
    with Live(Engine(FakeRunner, ByteTokenizer())) as live:
        assert "power" not in live.http.get("/stats").json()
        assert "shoal_power" not in live.http.get("/metrics").text
