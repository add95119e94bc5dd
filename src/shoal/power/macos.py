"""What macOS tells without root: the thermal pressure that the system itself acts on, and low-power mode."""

from __future__ import annotations

import ctypes
import sys

from shoal.errors import SensorError
from shoal.power.readings import AskedNowAndThen, Level, Reading, Unit

_KEY = b"com.apple.system.thermalpressurelevel"
_WORDS = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # OSThermalPressureLevel on macOS, 0 to 4
_LEVELS = (Level.NOMINAL, Level.FAIR, Level.SERIOUS, Level.CRITICAL, Level.CRITICAL)


class ThermalPressure:
    """The state of a Darwin notification, from libSystem; a reading is one system call."""

    name = "thermal pressure"

    def __init__(self) -> None:
        _only_macos()
        try:
            self._system = ctypes.CDLL("/usr/lib/libSystem.dylib")
        except OSError as error:
            raise SensorError(f"libSystem cannot be loaded: {error}") from error
        self._token = ctypes.c_int()
        status = self._system.notify_register_check(_KEY, ctypes.byref(self._token))
        if status != 0:
            raise SensorError("macOS does not tell its thermal pressure", value=status, limit=0)

    def read(self) -> Reading:
        """0 (nominal) to 4 (sleeping)."""
        state = ctypes.c_uint64()
        status = self._system.notify_get_state(self._token, ctypes.byref(state))
        if status != 0:
            raise SensorError("macOS does not tell its thermal pressure any more", value=status, limit=0)
        return pressure(state.value)


def pressure(state: int) -> Reading:
    """The reading of a state of the notification; one that is not known yet counts as the worst known."""
    known = min(state, len(_LEVELS) - 1)
    return Reading(ThermalPressure.name, state, Unit.NONE, _LEVELS[known], detail=_WORDS[known])


class MacMemoryPressure:
    """The level at which macOS asks applications for memory: 1 (normal), 2 (warning), 4 (critical)."""

    name = "memory pressure"
    _KEY = b"kern.memorystatus_vm_pressure_level"

    def __init__(self) -> None:
        _only_macos()
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


class LowPowerMode(AskedNowAndThen):
    """Whether the user has switched low-power mode on; `pmset` tells."""

    name = "low-power mode"
    command = ("/usr/bin/pmset", "-g")

    def __init__(self) -> None:
        _only_macos()
        super().__init__()

    def understand(self, told: str) -> Reading:
        """1 and fair when it is on."""
        return low_power(told)


def low_power(told: str) -> Reading:
    """The reading of what `pmset -g` prints. SensorError when it has no such line (a Mac without the mode)."""
    for line in told.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] in ("lowpowermode", "powermode"):
            on = words[1] == "1"
            return Reading(LowPowerMode.name, float(on), Unit.NONE, Level.FAIR if on else Level.NOMINAL)
    raise SensorError("pmset does not tell of a low-power mode", value=told[:200])


def _only_macos() -> None:
    if sys.platform != "darwin":
        raise SensorError("only macOS tells it", value=sys.platform)
