"""What this machine is, for `shoal doctor`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

# CPU features that decide which kernels and which precision are used, as Linux spells them.
_FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
PACKAGES = ("openvino", "mlx", "mlx-lm", "numpy", "tokenizers")


def machine_facts() -> dict[str, Any]:
    """CPU, cores this process may use, features that matter, memory in bytes, system."""
    name, flags = _cpu()
    memory = psutil.virtual_memory()
    return {
        "cpu": name,
        "cores": _usable_cores(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what is installed; None for what is not."""
    from shoal import __version__

    found: dict[str, str | None] = {"shoal": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> tuple[str, set[str]]:
    """The CPU's name and its features; where the system does not list them, none."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:  # not Linux
        return platform.processor() or platform.machine(), set()
    flags = facts.get("flags") or facts.get("Features") or ""
    return facts.get("model name") or platform.machine(), set(flags.split())
