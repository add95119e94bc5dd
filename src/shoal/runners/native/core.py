"""The compiled extension, found when it is first needed."""

from __future__ import annotations

import functools
import hashlib
import importlib
from pathlib import Path
from typing import Any

from shoal.errors import BackendError

_BINDING = Path(__file__).parent / "csrc" / "binding.cpp"
"""What Python and the extension say to each other; where a checkout is installed, for wheels have no sources."""
INSTALL = "reinstall shoal (with SHOAL_NATIVE=1 pip says why it cannot build them), or use runner='openvino'"
"""What to do where the kernels are missing."""


def load_core() -> Any:
    """The compiled extension. `BackendError` when this installation has none, or one of other sources."""
    try:
        core = importlib.import_module("shoal.runners.native._core")
    except ImportError as error:
        raise BackendError(
            f"the native kernels are not built ({error})",
            hint=INSTALL,
        ) from error
    built, wanted = getattr(core, "binding", "none"), _binding_hash()
    if wanted not in (built, None):
        raise BackendError(
            "the native kernels were built from other sources than these: build them again with "
            "`python scripts/native_build.py`",
            value=built,
            limit=wanted,
            hint="python scripts/native_build.py, or use runner='openvino'",
        )
    return core


@functools.cache
def _binding_hash() -> str | None:
    """Of the sources beside this file; None where there are none."""
    return hashlib.sha256(_BINDING.read_bytes()).hexdigest() if _BINDING.exists() else None


@functools.cache
def core_hash() -> str:
    """A hash of the extension's file: other kernels may compute other bits."""
    return hashlib.sha256(Path(load_core().__file__).read_bytes()).hexdigest()[:16]
