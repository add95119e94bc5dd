"""What agents need of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from shoal.engine.batch import Prompt
from shoal.engine.handles import Expectation
from shoal.runners.plan import ModelSpec
from shoal.types import Event, Namespace, Request


class AgentEngine(Protocol):
    """Any engine that agents run on: `AsyncEngine` over any runner, `RemoteEngine`, or one of your own.

    Leaving the iteration of `generate` early must end the request. What goes wrong is a `ShoalError`, raised or in the
    result; any other exception is taken for a defect and ends the run.
    """

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model; `kv_bytes_per_token` is 0 where it is not known."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request; the last one has the result."""
        ...


@runtime_checkable
class LocalEngine(Protocol):
    """What an engine in this process can do beyond that: it takes hints about prefixes, and `Request.timeout_s`.

    An engine without `expect` gets no hints, and `timeout_s` of an agent counts from submission there, as a deadline.
    """

    async def expect(
        self,
        prompts: Sequence[Prompt],
        *,
        steps: int = 0,
        compute: bool = False,
        namespace: Namespace | None = None,
        group: str = "",
    ) -> Expectation | None:
        """As `AsyncEngine.expect`."""
        ...


@asynccontextmanager
async def leaving(events: AsyncIterator[Event]) -> AsyncIterator[AsyncIterator[Event]]:
    """Close a generator of events when its reader leaves, so that its request ends then."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
