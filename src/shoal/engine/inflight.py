"""What a loop keeps of its requests wherever they run: those in flight, who hears of them, and how fast they end."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.errors import CallbackError
from shoal.runners.plan import SeqId

log = logging.getLogger("shoal.engine")

State = TypeVar("State")


class InFlight(Generic[State]):
    """The part of a loop that does not depend on where its requests are computed."""

    def __init__(self) -> None:
        self.step_starters: list[Callable[[], bool]] = []  # see `start_step`
        self._states: dict[SeqId, State] = {}
        self._finished = 0
        self._ends: deque[float] = deque(maxlen=32)
        self._next_id = 0

    @property
    def states(self) -> list[State]:
        """Requests in flight, in the order they came."""
        return list(self._states.values())

    @property
    def finished_per_s(self) -> float:
        """How many requests ended per second lately; 0 while too few have."""
        span = self._ends[-1] - self._ends[0] if len(self._ends) > 1 else 0.0
        return (len(self._ends) - 1) / span if span > 0 else 0.0

    def start_step(self) -> None:
        """Let those who handle events do so: all are out, and the device, if there is one, is about to compute.

        A callback that gives False is called no more, and so is one that raises.
        """
        for call in tuple(self.step_starters):
            try:
                wanted = call()
            except Exception:
                log.exception("a callback at the start of a step raised and is called no more")
                wanted = False
            if not wanted:
                with contextlib.suppress(ValueError):  # the end of an engine is told from another thread
                    self.step_starters.remove(call)


def sink_raised(request_id: str, cause: Exception) -> CallbackError:
    """The error with which a request ends whose sink raised; logs it."""
    log.error("the sink of request %r raised", request_id, exc_info=cause)
    error = CallbackError(f"the sink of request {request_id!r} raised {cause!r}", hint="mend the sink")
    error.__cause__ = cause
    return error
