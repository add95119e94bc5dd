"""What figures of single parts share: engines with the runner asked for, cold caches, medians with their range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from shoal import Engine
from shoal.bench.results import Figure
from shoal.bench.tables import quoted
from shoal.bench.timeline import summary

MODEL = "smollm2-135m"
SETTINGS: dict[str, Any] = {}
"""What every engine and loop here is made with: the runner that `--runner` named."""


def load(**settings: Any) -> Engine:
    return Engine.load(MODEL, **SETTINGS, **settings)


def forget(engine: Engine) -> None:
    """Give up all cached prefixes, so that the next run is cold."""
    engine.suspend(drop_kv=True)
    engine.resume()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The median, and the range without the extremes where there are five values or more."""
    return quoted(Figure(**summary(values)))  # type: ignore[arg-type]
