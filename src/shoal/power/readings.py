"""What a sensor tells: one value, what it means for the machine, and energy where it counts any."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol


class Level(IntEnum):
    """How hard the machine is pressed, in the words that Apple's systems use."""

    NOMINAL = 0  # nothing to do
    FAIR = 1  # warm: slower would be kind
    SERIOUS = 2  # hot, or the battery is low: only what matters
    CRITICAL = 3  # about to throttle hard or to shut down: nothing new

    def __str__(self) -> str:
        return self.name.lower()


class Unit(StrEnum):
    """What `Reading.value` counts."""

    CELSIUS = "°C"
    EVENTS = "throttle events"
    JOULES = "J"
    PERCENT = "%"
    NONE = ""  # a step of a scale, a switch


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at one sensor.

    `level` is the sensor's own judgement of `value`. `joules` is the energy it has counted since it was made, which
    never falls; None for sensors that count none. `detail` says which part of the machine it was, or in which state.
    """

    sensor: str
    value: float
    unit: Unit
    level: Level = Level.NOMINAL
    joules: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = f"({self.detail})" if self.detail else ""
        return " ".join(part for part in (self.sensor, f"{self.value:.4g}", str(self.unit), where) if part)


class Sensor(Protocol):
    """Reads one thing. Its constructor raises `SensorError` when this machine does not tell it.

    `read` may take some milliseconds; it is never called on an engine's thread. It raises `SensorError`, nothing else.
    """

    name: str

    def read(self) -> Reading:
        """The value of now."""
        ...


def level_of(value: float, limits: tuple[float, float, float]) -> Level:
    """The level of a value that is worse the higher it is; `limits` are where fair, serious and critical begin."""
    return Level(sum(value >= limit for limit in limits))
