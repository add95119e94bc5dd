"""Triton's interpreter multiplies bf16 operands as the integers it keeps them in: here they become floats first."""

from __future__ import annotations

from typing import Any

import numpy as np


def mend_dot() -> None:
    """Patch the interpreter's product, once."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "mended", False):
        return
    plain = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.mended = True
