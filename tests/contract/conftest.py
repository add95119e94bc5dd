"""Every runner under one contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import BackendError, ModelNotFoundError
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from tests.contract.runners import real_runner


@pytest.fixture(scope="module", params=["fake", "fake, decode apart", "openvino", "native"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """One runner of each kind for all tests of a file; each test uses blocks of its own."""
    kind: str = request.param
    try:
        made: Runner = (
            FakeRunner(num_blocks=400, splits_decode="apart" in kind) if "fake" in kind else real_runner(kind)
        )
    except (BackendError, ModelNotFoundError) as error:
        pytest.skip(f"{kind} cannot be tested here: {error}")
    yield made
    made.close()
