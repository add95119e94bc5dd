"""The memory of the machine: what the sensors tell, what is given up for it, and what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.engine.engine import Engine
from shoal.engine.inflight import RequestState
from shoal.engine.inputs import InputProcessor
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.host import HostTier
from shoal.engine.kv.tiering import Tiering
from shoal.engine.loop import StepLoop
from shoal.engine.pressure import MemoryWatch
from shoal.errors import MemoryPressureError, SensorError
from shoal.power.macos import mac_pressure
from shoal.power.memory import AvailableMemory, ContainerMemory, MemoryStalls, find_memory_sensors, own_cgroup
from shoal.power.readings import Level
from shoal.power.sensors import SimulatedSensor
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.types import Priority, Request, SamplingParams


class Machine:
    """A loop whose machine has as much memory as it is told, on a clock that is turned by hand."""

    def __init__(self, *, host: int | None = None) -> None:
        self.now = 0.0
        self.sensor = SimulatedSensor()
        self.watch = MemoryWatch([self.sensor], clock=lambda: self.now)
        self.runner = FakeRunner(num_blocks=64, block_size=8)
        inputs = InputProcessor(self.runner.spec, ByteTokenizer(), 0)
        self.loop = StepLoop(self.runner, inputs, EngineConfig(), memory=self.watch)
        if host is not None:
            self.loop.tiering = Tiering(self.loop.scheduler, self.runner, HostTier(host), None, Buffers(64, 0))

    def at(self, level: Level, seconds: float = 0.0) -> None:
        self.now += seconds
        self.sensor.level = level
        self.watch.sample()

    def add(self, first: int, count: int = 4, priority: Priority = Priority.NORMAL) -> RequestState:
        prompt = tuple(range(first, first + 30))
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(prompt_tokens=prompt, sampling=sampling, priority=priority)
        return self.loop.add(str(first), self.loop.inputs.prepare(request), lambda event: None)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()
            check_integrity(self.loop.scheduler)

    def drain(self) -> None:
        while not self.loop.idle:
            self.steps(1)


def test_kv_that_nobody_uses_goes_first_and_its_memory_to_the_system() -> None:
    machine = Machine()
    machine.add(1)
    machine.drain()
    pool = machine.loop.scheduler.kv.pool
    assert pool.num_cached > 0
    machine.at(Level.FAIR)
    machine.steps(1)
    assert pool.num_cached == 0
    assert not any(any(block) for block in machine.runner._kv), "what is free was given back"
    machine.add(1)
    machine.drain()
    assert pool.num_cached == 0, "nothing is kept while memory is short"
    machine.at(Level.NOMINAL)
    machine.at(Level.NOMINAL, seconds=11.0)
    machine.add(1)
    machine.drain()
    assert pool.num_cached > 0


def test_it_goes_to_the_next_tier_and_host_memory_is_emptied_too() -> None:
    machine = Machine(host=1 << 20)
    machine.add(1)
    machine.drain()
    tiering = machine.loop.tiering
    assert tiering is not None
    assert tiering.host is not None
    machine.loop.copy_out()
    assert tiering.host.bytes > 0
    machine.at(Level.SERIOUS)
    machine.steps(1)
    assert (tiering.host.bytes, tiering.host.limit) == (0, 0)
    machine.at(Level.NOMINAL)
    machine.at(Level.NOMINAL, seconds=11.0)
    machine.steps(1)
    assert tiering.host.limit == 1 << 20


def test_then_class_low_waits_and_goes_on_with_the_same_tokens() -> None:
    calm = Machine()
    expected = calm.add(1, 20, Priority.LOW)
    calm.drain()
    machine = Machine()
    low, high = machine.add(1, 20, Priority.LOW), machine.add(60, 40)
    machine.steps(5)
    machine.at(Level.SERIOUS)
    written = len(low.seq.tokens)
    machine.steps(10)
    assert len(low.seq.tokens) == written
    assert not low.seq.blocks
    assert len(high.seq.tokens) > 40
    machine.at(Level.NOMINAL)
    machine.at(Level.NOMINAL, seconds=11.0)
    machine.drain()
    assert low.seq.tokens == expected.seq.tokens


def test_a_level_goes_up_at_once_and_down_after_a_while() -> None:
    machine = Machine()
    levels = []
    for level, seconds in (
        (Level.CRITICAL, 0.0),
        (Level.NOMINAL, 1.0),
        (Level.NOMINAL, 8.0),
        (Level.SERIOUS, 3.0),
    ):
        machine.at(level, seconds)
        levels.append(machine.watch.level)
    assert levels == [Level.CRITICAL, Level.CRITICAL, Level.CRITICAL, Level.SERIOUS]
    machine.sensor.fails = True
    machine.at(Level.CRITICAL)
    machine.at(Level.CRITICAL, seconds=11.0)
    assert machine.watch.level is Level.NOMINAL, "a sensor that fails counts as nominal"


def test_at_last_new_requests_are_refused_and_taken_again() -> None:
    sensor, now = SimulatedSensor(), [0.0]
    watch = MemoryWatch([sensor], clock=lambda: now[0])
    request = Request(prompt="abc", sampling=SamplingParams(max_tokens=2))
    with Engine(FakeRunner, ByteTokenizer(), EngineConfig(), memory=watch) as engine:
        engine._thread.watchdog.stop(5.0)  # samples are this test's
        engine.complete(request)
        sensor.level = Level.CRITICAL
        watch.sample()
        with pytest.raises(MemoryPressureError, match=r"out of memory.*retry in") as caught:
            engine.submit(request)
        assert (caught.value.retry_after_s, caught.value.limit) == (10.0, "critical")
        sensor.level = Level.NOMINAL
        watch.sample()
        now[0] = 20.0
        watch.sample()
        engine.complete(request)


def test_what_linux_tells(tmp_path: Path) -> None:
    with pytest.raises(SensorError):
        MemoryStalls(tmp_path, tmp_path)
    (tmp_path / "memory.pressure").write_text("some avg10=46.50 avg60=3.00 avg300=0.10 total=99\nfull avg10=1.0\n")
    reading = MemoryStalls(tmp_path, tmp_path).read()
    assert (reading.value, reading.level) == (46.5, Level.SERIOUS)


@pytest.mark.parametrize(
    ("used", "cached", "level"), [(50, 0, 0), (95, 20, 0), (92, 0, 1), (96, 0, 2), (99, 0, 3), (99, 20, 0)]
)
def test_what_a_container_tells(tmp_path: Path, used: int, cached: int, level: int) -> None:
    with pytest.raises(SensorError):
        ContainerMemory(tmp_path)
    (tmp_path / "memory.high").write_text("max\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{used << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached << 20}\n")
    with pytest.raises(SensorError, match="limits"):
        ContainerMemory(tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    assert ContainerMemory(tmp_path).read().level == level


def test_the_own_group_is_asked_where_it_can_be_seen(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    assert own_cgroup(proc, root) == root
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/user.slice/app\n")
    assert own_cgroup(proc, root) == root
    (root / "user.slice" / "app").mkdir(parents=True)
    (root / "user.slice" / "app" / "memory.current").write_text("1")
    assert own_cgroup(proc, root) == root / "user.slice" / "app"


def test_what_macos_and_the_system_tell() -> None:
    assert [mac_pressure(value).level for value in (1, 2, 4)] == [Level.NOMINAL, Level.SERIOUS, Level.CRITICAL]
    assert 0 < AvailableMemory().read().value <= 100
    assert "available memory" in [sensor.name for sensor in find_memory_sensors()]
