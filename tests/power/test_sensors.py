"""Sensors on made-up trees of `/sys` and made-up answers of systems that are not here."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import SensorError
from shoal.power import Governor, Level, PowerPolicy, Unit, find_sensors, survey
from shoal.power.linux import BatteryDrain, PlatformProfile, PowerProfiles, Rapl, ThermalZones, ThrottleCounters
from shoal.power.macos import LowPowerMode, ThermalPressure, low_power, pressure
from shoal.power.nvml import Nvml
from shoal.power.sensors import Battery
from shoal.power.windows import BatterySaver, PowerStatus


def write(root: Path, path: str, text: object) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
    return file


def zone(root: Path, number: int, kind: str, degrees: float, critical: float | None = None) -> Path:
    base = f"class/thermal/thermal_zone{number}"
    write(root, f"{base}/type", kind)
    if critical is not None:
        write(root, f"{base}/trip_point_0_type", "passive")
        write(root, f"{base}/trip_point_0_temp", 1000)
        write(root, f"{base}/trip_point_1_type", "critical")
        write(root, f"{base}/trip_point_1_temp", int(critical * 1000))
    return write(root, f"{base}/temp", int(degrees * 1000))


@pytest.mark.parametrize(
    ("degrees", "level"),
    [(79, Level.NOMINAL), (80, Level.FAIR), (92.9, Level.FAIR), (93, Level.SERIOUS), (100, Level.CRITICAL)],
)
def test_a_zone_is_judged_by_its_own_critical_point(tmp_path: Path, degrees: float, level: Level) -> None:
    zone(tmp_path, 0, "x86_pkg_temp", degrees, critical=105)
    reading = ThermalZones(tmp_path).read()
    assert (reading.level, reading.value, reading.unit, reading.detail) == (
        level, degrees, Unit.CELSIUS, "x86_pkg_temp",
    )  # fmt: skip
    assert str(reading) == f"thermal zones {degrees:.4g} °C (x86_pkg_temp)"


def test_the_zone_nearest_to_its_limit_counts_and_liars_do_not(tmp_path: Path) -> None:
    zone(tmp_path, 0, "phone battery", 46, critical=60)  # 14 below its limit
    hot = zone(tmp_path, 1, "cpu", 81)  # hotter, but 16 below the usual one
    zone(tmp_path, 2, "broken", -274)
    zone(tmp_path, 3, "silly", 3000)
    sensor = ThermalZones(tmp_path)
    assert sensor.read().detail == "phone battery"
    hot.write_text("98000\n")
    assert (sensor.read().detail, sensor.read().level) == ("cpu", Level.CRITICAL)
    hot.write_text("asleep\n")
    assert sensor.read().detail == "phone battery"
    (tmp_path / "class/thermal/thermal_zone0/temp").unlink()
    with pytest.raises(SensorError, match="any more"):
        sensor.read()


def test_any_throttle_event_since_the_last_reading_is_serious(tmp_path: Path) -> None:
    base = "devices/system/cpu/cpu{}/thermal_throttle/core_throttle_count"
    files = [write(tmp_path, base.format(i), 5) for i in range(2)]
    sensor = ThrottleCounters(tmp_path)
    assert sensor.read().level is Level.NOMINAL
    files[1].write_text("7\n")
    reading = sensor.read()
    assert (reading.value, reading.level) == (2, Level.SERIOUS)
    assert sensor.read().level is Level.NOMINAL


def test_rapl_counts_packages_once_and_survives_a_wrap(tmp_path: Path) -> None:
    for name, label in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys"),
                        ("intel-rapl:0:0", "core"), ("intel-rapl-mmio:0", "package-0")):  # fmt: skip
        write(tmp_path, f"class/powercap/{name}/name", label)
        write(tmp_path, f"class/powercap/{name}/energy_uj", 1_000_000)
        write(tmp_path, f"class/powercap/{name}/max_energy_range_uj", 10_000_000)
    sensor = Rapl(tmp_path)
    assert sensor.read().joules == 0
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", 4_000_000)
    write(tmp_path, "class/powercap/intel-rapl:0:0/energy_uj", 4_000_000)
    write(tmp_path, "class/powercap/intel-rapl:2/energy_uj", 9_000_000)
    assert sensor.read().joules == pytest.approx(3)
    write(tmp_path, "class/powercap/intel-rapl:1/energy_uj", 500_000)  # wrapped: 9.5 J on
    assert sensor.read().joules == pytest.approx(12.5)


def test_rapl_that_only_root_may_read_says_so(tmp_path: Path) -> None:
    write(tmp_path, "class/powercap/intel-rapl:0/name", "package-0")
    (tmp_path / "class/powercap/intel-rapl:0/energy_uj").mkdir()  # unreadable also for root
    with pytest.raises(SensorError, match=r"energy_uj cannot be read: let this user read it"):
        Rapl(tmp_path)


def test_low_power_switches() -> None:
    assert low_power(" lowpowermode         1\n").level is Level.FAIR
    assert low_power("Active Profiles:\n powermode 0\n").level is Level.NOMINAL
    with pytest.raises(SensorError):
        low_power("AC Power\n sleep 1\n")


def test_the_platform_profile(tmp_path: Path) -> None:
    file = write(tmp_path, "firmware/acpi/platform_profile", "balanced")
    sensor = PlatformProfile(tmp_path)
    assert sensor.read().level is Level.NOMINAL
    file.write_text("low-power\n")
    assert (sensor.read().level, sensor.read().value) == (Level.FAIR, 1.0)


def test_thermal_pressure_through_libsystem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two calls with the arguments that notify(3) documents; the library itself is on Macs only."""
    state = {"level": 0, "status": 0}

    class System:
        def notify_register_check(self, name: bytes, token: Any) -> int:
            assert name == b"com.apple.system.thermalpressurelevel"
            token._obj.value = 7
            return state["status"]

        def notify_get_state(self, token: Any, value: Any) -> int:
            assert token.value == 7
            value._obj.value = state["level"]
            return state["status"]

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda path: System())
    sensor = ThermalPressure()
    assert sensor.read().level is Level.NOMINAL
    state["level"] = 2
    assert str(sensor.read()) == "thermal pressure 2 (heavy)"
    state["status"] = 1
    with pytest.raises(SensorError, match="any more"):
        sensor.read()
    with pytest.raises(SensorError, match="does not tell"):
        ThermalPressure()


