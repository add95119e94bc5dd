"""The CUDA runner on tiny decoders, against the numpy oracle and against itself. Needs the extra `cuda`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda.runners import runner, seq  # isort: skip - first, it tells Triton where to run

from shoal.models import oracle
from shoal.runners.plan import StepPlan, Want
from tests.cuda.tiny import prompts

EVERYTHING: dict[str, Any] = {"bias": True, "sinks": True, "window": 20, "soft_cap": 20.0, "post_norms": True}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "everything": {"kind": "Q4_0", "qk_norm": False, **EVERYTHING},
    "KV in 8 bits": {"eight": True, **EVERYTHING},
}


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
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
