"""Which tests need a real model, and which take their time (what `scripts/test fast` leaves out); none has a deadline.

A folder or file is named here once; a single test has the marker itself (`@pytest.mark.model`, `@pytest.mark.slow`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shoal", deadline=None)  # timings decide no test: others may work on this machine
settings.load_profile("shoal")

ROOT = Path(__file__).parent
SLOW = (
    "agents/test_chaos.py",
    "agents/test_docs.py",
    "agents/test_examples.py",
    "bench",
    "browser",
    "contract",
    "parity",
    "power",
    "property",
    "server",
    "tiers/test_disks.py",
    "tiers/test_native",
    "unit/test_cli_process.py",
    "unit/test_models_gguf.py",
    "unit/test_models_store.py",
    "unit/test_mlx",
    "unit/test_native",
    "unit/test_openvino",
    "unit/test_quantize.py",
    "unit/test_shapes.py",
    "unit/test_special_tokens.py",
    "unit/test_stop.py",
    "unit/test_templates.py",
    "unit/test_vocabularies.py",
    "unit/test_watchdog.py",
)
"""Beginnings of paths. A server, a backend, a process, a whole vocabulary, hundreds of random cases."""
QUICK = ("server/test_api.py", "server/test_docs.py")
"""What is quick all the same."""
MODEL = ("agents/test_real.py", "browser", "parity/test_real_engine.py", "server/test_frameworks.py")


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """`serve`, called in this process, sends the log to the standard error of its test, which is closed behind it."""
    logs = [logging.getLogger(name) for name in ("shoal", "uvicorn")]
    before = [(log.handlers[:], log.propagate, log.level) for log in logs]
    yield
    for log, (handlers, propagate, level) in zip(logs, before, strict=True):
        log.handlers[:] = handlers
        log.propagate = propagate
        log.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(ROOT).as_posix()
        if place.startswith(SLOW) and not place.startswith(QUICK):
            item.add_marker(pytest.mark.slow)
        if place.startswith(MODEL):
            item.add_marker(pytest.mark.model)
