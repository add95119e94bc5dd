"""shoal: many agents, one pass through the weights.

An embeddable engine that batches a fleet of agents through one local model. Importing it imports no backend.
"""

from shoal.config import EngineConfig
from shoal.engine.aio import AsyncEngine
from shoal.engine.engine import Engine
from shoal.engine.handles import Handle, PrefixCache
from shoal.errors import ShoalError
from shoal.types import Event, FinishReason, Namespace, Priority, Receipt, Report, Request, Result, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "Event",
    "FinishReason",
    "Handle",
    "Namespace",
    "PrefixCache",
    "Priority",
    "Receipt",
    "Report",
    "Request",
    "Result",
    "SamplingParams",
    "ShoalError",
]
