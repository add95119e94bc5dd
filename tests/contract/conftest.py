"""Every runner under one contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import BackendError, ModelNotFoundError
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from tests.support.mlx_tiny import FAMILIES, tiny_runner
from tests.support.native_tiny import tiny_native
from tests.support.runners import real_runner

FAKES = {"fake": {}, "fake, decode apart": {"splits_decode": True}, "fake, recurrent": {"checkpoints": 4}}
TINY = ("qwen35", "granitehybrid", "lfm2", "qwen3moe", "gemma3", "gpt-oss")
"""Models of `tiny_models` on the native runner: recurrent mixers of each kind, a mixture, windows, sinks."""
KINDS = [
    *FAKES,
    "openvino",
    "native",
    "native, u8",
    *(f"native {name}" for name in TINY),
    *(f"mlx {family}" for family in FAMILIES),
]


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner of each kind for all tests of a file; each test uses blocks of its own."""
    kind: str = request.param
    made = make(kind, tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def make(kind: str, path: Path) -> Runner:
    """A runner of this kind; skips the test where it cannot be had."""
    if kind in FAKES:
        return FakeRunner(num_blocks=400, **FAKES[kind])  # type: ignore[arg-type]
    backend, _, family = kind.partition(" ")
    if backend == "mlx":
        return tiny_runner(path, family)
    if backend == "native" and family in TINY:
        return tiny_native(family, path, blocks=300)
    try:
        name, _, kv_precision = kind.partition(", ")
        return real_runner(name, kv_precision=kv_precision or "auto")
    except (BackendError, ModelNotFoundError) as error:
        pytest.skip(f"{kind} cannot be tested here: {error}")
