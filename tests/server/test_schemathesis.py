"""Whatever the OpenAPI document allows, and much that it does not: never a 5xx, always our error shape."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from shoal.engine.engine import Engine
from shoal.errors import ModelNotFoundError
from shoal.runners.fake import FakeRunner
from tests.support.live import Live, toy

schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore")]

EXAMPLES = 25  # per operation and mode
CASES = int(os.environ.get("SHOAL_FUZZ", "0"))
"""At least so many in all, at random: `SHOAL_FUZZ=20000 pytest -s --timeout 0 tests/server/test_schemathesis.py`."""


def load(name: str) -> Engine:
    if name != "toy":
        raise ModelNotFoundError(f"there is no model {name!r}", value=name)
    return make()


def make() -> Engine:
    return toy(runner=FakeRunner(context_length=256), max_batch=32)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Live]:
    with Live(make(), load, keepalive_s=1.0, request_timeout_s=20) as live:
        yield live


def operations(live: Live) -> list[Any]:
    schema = schemathesis.openapi.from_dict(live.http.get("/openapi.json").json())
    return [result.ok() for result in schema.get_all_operations()]


def test_no_server_error_and_the_right_shape(fuzzed: Live) -> None:
    statuses: Counter[int] = Counter()
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations(fuzzed)
        # The first would leave nothing to test, the second never ends, the others would fetch and delete models.
        if operation.path not in ("/models/unload", "/v1/events")
        and not operation.path.startswith("/swarmbench/storage")
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    ]
    for strategy in strategies:
        with suppress(Unsatisfiable):  # an operation without input has no wrong one
            fuzz(strategy, fuzzed.url, statuses, EXAMPLES)
    while statuses.total() < CASES:  # such as have no input end after one: the others get more
        for strategy in strategies:
            with suppress(Unsatisfiable):
                fuzz(strategy, fuzzed.url, statuses, 200)
        print(dict(statuses), flush=True)
    assert statuses[200] > 5
    assert statuses[400] > 30
    fuzzed.wait_idle()
    assert fuzzed.http.get("/health").status_code == 200


def fuzz(strategy: Any, url: str, statuses: Counter[int], examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: Any) -> None:
        response = case.call(base_url=url)
        statuses[response.status_code] += 1
        # 504 is right: a client may ask for a millisecond.
        assert response.status_code < 500 or response.status_code == 504, (response.text, case)
        if response.status_code >= 400:
            more = set() if case.path.startswith("/v1/messages") else {"param", "code"}
            assert set(response.json()["error"]) == {"message", "type"} | more

    check()


def test_the_document_says_what_the_server_takes(fuzzed: Live) -> None:
    document = fuzzed.http.get("/openapi.json").json()
    assert "422" not in str(document)
    assert {"/v1/chat/completions", "/v1/responses", "/models/load"} <= set(document["paths"])
