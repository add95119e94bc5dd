"""What the machine can do, measured on the spot: read bandwidth, matrix products, a kernel that tells heat, memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from shoal.errors import SensorError
from shoal.power.sensors import COUNTING, Found, survey

_INT8 = ("avx512_vnni", "avx_vnni", "i8mm", "amx_int8")


def measured(threads: int, features: list[str]) -> dict[str, Any]:
    """Read bandwidth in bytes a second, the best matrix product in operations a second, and that at 8 bits.

    f32 is numpy's product; bf16 is OpenVINO's, where the CPU has it. Products of 8-bit integers have twice the rate of
    bf16, four times that of f32, wherever dot products of them are instructions: that is reckoned, not measured.
    """
    f32 = gemm_f32()
    bf16 = _gemm_bf16(threads) if {"avx512_bf16", "amx_bf16", "bf16"} & set(features) else None
    int8 = max(4 * f32, 2 * (bf16 or 0.0)) if set(_INT8) & set(features) else f32
    return {
        "read_bytes_per_s": read_bandwidth(threads),
        "gemm_f32_ops_per_s": f32,
        "gemm_bf16_ops_per_s": bf16,
        "int8_ops_per_s": int8,
    }


def read_bandwidth(threads: int, size: int = 256 << 20) -> float:
    """Bytes a second that `threads` threads read together from arrays of their own; the best of a few."""
    arrays = [np.ones(size // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.bitwise_or.reduce, arrays)), 5)
    return threads * size / seconds


def gemm_f32(size: int = 1024) -> float:
    """Operations a second of numpy's float32 matrix product."""
    a = np.ones((size, size), np.float32)
    return 2 * size**3 / _best(lambda: a @ a, 10)


def _gemm_bf16(threads: int, size: int = 1024) -> float | None:
    try:
        import openvino as ov
        from openvino import opset13 as op
    except ImportError:
        return None
    given = op.parameter([size, size], np.float32)
    weight = op.constant(np.ones((size, 4 * size), np.float32))
    model = ov.Model([op.matmul(given, weight, False, False)], [given])
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    x = np.ones((size, size), np.float32)
    return 8 * size**3 / _best(lambda: request.infer({0: x}, share_inputs=True), 15)


def _best(function: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best


def calibration_s(repeats: int = 15) -> float:
    """Median seconds of a small fixed matrix product: longer when the machine is hot, throttled or shared."""
    a = np.ones((512, 512), np.float32)
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ a
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


@dataclass(frozen=True, slots=True)
class Check:
    """One look at the machine: how slow against the baseline after waiting, how long it waited, fit to measure or not.

    `before` is what it was at first sight, which tells of the run that has just ended.
    """

    before: float
    slowdown: float
    waited_s: float
    fit: bool


class ThermalGate:
    """Lets a measurement begin only when the calibration kernel is within `margin` of its baseline.

    Waits up to `wait_s` for that each time and `total_s` in a level; then it lets through and says that it was not fit.
    It is `shut` once it has waited that long in a level: something else uses this machine.
    """

    def __init__(
        self,
        *,
        margin: float = 0.25,
        wait_s: float = 20.0,
        total_s: float = 120.0,
        kernel: Callable[[], float] = calibration_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.margin = margin
        self.waited_s = 0.0
        self.waits = 0
        self._wait_s = wait_s
        self._total_s = total_s
        self._left_s = total_s
        self._kernel = kernel
        self._sleep = sleep
        self.baseline_s = min(kernel() for _ in range(5))

    @property
    def shut(self) -> bool:
        """True when it has waited in vain for as long as it may in this level."""
        return self._left_s <= 0

    def new_level(self) -> None:
        """Another level begins: it may wait again."""
        self._left_s = self._total_s

    def check(self) -> Check:
        """Look, and wait while it is not fit and there is time to wait."""
        before = slowdown = self._kernel() / self.baseline_s
        waited = 0.0
        while slowdown > 1 + self.margin and waited < self._wait_s and waited < self._left_s:
            self._sleep(1.0)
            waited += 1.0
            slowdown = self._kernel() / self.baseline_s
        self.waited_s += waited
        self._left_s -= waited
        self.waits += waited > 0
        return Check(before, slowdown, waited, slowdown <= 1 + self.margin)

    def recovery_s(self, limit_s: float) -> float | None:
        """Seconds until the kernel is within the margin again, looked at each second; None where that takes longer."""
        for waited in range(int(limit_s) + 1):
            if self._kernel() / self.baseline_s <= 1 + self.margin:
                return float(waited)
            self._sleep(1.0)
        return None

    def to_json(self) -> Mapping[str, float]:
        """For the record."""
        told = {"baseline_ms": self.baseline_s * 1e3, "margin": self.margin}
        return {**told, "waits": self.waits, "waited_s": self.waited_s}


class Energy:
    """Joules that this machine's sensors have counted since this was made: the ones that the governor reads too."""

    def __init__(self, found: Sequence[Found] | None = None) -> None:
        kinds = survey() if found is None else found
        self._sensors = [f.sensor for f in kinds if f.reading is not None and f.reading.joules is not None and f.sensor]
        self.counting = [sensor.name for sensor in self._sensors]
        self.why = {each.name: each.why for each in kinds if each.sensor is None and each.name in COUNTING}

    def joules(self) -> float | None:
        """The sum of all counters; None where none can be read."""
        told = []
        for sensor in self._sensors:
            with contextlib.suppress(SensorError):
                told.append(sensor.read().joules or 0.0)
        return sum(told) if told else None

    def to_json(self) -> dict[str, Any]:
        """Which sensors count, and why the others that could are not readable here."""
        return {"counting": self.counting, "not_readable": self.why}


class Memory:
    """The most memory a process has held since `restart`; since its start where the system cannot restart that."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def restart(self) -> None:
        """Forget the peak, where the system can."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")

    def peak(self) -> int | None:
        """Bytes; None when the process is gone."""
        try:
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:  # not Linux
            if self._pid == os.getpid() and sys.platform != "win32":
                import resource

                scale = 1 if sys.platform == "darwin" else 1024
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
        try:
            return int(psutil.Process(self._pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return None
