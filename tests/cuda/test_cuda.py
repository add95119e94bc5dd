"""The CUDA runner on tiny decoders, against the numpy oracle and against itself. Needs the extra `cuda`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda.runners import row, runner, seq, torch  # isort: skip - first, it tells Triton where to run

from shoal.errors import RunnerError
from shoal.models import oracle
from shoal.runners.plan import StepPlan, Want
from tests.cuda.tiny import prompts

EVERYTHING: dict[str, Any] = {"bias": True, "sinks": True, "window": 20, "soft_cap": 20.0, "post_norms": True}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "everything": {"kind": "Q4_0", "qk_norm": False, **EVERYTHING},
    "KV in 8 bits": {"eight": True, **EVERYTHING},
    "three heads a KV head": {"heads": 3},
    "norms in products": {"layers": 2, "width": 1024, "ff": 1024, "heads": 16, "kv_heads": 8},
    "hybrid": {"layers": 2, "nets": (2, 4, 32, 32)},
    "experts": {"mixture": {"experts": 6, "used": 2}},
    "experts, shared": {"kind": "Q8_0", "mixture": {"experts": 5, "used": 3, "shared": True, "gated": True}},
    "hybrid of experts": {
        **{"kind": "Q8_0", "layers": 2, "nets": (1, 2, 32, 16)},
        "mixture": {"experts": 4, "used": 2, "shared": True, "gated": True},
    },
    "experts, sigmoid": {"mixture": {"experts": 4, "used": 2, "scoring": "sigmoid", "selection": True, "scale": 1.5}},
    "experts, gpt-oss": {
        **{"bias": True, "sinks": True, "qk_norm": False},
        "mixture": {"experts": 4, "used": 2, "scoring": "chosen", "normalise": False, "activation": "swiglu_clipped"},
    },
}


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_prefill_agrees_with_the_oracle_and_with_itself_in_chunks_and_token_by_token(form: dict[str, Any]) -> None:
    decoder, made = runner(**form)
    prompt = prompts(1, [40], 70)[0]
    whole = row(made, seq(1, prompt, 0, range(2)))
    exact = oracle.logits(decoder, prompt)
    assert oracle.mean_kl(exact[-1:], whole[None]) < 2e-3
    made.execute(StepPlan(2, (seq(2, prompt[:38], 0, range(2, 4), Want.NOTHING),)))
    for at in (38, 39):
        decoded = row(made, seq(2, prompt[at : at + 1], at, range(2, 4)))
    if torch.cuda.is_available() or form.get("width", 0) < 1024:  # numpy's sums of long rows have no order
        assert np.array_equal(whole, decoded)
    assert oracle.mean_kl(exact[-1:], decoded[None]) < 2e-3
    made.close()


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
def test_out_of_memory_is_an_error_by_name_and_what_comes_after_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = runner()
    prompt = prompts(1, [40], 70)[0]
    whole = row(made, seq(1, prompt, 0, range(2)))
    made.execute(StepPlan(2, (seq(2, prompt[:20], 0, range(2, 3), Want.NOTHING),)))
    with monkeypatch.context() as patched:

        def fails(_: object) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        patched.setattr(made._step, "run", fails)
        with pytest.raises(RunnerError, match="out of device memory"):
            made.execute(StepPlan(3, (seq(2, prompt[20:], 20, range(2, 4)),)))
    again = row(made, seq(2, prompt[20:], 20, range(2, 4)))
    assert np.array_equal(whole, again)
    made.close()
