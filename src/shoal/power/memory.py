"""How short of memory the machine is: what Linux, a container's limit and macOS tell."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.errors import SensorError
from shoal.power.readings import Level, Reading, Sensor, Unit, level_of

_STALLS = (10.0, 25.0, 50.0)  # percent of the last ten seconds in which somebody waited for memory
_USED = (90.0, 95.0, 98.0)  # percent of a container's limit
_FREE = (8.0, 4.0, 2.0)  # percent of the machine's memory that can still be had
_NO_LIMIT = 1 << 60


class MemoryStalls:
    """How much of the time something waited for memory, as Linux tells; of the container where there is one."""

    name = "memory stalls"

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._paths = (cgroup / "memory.pressure", proc / "pressure" / "memory")
        self.read()

    def read(self) -> Reading:
        """Percent of the last ten seconds."""
        for path in self._paths:
            try:
                told = path.read_text()
            except OSError:
                continue
            for word in told.split():
                if word.startswith("avg10="):  # of the line `some`, which is the first
                    value = float(word.removeprefix("avg10="))
                    return Reading(self.name, value, Unit.PERCENT, level_of(value, _STALLS))
        raise SensorError("this kernel does not tell how long memory is waited for")


class ContainerMemory:
    """How much of a container's limit is used (cgroup v2), without the files in cache that the kernel can drop."""

    name = "container memory"

    def __init__(self, cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._cgroup = cgroup
        self.read()

    def read(self) -> Reading:
        """Percent of the limit."""
        try:
            limits = [(self._cgroup / name).read_text().strip() for name in ("memory.max", "memory.high")]
            used = int((self._cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (self._cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError) as error:
            raise SensorError(f"no container tells its memory: {error}") from error
        limit = min((int(value) for value in limits if value.isdecimal()), default=_NO_LIMIT)
        if limit >= _NO_LIMIT:
            raise SensorError("no container limits memory")
        value = 100.0 * max(used - int(stat.get("inactive_file", 0)), 0) / limit
        return Reading(self.name, value, Unit.PERCENT, level_of(value, _USED), detail=f"of {limit >> 20:,} MiB")


class AvailableMemory:
    """How much of the machine's memory can still be had."""

    name = "available memory"

    def __init__(self) -> None:
        self.read()

    def read(self) -> Reading:
        """Percent of all."""
        import psutil  # type: ignore[import-untyped, unused-ignore]

        told = psutil.virtual_memory()
        value = 100.0 * told.available / told.total
        level = level_of(-value, (-_FREE[0], -_FREE[1], -_FREE[2]))
        return Reading(self.name, value, Unit.PERCENT, level, detail=f"of {told.total >> 20:,} MiB")


class MacMemoryPressure:
    """The level at which macOS asks applications for memory: 1 (normal), 2 (warning), 4 (critical)."""

    name = "memory pressure"
    _KEY = b"kern.memorystatus_vm_pressure_level"

    def __init__(self) -> None:
        if sys.platform != "darwin":
            raise SensorError("only macOS tells it", value=sys.platform)
        self._system = ctypes.CDLL("/usr/lib/libSystem.dylib")
        self.read()

    def read(self) -> Reading:
        """The level; a warning is serious, since macOS has compressed memory long before."""
        value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        if self._system.sysctlbyname(self._KEY, ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
            raise SensorError("macOS does not tell its memory pressure")
        return mac_pressure(value.value)


def mac_pressure(value: int) -> Reading:
    """The reading of a level that macOS tells."""
    level = Level.CRITICAL if value >= 4 else Level.SERIOUS if value >= 2 else Level.NOMINAL
    return Reading(MacMemoryPressure.name, float(value), Unit.NONE, level)


def find_memory_sensors() -> list[Sensor]:
    """Those that can be read here."""
    kinds: tuple[Callable[[], Sensor], ...] = (MemoryStalls, ContainerMemory, MacMemoryPressure, AvailableMemory)
    found: list[Sensor] = []
    for make in kinds:
        try:
            found.append(make())
        except SensorError:
            continue
    return found
