"""The CUDA runner over tiny decoders, on a GPU or Triton's interpreter. Import this before anything of the runner."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `cuda` is not installed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="the extra `cuda` is not installed")

from shoal.models.decoder import Decoder  # noqa: E402
from shoal.runners.cuda.backend import load_decoder  # noqa: E402
from shoal.runners.cuda.runner import CUDARunner  # noqa: E402
from shoal.runners.plan import ScheduledSequence, Want  # noqa: E402
from tests.cuda.interpreter import mend_dot  # noqa: E402
from tests.cuda.tiny import tiny_decoder  # noqa: E402

SMALL: dict[str, Any] = {"layers": 1, "width": 64, "vocab": 70, "heads": 2, "kv_heads": 1, "ff": 64}


def load(
    decoder: Decoder, *, kv_bytes: int = 1 << 20, max_step_tokens: int = 48, max_batch: int = 2, **more: Any
) -> CUDARunner:
    """A runner of a decoder, on a GPU or the interpreter."""
    cuda = torch.cuda.is_available()
    if not cuda:
        mend_dot()
    made = load_decoder(
        decoder,
        "cuda:0" if cuda else "cpu",
        key="tiny",
        kv_bytes=kv_bytes,
        memory_bytes=None,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        **more,
    )
    assert isinstance(made, CUDARunner)
    return made


def runner(*, eight: bool = False, **form: Any) -> tuple[Decoder, CUDARunner]:
    """A small decoder of this form (see `tiny_decoder`), and its runner."""
    decoder = tiny_decoder(**(SMALL | form))
    return decoder, load(decoder, eight=eight)


def seq(seq_id: int, tokens: tuple[int, ...], start: int, table: range, want: Want = Want.LOGITS) -> ScheduledSequence:
    """One sequence of a step."""
    return ScheduledSequence(seq_id, tokens, start, tuple(table), want)
