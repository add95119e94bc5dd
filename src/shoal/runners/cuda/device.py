"""The GPUs of this machine, asked for before torch is imported, and what people want to know of one."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_MAJOR, _MINOR = 75, 76  # attributes of cuDeviceGetAttribute
_CARVEOUT = 9  # an attribute of cuFuncSetAttribute: the preferred share of shared memory, in percent


@cache
def capabilities() -> tuple[tuple[int, int], ...]:
    """The compute capability of each GPU that the driver finds; empty without a driver."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        found.append((major.value, minor.value))
    return tuple(found)


def told(number: int) -> str:
    """One GPU in words: its name, what of its memory is free, and the driver. Imports torch and takes a context."""
    import torch

    free, total = torch.cuda.mem_get_info(number)
    name = torch.cuda.get_device_name(number)
    return f"cuda:{number}, {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {driver_version()}"


def driver_version() -> str:
    """As "driver 570.86.15" where NVML is installed (the extra `nvidia`), else the newest CUDA that the driver runs."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return f"driver {pynvml.nvmlSystemGetDriverVersion()}"
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        pass
    except pynvml.NVMLError as error:
        return f"driver unknown ({error})"
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return "driver unknown"
    return f"a driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def prefer_shared(function: int) -> None:
    """Ask for 0.8 of a processor's memory as shared memory while a kernel runs; the rest is first-level cache.

    Where neighbours ask for different shares a processor must be empty before it changes over, and none overlap.
    """
    driver = _driver()
    assert driver is not None
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, 80)


@cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library, begun; None where it is missing or finds no GPU."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None
