"""What Linux tells under `/sys`, without root but for RAPL. Every class takes the root of the tree, for tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.errors import SensorError
from shoal.power.readings import AskedNowAndThen, Level, Reading, Unit, level_of

SYSFS = Path("/sys")
_NO_TRIPS = (80.0, 90.0, 97.0)  # where a zone names no critical temperature; CPUs throttle at 95 to 105 °C
_BELOW_CRITICAL = (25.0, 12.0, 5.0)  # degrees below a zone's own critical point


class ThermalZones:
    """The zone that is nearest to its limit. Zones that cannot be read now are passed over; some sleep, some lie."""

    name = "thermal zones"

    def __init__(self, root: Path = SYSFS) -> None:
        self._zones = [
            (zone, _text(zone / "type") or zone.name, _limits(zone))
            for zone in sorted((root / "class/thermal").glob("thermal_zone*"))
            if _celsius(zone / "temp") is not None
        ]
        if not self._zones:
            raise SensorError("no thermal zone can be read", value=str(root / "class/thermal"))

    def read(self) -> Reading:
        """The worst zone of now: by level, then by how near it is to critical."""
        worst: tuple[Level, float, Reading] | None = None
        for zone, kind, limits in self._zones:
            degrees = _celsius(zone / "temp")
            if degrees is None:
                continue
            level = level_of(degrees, limits)
            reading = Reading(self.name, degrees, Unit.CELSIUS, level, detail=kind)
            if worst is None or (level, degrees - limits[2]) > worst[:2]:
                worst = (level, degrees - limits[2], reading)
        if worst is None:
            raise SensorError("no thermal zone can be read any more", value=len(self._zones))
        return worst[2]


def _limits(zone: Path) -> tuple[float, float, float]:
    """Where fair, serious and critical begin: below the zone's critical trip point, if it has one that makes sense."""
    for kind in sorted(zone.glob("trip_point_*_type")):
        if _text(kind) == "critical":
            trip = _celsius(kind.with_name(kind.name.replace("_type", "_temp")))
            if trip is not None and trip > 40:
                fair, serious, critical = (trip - below for below in _BELOW_CRITICAL)
                return fair, serious, critical
    return _NO_TRIPS


class ThrottleCounters:
    """How often the cores were slowed for heat since the last reading. Any such event means the limit is reached."""

    name = "throttle counters"

    def __init__(self, root: Path = SYSFS) -> None:
        self._files = sorted((root / "devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count"))
        if not self._files:
            raise SensorError("the processor has no throttle counters", value=str(root / "devices/system/cpu"))
        self._last = self._total()

    def read(self) -> Reading:
        """Events since the last reading; serious when there are any."""
        total = self._total()
        events, self._last = max(total - self._last, 0), total
        return Reading(self.name, events, Unit.EVENTS, Level.SERIOUS if events else Level.NOMINAL)

    def _total(self) -> int:
        # Every core of a package repeats the package's count; that only counts its events more than once.
        counts = [_number(file) for file in self._files]
        known = [count for count in counts if count is not None]
        if not known:
            raise SensorError("the throttle counters cannot be read", value=str(self._files[0]))
        return int(sum(known))


class Rapl:
    """Energy of the processor packages, from their own counters (RAPL). Most systems let only root read them."""

    name = "RAPL"

    def __init__(self, root: Path = SYSFS) -> None:
        # Domains inside a package (intel-rapl:0:1) are part of it, and psys contains the packages.
        found = [
            zone / "energy_uj"
            for zone in sorted((root / "class/powercap").glob("intel-rapl:[0-9]*"))
            if zone.name.count(":") == 1 and (_text(zone / "name") or "").startswith("package")
        ]
        if not found:
            raise SensorError("the processor has no energy counters", value=str(root / "class/powercap"))
        self._files = [file for file in found if _number(file) is not None]
        if not self._files:
            hint = "let this user read it, or run as root"
            raise SensorError(f"{found[0]} cannot be read", value=str(found[0]), hint=hint)
        self._last = [self._counter(file) for file in self._files]
        self._ranges = [_number(file.with_name("max_energy_range_uj")) or 2.0**32 for file in self._files]
        self._joules = 0.0

    def read(self) -> Reading:
        """Joules since the sensor was made. Counters that wrapped once in between are understood."""
        now = [self._counter(file) for file in self._files]
        for new, old, span in zip(now, self._last, self._ranges, strict=True):
            self._joules += (new - old if new >= old else new + span - old) / 1e6
        self._last = now
        return Reading(self.name, self._joules, Unit.JOULES, joules=self._joules)

    @staticmethod
    def _counter(file: Path) -> float:
        value = _number(file)
        if value is None:
            raise SensorError(f"{file} cannot be read any more", value=str(file))
        return value


