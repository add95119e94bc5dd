"""What an engine gives up when its machine is short of memory, and takes back when that eases.

fair      KV that nobody uses goes to the disk, if there is one, and its memory back to the system
serious   requests of class low wait too, and give up their KV
critical  new requests are refused
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.commands import KeepCached, PreemptLow
from shoal.core.scheduler import Scheduler
from shoal.engine.kv.tiering import Tiering
from shoal.errors import MemoryPressureError, SensorError
from shoal.power.readings import Level, Reading, Sensor
from shoal.runners.base import Runner

log = logging.getLogger("shoal.engine")

_HOLD_S = 10.0  # the sensors must be better that long before something is taken back
_SLICES = 256  # copied out at most before KV is dropped


class MemoryWatch:
    """Turns the readings of sensors into a level: up at once, down after a while of better readings.

    `sample` is called by a thread that is not an engine's; `on_change` is called on it too. A sensor that fails counts
    as nominal.
    """

    def __init__(self, sensors: Sequence[Sensor], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.level = Level.NOMINAL
        self.on_change: Callable[[], None] = _do_nothing
        self._sensors = list(sensors)
        self._clock = clock
        self._readings: tuple[Reading, ...] = ()
        self._better_since: float | None = None

    def sample(self) -> None:
        """Read the sensors and settle the level."""
        readings = []
        for sensor in self._sensors:
            try:
                readings.append(sensor.read())
            except SensorError:
                continue
        self._readings = tuple(readings)
        worst = max((reading.level for reading in readings), default=Level.NOMINAL)
        now = self._clock()
        if worst >= self.level:
            self._better_since = None
        elif self._better_since is None:
            self._better_since = now
        if worst > self.level or (self._better_since is not None and now - self._better_since >= _HOLD_S):
            self._settle(worst)

    def _settle(self, level: Level) -> None:
        self._better_since = None
        log.warning("memory of the machine: %s, was %s (%s)", level, self.level, self._told())
        self.level = level
        self.on_change()

    def _told(self) -> str:
        return "; ".join(str(reading) for reading in self._readings) or "no sensor"

    def admit(self) -> None:
        """Raise `MemoryPressureError` while nothing new is taken."""
        if self.level is Level.CRITICAL:
            message = f"the machine is out of memory ({self._told()})"
            raise MemoryPressureError(message, value=self._told(), limit=str(self.level), retry_after_s=_HOLD_S)

    def describe(self) -> dict[str, Any]:
        """The level and what led to it, for JSON."""
        readings = [
            {"sensor": r.sensor, "value": round(r.value, 2), "unit": str(r.unit), "level": str(r.level)}
            for r in self._readings
        ]
        return {"level": str(self.level), "readings": readings}


class Relief:
    """Carries out, on the engine's thread and between steps, what a level asks for."""

    def __init__(self, watch: MemoryWatch, scheduler: Scheduler, runner: Runner) -> None:
        self._watch = watch
        self._scheduler = scheduler
        self._runner = runner
        self._done = Level.NOMINAL

    @property
    def deferring(self) -> bool:
        """Whether class low is to wait."""
        return self._done >= Level.SERIOUS

    def look(self, tiering: Tiering | None) -> None:
        """Do what the level of now asks for, if it has changed."""
        level = self._watch.level
        if level is self._done:
            return
        before, self._done = self._done, level
        if level and not before:
            self._give_up(tiering)
        elif before and not level:
            self._scheduler.apply(KeepCached(True))
            if tiering is not None:
                tiering.grow_host()
        if level >= Level.SERIOUS > before:
            self._scheduler.apply(PreemptLow())
        if level:
            self._discard()

    def _give_up(self, tiering: Tiering | None) -> None:
        if tiering is not None:
            for _ in range(_SLICES):
                if not tiering.copy_out():
                    break
            tiering.empty_host()
        self._scheduler.apply(KeepCached(False))

    def _discard(self) -> None:
        access = self._runner.access
        if access is not None:
            kv = self._scheduler.kv
            access.discard_blocks(kv.pool.free_blocks, kv.windows.free if kv.windows is not None else ())


def _do_nothing() -> None:
    """Nobody is to be told."""
