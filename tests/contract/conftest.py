"""Every runner under one contract. `make(**settings)` gives a fresh runner; all of one kind behave alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import ModelError
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from tests.contract.runners import openvino_runner


@pytest.fixture(scope="module", params=["fake", "openvino"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """One runner of each kind for all tests of a file; each test uses blocks of its own."""
    try:
        made: Runner = FakeRunner(num_blocks=400) if request.param == "fake" else openvino_runner()
    except ModelError as error:
        pytest.skip(f"no model: {error}")
    yield made
    made.close()
