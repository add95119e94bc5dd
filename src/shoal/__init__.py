"""shoal: many agents, one pass through the weights.

An embeddable engine that batches a fleet of agents through one local model. Importing it imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import errors
    from shoal.config import EngineConfig
    from shoal.engine.aio import AsyncEngine, AsyncHandle
    from shoal.engine.engine import Engine
    from shoal.engine.handles import Handle, PrefixCache, Progress
    from shoal.engine.remote import RemoteEngine
    from shoal.errors import ShoalError
    from shoal.runners.plan import ModelSpec
    from shoal.types import (
        EngineStats,
        Event,
        FinishReason,
        Message,
        Namespace,
        Priority,
        Receipt,
        Report,
        Request,
        Result,
        SamplingParams,
        StepRecord,
        TokenLogprob,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "AsyncHandle",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Event",
    "FinishReason",
    "Handle",
    "Message",
    "ModelSpec",
    "Namespace",
    "PrefixCache",
    "Priority",
    "Progress",
    "Receipt",
    "RemoteEngine",
    "Report",
    "Request",
    "Result",
    "SamplingParams",
    "ShoalError",
    "StepRecord",
    "TokenLogprob",
    "errors",
]


_HOMES = {
    "AsyncEngine": "shoal.engine.aio",
    "AsyncHandle": "shoal.engine.aio",
    "Engine": "shoal.engine.engine",
    "EngineConfig": "shoal.config",
    "Handle": "shoal.engine.handles",
    "ModelSpec": "shoal.runners.plan",
    "PrefixCache": "shoal.engine.handles",
    "Progress": "shoal.engine.handles",
    "RemoteEngine": "shoal.engine.remote",
    "ShoalError": "shoal.errors",
}


def __getattr__(name: str) -> Any:
    """What is asked for is imported then: importing the package alone takes a hundredth of a second."""
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    if name == "errors":
        return import_module("shoal.errors")
    value = getattr(import_module(_HOMES.get(name, "shoal.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
