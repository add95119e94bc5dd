"""The contract of every runner, on this one; by hand: `python -m pytest tests/cuda` (minutes on the interpreter)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cuda.runners import SMALL, load  # isort: skip - first, it tells Triton where to run

from shoal.runners.base import Runner
from tests.contract.test_runner import *  # noqa: F403 - its tests are collected here, with the fixture below
from tests.cuda.tiny import tiny_decoder

KINDS: dict[str, dict[str, Any]] = {"bf16": {}, "u8": {"eight": True}, "hybrid": {"layers": 2, "nets": (1, 2, 32, 16)}}

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """One runner of each kind for all tests."""
    form = {**SMALL, "vocab": 260, **KINDS[request.param]}
    eight = form.pop("eight", False)
    made = load(tiny_decoder(**form), kv_bytes=4 << 20, max_step_tokens=256, max_batch=8, eight=eight)
    yield made
    made.close()
