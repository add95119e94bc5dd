"""NVIDIA GPUs through NVML (`pip install 'shoal[nvidia]'`): temperature, throttling, energy."""

from __future__ import annotations

import atexit
from typing import Any

from shoal.errors import SensorError
from shoal.power.readings import Level, Reading, Unit, level_of

_BELOW_SLOWDOWN = (15.0, 7.0, 2.0)  # degrees below the point where the GPU slows itself
_USUAL_SLOWDOWN = 90.0  # where a GPU does not tell that point
_HEAT = ("nvmlClocksThrottleReasonHwThermalSlowdown", "nvmlClocksThrottleReasonSwThermalSlowdown")


class Nvml:
    """All GPUs of the machine: the hottest one's temperature, and what they have used together."""

    name = "NVML"

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise SensorError("nvidia-ml-py is not installed", hint="pip install 'shoal[nvidia]'") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            atexit.register(pynvml.nvmlShutdown)
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise SensorError(f"there is no NVIDIA GPU to ask: {error}") from error
        if not self._gpus:
            raise SensorError("there is no NVIDIA GPU", value=0, limit=1)
        self._limits = [self._limits_of(gpu) for gpu in self._gpus]
        self._start = self._millijoules()

    def read(self) -> Reading:
        """The worst GPU's temperature; serious at least while the driver says that heat slows one."""
        try:
            looks = [self._look(i) for i in range(len(self._gpus))]
        except self._nvml.NVMLError as error:
            raise SensorError(f"NVML does not answer: {error}") from error
        level, degrees, index = max(looks)
        total = self._millijoules()
        joules = None if total is None or self._start is None else (total - self._start) / 1e3
        return Reading(self.name, degrees, Unit.CELSIUS, Level(level), joules, f"GPU {index}")

    def _look(self, index: int) -> tuple[Level, float, int]:
        nvml, gpu = self._nvml, self._gpus[index]
        degrees = float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        level = level_of(degrees, self._limits[index])
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        if any(reasons & getattr(nvml, name) for name in _HEAT):
            level = max(level, Level.SERIOUS)
        return level, degrees, index

    def _limits_of(self, gpu: Any) -> tuple[float, float, float]:
        nvml = self._nvml
        try:
            slowdown = float(nvml.nvmlDeviceGetTemperatureThreshold(gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
        except nvml.NVMLError:
            slowdown = _USUAL_SLOWDOWN
        fair, serious, critical = (slowdown - below for below in _BELOW_SLOWDOWN)
        return fair, serious, critical

    def _millijoules(self) -> float | None:
        """What all GPUs have used since the driver was loaded; None where one does not count it."""
        try:
            return float(sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus))
        except self._nvml.NVMLError:
            return None
