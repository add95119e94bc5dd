"""The compiled extension, found when it is first needed."""

from __future__ import annotations

import functools
import hashlib
import importlib
from pathlib import Path
from typing import Any

from shoal.errors import BackendError


def load_core() -> Any:
    """The compiled extension. `BackendError` when this installation has none."""
    try:
        return importlib.import_module("shoal.runners.native._core")
    except ImportError as error:
        raise BackendError(
            f"the native kernels are not built ({error})",
            hint="install a C++ compiler and reinstall shoal, or use runner='openvino'",
        ) from error


@functools.cache
def core_hash() -> str:
    """A hash of the extension's file: other kernels may compute other bits."""
    return hashlib.sha256(Path(load_core().__file__).read_bytes()).hexdigest()[:16]