def test_low_power_mode_asks_pmset_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if len(asked) > 2:
            raise FileNotFoundError("pmset")
        return SimpleNamespace(stdout=f" lowpowermode         {len(asked) - 1}\n")

    clock = [0.0]
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    sensor = LowPowerMode()
    assert [sensor.read().level for _ in range(20)] == [Level.NOMINAL] * 20
    assert asked == [["/usr/bin/pmset", "-g"]]
    clock[0] = 31.0
    assert sensor.read().level is Level.FAIR
    clock[0] = 62.0
    with pytest.raises(SensorError, match="cannot be asked"):
        sensor.read()


def test_macos_words() -> None:
    levels = [pressure(state).level for state in range(6)]
    assert levels == [Level.NOMINAL, Level.FAIR, Level.SERIOUS, Level.CRITICAL, Level.CRITICAL, Level.CRITICAL]
    assert pressure(2).detail == "heavy"


@pytest.mark.parametrize(
    ("percent", "plugged", "level"),
    [(90, False, Level.NOMINAL), (20, False, Level.FAIR), (10, False, Level.SERIOUS), (5, False, Level.CRITICAL),
     (5, True, Level.NOMINAL), (5, None, Level.NOMINAL)],
)  # fmt: skip
def test_the_battery(monkeypatch: pytest.MonkeyPatch, percent: float, plugged: bool | None, level: Level) -> None:
    told = SimpleNamespace(percent=percent, power_plugged=plugged)
    monkeypatch.setattr("psutil.sensors_battery", lambda: told, raising=False)
    assert Battery().read().level is level


def test_a_machine_without_a_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    with pytest.raises(SensorError, match="no battery"):
        Battery()


