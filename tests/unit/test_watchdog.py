"""What the watchdog takes for a hung pass, and what it does not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.engine.watchdog import Watchdog
from shoal.errors import RunnerError
from shoal.power.governor import Action, Governor, PowerPolicy

STOPPED = """
import time
from shoal import Request, SamplingParams
from shoal.runners.fake import FakeRunner
from tests.support.engines import toy_engine

def fault(plan):  # a pass of 0.4 s that a stop does not shorten
    print("pass", flush=True)
    for _ in range(40):
        time.sleep(0.01)

with toy_engine(FakeRunner(fault=fault), watchdog_s=1.0) as engine:
    result = engine.run([Request(prompt="x", sampling=SamplingParams(max_tokens=4, ignore_eos=True))]).results[0]
    print("end", result.finish_reason, len(result.tokens), engine.closed, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal here")
def test_a_process_that_was_stopped_is_not_a_hung_pass() -> None:
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "pass\n":
                time.sleep(0.1)
                process.send_signal(signal.SIGSTOP)
                time.sleep(1.6)
                process.send_signal(signal.SIGCONT)
                break
        last = process.stdout.read().splitlines()[-1]
    assert last == "end length 4 False"


def watched(seconds: float, governor: Governor | None = None) -> list[RunnerError]:
    """What a watchdog of 0.2 s says to a pass that takes that long."""
    hangs: list[RunnerError] = []
    dog = Watchdog(0.2, hangs.append, governor)
    dog.start()
    dog.began = time.monotonic()
    time.sleep(seconds)
    dog.began = None
    dog.stop(5)
    return hangs


def test_a_pass_that_does_not_return_is_told_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    (error,) = watched(1.0)
    assert "has not returned" in str(error)
    assert error.limit == 0.2
    assert [(r.name, r.levelno) for r in caplog.records] == [("shoal.engine", logging.ERROR)]


def test_many_short_passes_are_no_long_one() -> None:
    hangs: list[RunnerError] = []
    dog = Watchdog(1.0, hangs.append, None)
    dog.start()
    for _ in range(120):
        dog.began = time.monotonic()
        time.sleep(0.01)
        dog.began = None
    dog.stop(5)
    assert not hangs


def test_a_sensor_or_listener_that_raises_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Governor):
        def sample(self) -> None:
            if hasattr(self, "ready"):
                raise ZeroDivisionError("the governor's own fault")

    governor = Broken([], PowerPolicy(sample_s=0.02))
    governor.ready = True  # type: ignore[attr-defined]
    assert len(watched(1.0, governor)) == 1
    assert caplog.text.count("ZeroDivisionError: the governor's own fault") == 1  # once, not at every sample


def test_a_sensor_that_raises_is_one_that_cannot_be_read() -> None:
    class Broken:
        name = "broken"

        def read(self) -> None:
            raise ZeroDivisionError("the sensor's own fault")

    governor = Governor([Broken()], PowerPolicy())  # type: ignore[list-item]
    assert [(d.action, "the sensor's own fault" in d.cause) for d in governor.decisions] == [(Action.BLIND, True)]


def test_a_listener_of_decisions_that_raises_is_logged_and_the_next_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def bad(decision: object) -> None:
        raise ValueError("the listener's own fault")

    heard: list[object] = []
    governor = Governor([], PowerPolicy())
    governor.listen(bad)
    governor.listen(heard.append)
    governor._decide(Action.PACE, "test")
    assert len(heard) == 1
    assert "the listener's own fault" in caplog.text
