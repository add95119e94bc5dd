"""What a loop keeps of its requests wherever they run: those in flight, who hears of them, and how fast they end."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal.core.sequence import Sequence
from shoal.engine.inputs import PreparedRequest
from shoal.errors import CallbackError, ShoalError
from shoal.runners.plan import SeqId
from shoal.types import Event, FinishReason, Result, TokenLogprob

log = logging.getLogger("shoal.engine")

Sink = Callable[[Event], None]
"""Where a request's events go. Called on the loop's thread; must not block. One that raises ends its request."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a request had written before it went on here: as a branch of another, or restored from disk."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's second token on, where they are wanted


NOTHING = Output()


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight, wherever it is computed: what it asks, how far it is, what was told of it, who listens."""

    request_id: str
    prepared: PreparedRequest
    seq: Sequence
    sink: Sink
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float | None = None
    replica: str = ""  # none: it is computed here

    def output(self) -> Output:
        """What it has written so far."""
        written = tuple(self.seq.tokens[self.seq.prompt_len :])
        return Output(written, tuple(self.logprobs), tuple(self.prompt_logprobs))

    def result(self, now: float, reason: FinishReason, error: ShoalError | None) -> Result:
        """The terminal result, should it end now."""
        seq, arrival = self.seq, self.seq.arrival
        return Result(
            id=self.request_id,
            tokens=tuple(seq.tokens[seq.prompt_len :]),
            text="".join(self.text),
            finish_reason=reason,
            prompt_tokens=seq.prompt_len,
            ttft_s=None if self.first_token_at is None else self.first_token_at - arrival,
            latency_s=now - arrival,
            seed=seq.spec.seed,
            receipt=seq.receipt,
            logprobs=tuple(self.logprobs),
            error=error,
            queue_s=None if seq.admitted_at is None else max(seq.admitted_at - arrival, 0.0),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )


State = TypeVar("State", bound=RequestState)


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
