"""What is said of a GPU, with modules in the place of torch and NVML."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shoal.runners.cuda import device


class _NvmlError(Exception):
    pass


def _module(name: str, **facts: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(facts)
    return made


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda number: (130 << 30, 139 << 30), get_device_name=lambda number: f"Card {number}"
    )
    monkeypatch.setitem(sys.modules, "torch", _module("torch", cuda=cuda))


@pytest.mark.usefixtures("_gpu")
def test_name_free_memory_and_driver_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    nvml = _module(
        "pynvml",
        NVMLError=_NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: ended.append(1),
        nvmlSystemGetDriverVersion=lambda: "570.86.15",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert device.told(1) == "cuda:1, Card 1, 130.0 of 139.0 GiB free, driver 570.86.15"
    assert ended == [1]


@pytest.mark.usefixtures("_gpu")
def test_without_nvml_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def version(found: object) -> int:
        found._obj.value = 12080  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(device, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=version))
    assert device.told(0).endswith("GiB free, a driver for CUDA 12.8")


def test_nvml_that_fails_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise _NvmlError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", _module("pynvml", NVMLError=_NvmlError, nvmlInit=fails))
    assert device.driver_version() == "driver unknown (no driver)"
