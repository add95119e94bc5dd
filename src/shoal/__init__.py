"""shoal: many agents, one pass through the weights.

An embeddable engine that batches a fleet of agents through one local model. Importing it imports no backend.
"""

from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal.config import EngineConfig
from shoal.engine.aio import AsyncEngine, AsyncHandle
from shoal.engine.engine import Engine
from shoal.engine.handles import Handle, PrefixCache, Progress
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

if TYPE_CHECKING:
    from shoal.engine.remote import RemoteEngine

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


def __getattr__(name: str) -> Any:
    if name == "RemoteEngine":  # imported when it is asked for: it is of no use without httpx
        from shoal.engine.remote import RemoteEngine

        return RemoteEngine
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
