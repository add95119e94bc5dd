"""Parts of the engine by themselves: what can be said of them without a clock."""

from __future__ import annotations

import pytest

from shoal.bench.parts import Bench, measure
from shoal.errors import BenchmarkError, ModelNotFoundError
from shoal.models import Store

BENCH = Bench("smollm2-135m", "auto", 1)


def test_an_unknown_part_is_refused_with_the_nearest() -> None:
    with pytest.raises(BenchmarkError, match="no part 'samplng': did you mean sampling"):
        measure("samplng", BENCH)


def test_a_graph_is_measured_without_a_model() -> None:
    told = measure("graph", BENCH)
    assert {"part", "runner", "chain", "fan"} == set(told)


@pytest.mark.model
def test_a_second_identical_request_computes_one_token() -> None:
    try:
        Store().resolve(BENCH.model, pull=False)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    told = measure("second", BENCH)
    assert (told["first_computed_tokens"], told["computed_tokens"]) == (1001, 1)
