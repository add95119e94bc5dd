"""The one definition of a number in its range."""

from __future__ import annotations

from math import inf, nan

import pytest

from shoal.checks import is_number, is_whole
from shoal.config import EngineConfig
from shoal.errors import ConfigError, InvalidRequestError
from shoal.types import Request


@pytest.mark.parametrize("value", [True, "1", None, inf, -inf, nan, 10**400])
def test_these_are_no_numbers(value: object) -> None:
    assert not is_number(value)
    assert not is_number(value, 0)


def test_ranges_have_their_ends_in_them() -> None:
    assert [is_whole(value, 1, 3) for value in (0, 1, 3, 4, 1.0, True)] == [False, True, True, False, False, False]
    assert [is_number(value, 0, 1) for value in (-0.1, 0, 0.5, 1.0, 1.1)] == [False, True, True, True, False]


def test_every_door_refuses_what_is_no_finite_number() -> None:
    with pytest.raises(ConfigError, match="max_stall_ms is inf"):
        EngineConfig(max_stall_ms=inf)
    with pytest.raises(InvalidRequestError, match="deadline_s is 1000"):
        Request(prompt="x", deadline_s=10**400)
