"""What Windows tells: whether its battery saver is on. (The charge itself comes from `Battery`, on every system.)"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from shoal.errors import SensorError
from shoal.power.readings import Level, Reading, Unit


class PowerStatus(ctypes.Structure):
    """`SYSTEM_POWER_STATUS` of the Windows API."""

    _fields_ = (
        ("ac_line", ctypes.c_ubyte),
        ("battery", ctypes.c_ubyte),
        ("percent", ctypes.c_ubyte),
        ("saver", ctypes.c_ubyte),  # 1 while the battery saver is on
        ("seconds_left", ctypes.c_uint32),
        ("seconds_full", ctypes.c_uint32),
    )


class BatterySaver:
    """The battery saver, which a user or a low charge switches on; a reading is one call of kernel32."""

    name = "battery saver"

    def __init__(self) -> None:
        if sys.platform != "win32":
            raise SensorError("only Windows tells it", value=sys.platform)
        self._ask: Any = getattr(ctypes, "WinDLL")("kernel32").GetSystemPowerStatus  # noqa: B009 - Windows' own
        self.read()

    def read(self) -> Reading:
        """1 and fair while it is on."""
        status = PowerStatus()
        if not self._ask(ctypes.byref(status)):
            raise SensorError("Windows does not tell its power status", value=0)
        return saver(status.saver)


def saver(flag: int) -> Reading:
    """The reading of `SYSTEM_POWER_STATUS.SystemStatusFlag`."""
    on = flag == 1
    return Reading(BatterySaver.name, float(on), Unit.NONE, Level.FAIR if on else Level.NOMINAL)
