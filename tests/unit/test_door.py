"""What is refused before a request joins, by the name of its field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal import AsyncEngine, Namespace, Request, SamplingParams
from shoal.errors import InvalidRequestError
from tests.support.engines import toy_engine


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": 3}, "namespace.task"),
        ({"task": None}, "namespace.task"),
        ({"agent": ["list"]}, "namespace.agent"),
        ({"version": "2"}, "namespace.version"),
        ({"version": True}, "namespace.version"),
        ({"version": -1}, "namespace.version"),
    ],
)
def test_a_namespace_is_checked_as_it_is_built(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Namespace(**fields)
    assert caught.value.param == param


def test_an_arrival_is_honoured_by_run_and_refused_where_it_would_be_ignored() -> None:
    late = Request(prompt="x", arrival_s=0.05, sampling=SamplingParams(max_tokens=2))

    async def generate() -> None:
        async with AsyncEngine(engine) as shared:
            await shared.complete(late)

    with toy_engine() as engine:
        assert engine.run([late]).results[0].error is None
        for ask in (engine.submit, engine.prefill):
            with pytest.raises(InvalidRequestError) as caught:
                ask(late)
            assert caught.value.param == "arrival_s"
        with pytest.raises(InvalidRequestError, match="arrival_s"):
            asyncio.run(generate())
