"""A candidate on trial, and a request on its way through one of the two sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from shoal.agents.rollout.compare import Tally, TrialComparison
from shoal.agents.rollout.plan import RolloutPlan
from shoal.agents.run.engines import AgentEngine
from shoal.errors import ShoalError
from shoal.types import Request, Result


class OpenableEngine(AgentEngine, Protocol):
    """An engine that `async with` opens and closes: `AsyncEngine`, `RemoteEngine`, or your own."""

    async def __aenter__(self) -> Any:
        """Load it."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is in flight and free it."""
        ...


class Trial:
    """A candidate that is loaded, the plan it is on trial by, and how it does."""

    def __init__(self, engine: OpenableEngine, plan: RolloutPlan) -> None:
        self.engine = engine
        self.settings = dict(plan.candidate)
        self.comparison = TrialComparison(plan)
        self.in_flight = 0
        self.quiet = asyncio.Event()

    async def close_when_quiet(self) -> None:
        """Wait until nothing runs on the candidate any more, and close it."""
        try:
            while self.in_flight:
                self.quiet.clear()
                await self.quiet.wait()
        finally:
            await self.engine.__aexit__(None, None, None)


class Ride:
    """One call on its side: the engine that serves it, and where its end is counted.

    `trial` is None on the stable side, `tally` while nothing is on trial. Whoever takes one calls `leave` once.
    """

    def __init__(
        self,
        engine: OpenableEngine,
        trial: Trial | None,
        tally: Tally | None,
        ended: Callable[[Ride, Request, Result, float], None],
        failed: Callable[[Ride, ShoalError | None, float], None],
    ) -> None:
        self.engine = engine
        self.trial = trial
        self.tally = tally
        self._ended = ended
        self._failed = failed
        if trial is not None:
            trial.in_flight += 1

    def ended(self, request: Request, result: Result, seconds: float) -> None:
        """A request of the call has its result."""
        self._ended(self, request, result, seconds)

    def failed(self, error: ShoalError | None, seconds: float) -> None:
        """A request was refused, or (None) its caller gave up when it was too late."""
        self._failed(self, error, seconds)

    def leave(self) -> None:
        """The call is over."""
        if self.trial is not None:
            self.trial.in_flight -= 1
            self.trial.quiet.set()
