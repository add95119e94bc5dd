"""The thermal gate, and what is measured of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shoal.bench.machine import Energy, Memory, ThermalGate, calibration_s, gemm_f32, read_bandwidth
from shoal.power.sensors import Found, SimulatedSensor


def gate(times: list[float], **settings: float) -> tuple[ThermalGate, list[float]]:
    """A gate whose kernel takes these times after five of a second, the last for ever; and what it slept."""
    following: Iterator[float] = iter([1.0] * 5 + times)
    slept: list[float] = []
    last = times[-1]
    return ThermalGate(kernel=lambda: next(following, last), sleep=slept.append, **settings), slept


def test_a_cool_machine_passes_at_once() -> None:
    made, slept = gate([1.1])
    check = made.check()
    assert (check.fit, check.waited_s, slept) == (True, 0.0, [])
    assert check.before == 1.1


def test_a_hot_machine_waits_until_it_is_cool() -> None:
    made, slept = gate([1.5, 1.4, 1.3, 1.05])
    check = made.check()
    assert (check.fit, check.before, check.slowdown, check.waited_s) == (True, 1.5, 1.05, 3.0)
    assert len(slept) == 3
    assert made.to_json()["waits"] == 1


def test_waiting_is_bounded_each_time_and_in_all() -> None:
    made, slept = gate([2.0], wait_s=4.0, total_s=6.0)
    assert not made.check().fit
    assert len(slept) == 4
    assert not made.check().fit
    assert len(slept) == 6
    assert not made.check().fit
    assert made.waited_s == 6.0


def test_energy_is_counted_by_the_governors_sensors() -> None:
    counter, blind = SimulatedSensor(joules=2.5, name="RAPL"), SimulatedSensor(joules=1.0, name="NVML")
    found = [Found(each.name, each, each.read()) for each in (counter, blind)]
    found += [Found("battery", SimulatedSensor(), SimulatedSensor().read()), Found("battery drain", why="no battery")]
    energy = Energy(found)
    assert energy.joules() == 3.5
    blind.fails = True
    assert energy.joules() == 2.5
    assert energy.to_json() == {"counting": ["RAPL", "NVML"], "not_readable": {"battery drain": "no battery"}}
    assert Energy([Found("RAPL", why="root only")]).joules() is None


def test_what_is_measured_is_a_rate() -> None:
    assert read_bandwidth(1, size=8 << 20) > 1e8
    assert gemm_f32(128) > 1e8
    assert 0 < calibration_s(2) < 60


def test_peak_memory_sees_what_was_held_and_let_go() -> None:
    memory = Memory(os.getpid())
    memory.restart()
    before = memory.peak()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    del block
    after = memory.peak()
    assert before is not None
    assert after is not None
    assert after - before > 32 << 20
