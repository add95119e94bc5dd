"""What a sensor tells: one value, what it means for the machine, and energy where it counts any."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Protocol

from shoal.errors import SensorError

_COMMAND_TIMEOUT_S = 2.0
_ASK_EVERY_S = 30.0


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


class AskedNowAndThen:
    """A sensor behind a command of the system, which is a process of its own: asked at most twice a minute.

    A subclass has a `name` and `command`, and makes a reading of what that prints in `understand`.
    """

    name = ""
    command: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._last = self._ask()

    def read(self) -> Reading:
        """What the command said last; up to half a minute old."""
        now = time.monotonic()
        if now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            self._last = self._ask()
        return self._last

    def understand(self, told: str) -> Reading:
        """The reading of what the command prints. SensorError when it does not tell."""
        raise NotImplementedError

    def _ask(self) -> Reading:
        try:
            told = subprocess.run(
                list(self.command), capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SensorError(f"{Path(self.command[0]).name} cannot be asked: {error}") from error
        return self.understand(told.stdout)


def level_of(value: float, limits: tuple[float, float, float]) -> Level:
    """The level of a value that is worse the higher it is; `limits` are where fair, serious and critical begin."""
    return Level(sum(value >= limit for limit in limits))
