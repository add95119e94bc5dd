"""The first passes of a fresh runner: they make the plugin pack its weights, and find out whether results are exact.

What decides is which kernels the plugin takes for how many rows, which depends on the CPU and on the settings. Found so
far, on SmolLM2-135M: bf16 and f32 exact from two rows up on AVX512 with activations quantised; without that, bf16
differs below and above 5 rows (logits by up to 0.9), and f32 on AVX2 below and above 64 to 100 rows (by 1e-4).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.runners.plan import ScheduledSequence, SeqId, StepOutput, StepPlan, Want

BLOCKS = 8
"""Blocks the probe writes to, the first ones; their contents mean nothing before or after."""

_VERSION = 1  # raised when the probe changes, so that answers of an older one are not believed
_LENGTH = 40  # tokens of the probed sequence
_CUT = 23  # where its second run is cut in two, inside a block
_CROWD = 128  # tokens of the largest mate

Execute = Callable[[StepPlan], StepOutput]


def warm_up(execute: Execute) -> None:
    """One small pass over a block. Lets through the `RunnerError` of a CPU that cannot run what was compiled."""
    execute(StepPlan(0, (ScheduledSequence(0, (0, 1), 0, (0,), Want.ARGMAX),)))


def is_exact(execute: Execute, vocab_size: int) -> bool:
    """True when a sequence gets the same bits whole and alone as it gets in chunks and among others.

    A sample of passes of 2 to 150 rows, not a proof: the schedules of the test suite are the longer one. Needs `BLOCKS`
    blocks of at least 32 slots.
    """
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, vocab_size, _CROWD).tolist())

    def part(seq_id: SeqId, begin: int, end: int, *blocks: int, generated: int = 0) -> ScheduledSequence:
        return ScheduledSequence(seq_id, tokens[begin:end], begin, blocks, Want.LOGITS, generated)

    def first_row(*sequences: ScheduledSequence) -> NDArray[np.float32]:
        logits = execute(StepPlan(0, sequences)).logits
        return np.zeros(0, np.float32) if logits is None else logits[0].copy()

    def decoded(seq_id: SeqId, *blocks: int) -> ScheduledSequence:
        return part(seq_id, _LENGTH, _LENGTH + 1, *blocks, generated=1)

    crowd = part(3, 0, _CROWD, 4, 5, 6, 7)
    prompt = first_row(part(1, 0, _LENGTH, 0, 1))
    token = first_row(decoded(1, 0, 1))
    first_row(part(2, 0, _CUT - 1, 2, 3))
    first_row(part(2, _CUT - 1, _CUT, 2, 3))
    chunked = first_row(part(2, _CUT, _LENGTH, 2, 3), crowd)
    few, many = (first_row(decoded(2, 2, 3), mate) for mate in (part(3, 0, 7, 4), crowd))
    return np.array_equal(prompt, chunked) and np.array_equal(token, few) and np.array_equal(token, many)


def remembered(cache_dir: Path, facts: tuple[object, ...], probe: Callable[[], bool]) -> bool:
    """What `probe` says, asked once for equal `facts`. A cache that cannot be read or written only costs time."""
    path = cache_dir / f"exact-{hashlib.sha256(repr((_VERSION, *facts)).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        if isinstance(answer := json.loads(path.read_text("utf-8")), bool):
            return answer
    answer = probe()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answer), "utf-8")
    return answer