def gpus(monkeypatch: pytest.MonkeyPatch, *degrees: float) -> dict[str, Any]:
    """NVML as its binding gives it, with GPUs of these temperatures."""
    state: dict[str, Any] = {"degrees": list(degrees), "millijoules": 1e6, "reasons": 0, "fails": False}
    error = type("NVMLError", (Exception,), {})

    def temperature(gpu: int, kind: int) -> float:
        if state["fails"]:
            raise error("GPU is lost")
        return float(state["degrees"][gpu])

    fake = SimpleNamespace(
        NVMLError=error,
        NVML_TEMPERATURE_GPU=0,
        NVML_TEMPERATURE_THRESHOLD_SLOWDOWN=1,
        nvmlClocksThrottleReasonHwThermalSlowdown=64,
        nvmlClocksThrottleReasonSwThermalSlowdown=32,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(degrees),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetTemperature=temperature,
        nvmlDeviceGetTemperatureThreshold=lambda gpu, kind: 87,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: state["reasons"],
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: state["millijoules"],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return state


def test_gpus_heat_throttling_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpus(monkeypatch, 40, 71)
    sensor = Nvml()
    reading = sensor.read()
    assert (reading.level, reading.value, reading.joules, reading.detail) == (Level.NOMINAL, 71, 0, "GPU 1")
    state["degrees"][0] = 86
    state["millijoules"] += 2500
    reading = sensor.read()
    assert (reading.level, reading.joules, reading.detail) == (Level.CRITICAL, 5.0, "GPU 0")
    state["degrees"][0] = 40
    state["reasons"] = 32
    assert sensor.read().level is Level.SERIOUS
    state["fails"] = True
    with pytest.raises(SensorError, match="GPU is lost"):
        sensor.read()


def test_the_real_binding_without_a_gpu_is_a_sensor_error() -> None:
    pynvml = pytest.importorskip("pynvml", reason="the extra `nvidia` is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(SensorError, match="no NVIDIA GPU"):
            Nvml()
    else:
        assert Nvml().read().value > 0


def test_a_survey_names_every_kind_and_why_it_is_not_there(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu", 50)
    found = {each.name: each for each in survey(tmp_path)}
    assert found["thermal zones"].reading is not None
    assert found["thermal zones"].reading.value == 50
    assert found["RAPL"].sensor is None
    assert "energy counters" in found["RAPL"].why
    assert all(each.sensor is not None or each.why for each in found.values())
    assert "thermal zones" in {sensor.name for sensor in find_sensors(tmp_path)}


def test_power_profiles_daemon_is_asked_as_its_menu_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the daemon's name on the PATH, which prints what the real one prints."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SensorError, match="not installed"):
        PowerProfiles()
    program = tmp_path / "powerprofilesctl"
    program.write_text('#!/bin/sh\n[ "$1" = get ] && echo power-saver\n')
    program.chmod(0o755)
    reading = PowerProfiles().read()
    assert (reading.level, reading.detail) == (Level.FAIR, "power-saver")
    program.write_text("#!/bin/sh\necho performance\n")
    assert PowerProfiles().read().level is Level.NOMINAL
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SensorError, match="cannot be asked"):
        PowerProfiles()


def test_the_battery_saver_of_windows_through_kernel32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call with the structure that the Windows API documents; the library itself is on Windows only."""
    state = {"saver": 0, "ok": 1}

    def ask(status: Any) -> int:
        status._obj.saver = state["saver"]
        return state["ok"]

    monkeypatch.setattr("sys.platform", "win32")
    library = SimpleNamespace(GetSystemPowerStatus=ask)
    monkeypatch.setattr("ctypes.WinDLL", lambda name: library, raising=False)
    sensor = BatterySaver()
    assert sensor.read().level is Level.NOMINAL
    state["saver"] = 1
    assert (sensor.read().level, sensor.read().value) == (Level.FAIR, 1.0)
    state["ok"] = 0
    with pytest.raises(SensorError, match="does not tell"):
        sensor.read()
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(SensorError, match="only Windows"):
        BatterySaver()
    assert ctypes.sizeof(PowerStatus) == 12


def test_the_limits_of_the_battery_are_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace(percent=45.0, power_plugged=False)
    monkeypatch.setattr("psutil.sensors_battery", lambda: half, raising=False)
    assert Battery().read().level is Level.NOMINAL
    governor = Governor(policy=PowerPolicy(battery=(90, 50, 10)))
    assert governor.level is Level.SERIOUS
    assert governor.summary == "power serious: 40% speed, background agents wait (battery 45 % (on battery))"


def test_batteries_count_what_leaves_them(tmp_path: Path) -> None:
    with pytest.raises(SensorError, match="no battery tells"):
        BatteryDrain(tmp_path)
    write(tmp_path, "class/power_supply/AC/type", "Mains")
    write(tmp_path, "class/power_supply/BAT0/type", "Battery")
    write(tmp_path, "class/power_supply/BAT0/energy_now", 10_000_000)  # microwatt-hours: 36 kJ
    write(tmp_path, "class/power_supply/BAT1/type", "Battery")
    write(tmp_path, "class/power_supply/BAT1/charge_now", 1_000_000)  # an ampere-hour
    write(tmp_path, "class/power_supply/BAT1/voltage_min_design", 10_000_000)
    sensor = BatteryDrain(tmp_path)
    write(tmp_path, "class/power_supply/BAT0/energy_now", 9_900_000)
    assert sensor.read().joules == pytest.approx(360)
    write(tmp_path, "class/power_supply/BAT1/charge_now", 999_000)
    assert sensor.read().joules == pytest.approx(396)
    write(tmp_path, "class/power_supply/BAT0/energy_now", 10_000_000)  # it is being charged
    assert sensor.read().joules == pytest.approx(396)
