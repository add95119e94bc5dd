"""Directories with safetensors on the native kernels: tiny ones of every family, against the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.models import oracle
from shoal.models.files import local_files
from shoal.runners.native import describe
from shoal.runners.native.runner import NativeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel
from tests.parity.test_native_mixers import rounded
from tests.support.native_tiny import isas
from tests.support.tiny_hub import HUB, unfolded, write_directory
from tests.support.tiny_models import some_tokens

pytestmark = pytest.mark.skipif(not isas(), reason="the native kernels are not built")


@pytest.mark.parametrize(("name", "activation"), [*((name, None) for name in HUB), ("qwen3", "gelu")])
def test_a_directory_gives_what_the_oracle_gives(name: str, activation: str | None, tmp_path: Path) -> None:
    about = unfolded(name)
    if activation is not None:
        about["config"]["hidden_act"] = activation
    model = LocalModel.read(local_files(name, write_directory(tmp_path / "model", about)))
    decoder = model.decoder()
    reason = describe.refuses(decoder)
    if reason is not None:
        pytest.skip(f"refused by name: {reason}")
    runner = NativeRunner.load(model, kv_bytes=8 << 20, cache_dir=tmp_path)
    tokens = tuple(some_tokens())
    plan = StepPlan(1, (ScheduledSequence(1, tokens, 0, tuple(range(-(-len(tokens) // 32))), Want.LOGITS),))
    found = runner.execute(plan).logits
    runner.close()
    assert found is not None
    with rounded():
        exact = oracle.logits(decoder, tokens)[-1:]
    assert oracle.mean_kl(exact, found) < 1e-3
    assert exact[0].max() - exact[0][int(np.argmax(found))] < 1e-2
