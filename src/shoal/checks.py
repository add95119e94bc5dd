"""What is a number in its range: the one definition. Each door has its own error and says its own limit."""

from __future__ import annotations

import sys
from math import inf
from typing import TypeGuard

_MOST = sys.float_info.max


def is_whole(value: object, low: float = -inf, high: float = inf) -> TypeGuard[int]:
    """True for a whole number from `low` to `high`. True and False are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float = -_MOST, high: float = _MOST) -> TypeGuard[int | float]:
    """True for a number from `low` to `high`, which is finite where both are. True and False are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