class BatteryDrain:
    """Energy that has left the batteries since the sensor was made, as their gauges count it: in steps of some joules.

    While power comes in nothing leaves them, and nothing is counted.
    """

    name = "battery drain"

    def __init__(self, root: Path = SYSFS) -> None:
        self._supplies = [
            supply
            for supply in sorted((root / "class/power_supply").glob("*"))
            if _text(supply / "type") == "Battery" and self._left(supply) is not None
        ]
        if not self._supplies:
            raise SensorError("no battery tells the energy left in it", value=str(root / "class/power_supply"))
        self._last = self._total()
        self._joules = 0.0

    def read(self) -> Reading:
        """Joules since the sensor was made."""
        now = self._total()
        self._joules += max(self._last - now, 0.0)
        self._last = now
        return Reading(self.name, self._joules, Unit.JOULES, joules=self._joules)

    def _total(self) -> float:
        found = [left for supply in self._supplies if (left := self._left(supply)) is not None]
        if not found:
            raise SensorError("the batteries tell nothing any more", value=len(self._supplies))
        return sum(found)

    @staticmethod
    def _left(supply: Path) -> float | None:
        """Joules left: from microwatt-hours, or from microampere-hours at the voltage of a full battery."""
        energy = _number(supply / "energy_now")
        if energy is not None:
            return energy * 3600e-6
        charge, volts = _number(supply / "charge_now"), _number(supply / "voltage_min_design")
        return None if charge is None or volts is None else charge * 3600e-6 * volts * 1e-6


class PlatformProfile:
    """The low-power switch of a laptop's firmware, as the desktop's power menu sets it."""

    name = "platform profile"

    def __init__(self, root: Path = SYSFS) -> None:
        self._file = root / "firmware/acpi/platform_profile"
        self.read()

    def read(self) -> Reading:
        """1 and fair when the user has asked for low power."""
        profile = _text(self._file)
        if profile is None:
            raise SensorError("the firmware has no power profiles", value=str(self._file))
        low = profile in ("low-power", "quiet")
        return Reading(self.name, float(low), Unit.NONE, Level.FAIR if low else Level.NOMINAL, detail=profile)


class PowerProfiles(AskedNowAndThen):
    """The profile that a desktop's power menu asks of power-profiles-daemon (or tuned, which speaks for it).

    The firmware's own switch (`PlatformProfile`) is only there on some laptops; this one is on every machine with the
    daemon.
    """

    name = "power profiles"
    command = ("powerprofilesctl", "get")

    def __init__(self) -> None:
        if shutil.which(self.command[0]) is None:
            raise SensorError("power-profiles-daemon is not installed", value=self.command[0])
        super().__init__()

    def understand(self, told: str) -> Reading:
        """1 and fair while the user has asked to save power."""
        profile = told.strip()
        if not profile:
            raise SensorError("power-profiles-daemon tells no profile", value=told)
        low = profile == "power-saver"
        return Reading(self.name, float(low), Unit.NONE, Level.FAIR if low else Level.NOMINAL, detail=profile)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):  # absent, not ours to read, or a driver that is asleep
        return None


def _number(file: Path) -> float | None:
    text = _text(file)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _celsius(file: Path) -> float | None:
    """Degrees from a file in thousandths of them; None for values that no working sensor gives."""
    value = _number(file)
    return value / 1e3 if value is not None and 0 < value < 200_000 else None
