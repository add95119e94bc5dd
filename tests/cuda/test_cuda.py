"""The CUDA runner on tiny decoders: on Triton's interpreter where there is no GPU. Needs the extra `cuda`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `cuda` is not installed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="the extra `cuda` is not installed")

from shoal.models import oracle  # noqa: E402
from shoal.models.decoder import Decoder  # noqa: E402
from shoal.runners.cuda.backend import load_decoder  # noqa: E402
from shoal.runners.plan import ScheduledSequence, StepPlan, Want  # noqa: E402
from tests.cuda.interpreter import mend_dot  # noqa: E402
from tests.cuda.tiny import prompts, tiny_decoder  # noqa: E402

SMALL: dict[str, Any] = {"layers": 1, "width": 64, "vocab": 70, "heads": 2, "kv_heads": 1, "ff": 64}
FORMS: list[dict[str, Any]] = [
    {},
    {"kind": "Q4_0", "bias": True, "sinks": True, "window": 20, "soft_cap": 20.0, "post_norms": True, "qk_norm": False},
]


def runner(**form: Any) -> tuple[Decoder, Any]:
    if not torch.cuda.is_available():
        mend_dot()
    decoder = tiny_decoder(**SMALL, **form)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return decoder, load_decoder(decoder, device, kv_bytes=1 << 20, memory_bytes=None, max_batch=2, max_step_tokens=48)


def seq(seq_id: int, tokens: tuple[int, ...], start: int, table: range, want: Want = Want.LOGITS) -> ScheduledSequence:
    return ScheduledSequence(seq_id, tokens, start, tuple(table), want)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
@pytest.mark.parametrize("form", FORMS, ids=["bf16", "everything"])
def test_prefill_agrees_with_the_oracle_and_with_itself_in_chunks_and_token_by_token(form: dict[str, Any]) -> None:
    decoder, made = runner(**form)
    prompt = prompts(1, [40], 70)[0]
    whole = made.execute(StepPlan(1, (seq(1, prompt, 0, range(2)),))).logits[0]
    exact = oracle.logits(decoder, prompt)
    assert oracle.mean_kl(exact[-1:], whole[None]) < 2e-3
    made.execute(StepPlan(2, (seq(2, prompt[:38], 0, range(2, 4), Want.NOTHING),)))
    for at in (38, 39):
        decoded = made.execute(StepPlan(3, (seq(2, prompt[at : at + 1], at, range(2, 4)),))).logits[0]
    assert np.array_equal(whole, decoded)
    made.close()
