from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from shoal.engine.engine import Engine
from shoal.errors import ShoalError
from tests.support.live import Live, toy

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """The toy model, served; shared by the tests of a module."""
    with Live(toy()) as server:
        yield server


@pytest.fixture
def slow() -> Iterator[Live]:
    """Steps of 10 ms: time to interfere."""
    with Live(toy(step_s=0.01), drain_s=0.5) as server:
        yield server


@pytest.fixture(scope="session")
def real() -> Iterator[Live]:
    """The default model, served; shared by all tests."""
    try:
        engine = Engine.load(MODEL, max_batch=8)
    except ShoalError as error:
        pytest.skip(f"no model: {error}")
    with Live(engine, name=MODEL) as server:
        yield server
