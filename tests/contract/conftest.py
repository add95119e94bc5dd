"""Every runner under one contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import BackendError, ModelNotFoundError
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from tests.contract.runners import real_runner


@pytest.fixture(scope="module", params=["fake", "fake, decode apart", "openvino", "native", "native, u8"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """One runner of each kind for all tests of a file; each test uses blocks of its own."""
    kind: str = request.param
    try:
        if "fake" in kind:
            made: Runner = FakeRunner(num_blocks=400, splits_decode="apart" in kind)
        else:
            name, _, kv_precision = kind.partition(", ")
            made = real_runner(name, kv_precision=kv_precision or "auto")
    except (BackendError, ModelNotFoundError) as error:
        pytest.skip(f"{kind} cannot be tested here: {error}")
    yield made
    made.close()
