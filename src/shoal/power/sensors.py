"""Which sensors this machine has: the battery, and what the other files of this package read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SensorError
from shoal.power.linux import SYSFS, BatteryDrain, PlatformProfile, PowerProfiles, Rapl, ThermalZones, ThrottleCounters
from shoal.power.macos import LowPowerMode, ThermalPressure
from shoal.power.nvml import Nvml
from shoal.power.readings import Level, Reading, Sensor, Unit, level_of
from shoal.power.windows import BatterySaver

BATTERY = (20.0, 10.0, 5.0)  # percent left, unplugged, at which fair, serious and critical begin


COUNTING = (Rapl.name, Nvml.name, BatteryDrain.name)  # sensors that count energy where they can be read


class Battery:
    """Charge while no power comes in. `limits`: at which percentages fair, serious and critical begin, going down."""

    name = "battery"

    def __init__(self, limits: tuple[float, float, float] = BATTERY) -> None:
        fair, serious, critical = limits
        self._limits = (-fair, -serious, -critical)
        self.read()

    def read(self) -> Reading:
        """Percent left. A machine that is plugged in is nominal at any charge."""
        import psutil  # type: ignore[import-untyped, unused-ignore]

        told = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        if told is None:
            raise SensorError("there is no battery")
        plugged = told.power_plugged is not False  # None: it does not know
        level = Level.NOMINAL if plugged else level_of(-told.percent, self._limits)
        return Reading(self.name, told.percent, Unit.PERCENT, level, detail="plugged in" if plugged else "on battery")


class SimulatedSensor:
    """A sensor that tells what it was told, for tests and for trying a policy out.

    `fails`: raise `SensorError` while it is set.
    """

    def __init__(self, level: Level = Level.NOMINAL, *, name: str = "simulated", joules: float | None = None) -> None:
        self.name = name
        self.level = level
        self.joules = joules
        self.fails = False
        self.reads = 0

    def read(self) -> Reading:
        """What was last set."""
        self.reads += 1
        if self.fails:
            raise SensorError(f"{self.name} was told to fail")
        return Reading(self.name, float(self.level), Unit.NONE, self.level, self.joules)


@dataclass(frozen=True, slots=True)
class Found:
    """One kind of sensor on this machine: the sensor and what it reads now, or why there is none."""

    name: str
    sensor: Sensor | None = None
    reading: Reading | None = None
    why: str = ""


def survey(root: Path = SYSFS, battery: tuple[float, float, float] = BATTERY) -> list[Found]:
    """Every kind of sensor that is known, and whether this machine lets this user read it. Starts nothing.

    `root` is where the tree of `/sys` begins; `battery` are the limits of `Battery`.
    """
    kinds: tuple[tuple[str, Callable[[], Sensor]], ...] = (
        (ThermalPressure.name, ThermalPressure),
        (LowPowerMode.name, LowPowerMode),
        (ThermalZones.name, lambda: ThermalZones(root)),
        (ThrottleCounters.name, lambda: ThrottleCounters(root)),
        (Rapl.name, lambda: Rapl(root)),
        (BatteryDrain.name, lambda: BatteryDrain(root)),
        (PlatformProfile.name, lambda: PlatformProfile(root)),
        (PowerProfiles.name, PowerProfiles),
        (BatterySaver.name, BatterySaver),
        (Nvml.name, Nvml),
        (Battery.name, lambda: Battery(battery)),
    )
    found = []
    for name, make in kinds:
        try:
            sensor = make()
            found.append(Found(name, sensor, sensor.read()))
        except SensorError as error:
            found.append(Found(name, why=str(error)))
    return found


def find_sensors(root: Path = SYSFS, battery: tuple[float, float, float] = BATTERY) -> list[Sensor]:
    """The sensors that can be read here; there may be none, in a container say."""
    return [found.sensor for found in survey(root, battery) if found.sensor is not None]
