"""How short of memory the machine is: what Linux, a container's limit and macOS tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.errors import SensorError
from shoal.power.macos import MacMemoryPressure
from shoal.power.readings import Reading, Sensor, Unit, level_of

_STALLS = (20.0, 40.0, 70.0)  # percent of the last ten seconds in which somebody waited for memory
_USED = (90.0, 95.0, 98.0)  # percent of a container's limit
_FREE = (8.0, 4.0, 2.0)  # percent of the machine's memory that can still be had
_DROPPED = ("inactive_file", "active_file", "slab_reclaimable")  # what the kernel can drop
_NO_LIMIT = 1 << 60


def own_cgroup(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Path:
    """The control group of this process (version 2), as far as it can be seen; else the root of all."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return root
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    path = root / own
    return path if own and (path / "memory.current").exists() else root


class MemoryStalls:
    """How much of the time something waited for memory, as Linux tells; of the container where there is one."""

    name = "memory stalls"

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path | None = None) -> None:
        self._paths = ((cgroup or own_cgroup()) / "memory.pressure", proc / "pressure" / "memory")
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

    def __init__(self, cgroup: Path | None = None) -> None:
        self._cgroup = cgroup or own_cgroup()
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
        used -= sum(int(stat.get(name, 0)) for name in _DROPPED)
        value = 100.0 * max(used, 0) / limit
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
