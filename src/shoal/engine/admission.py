"""Requests that were let in: under which name, how many may wait, and who hears of each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from shoal.config import EngineConfig
from shoal.engine.handles import Handle
from shoal.engine.inflight import Sink
from shoal.engine.inputs import PreparedRequest
from shoal.errors import InvalidRequestError, QueueFullError
from shoal.types import Event


class Admission:
    """Requests by name, from the moment they are let in until their last event. Any thread may call.

    Invariant: whoever removes a request here delivers its last event, so that it gets exactly one.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._sinks: dict[str, tuple[Sink, int]] = {}  # with the tokens of the prompt
        self._tokens = 0  # of them all
        self._names = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sinks)

    def enter(
        self,
        arriving: Sequence[PreparedRequest],
        sink: Sink | None,
        make_handle: Callable[[str, PreparedRequest], Handle],
        *,
        kv_capacity: int,
        finished_per_s: float,
    ) -> list[Handle]:
        """Let requests in under a name each, all or none; their events go to `sink`, or to their handles.

        `kv_capacity` is how many tokens need not wait, `finished_per_s` says when to try again. `QueueFullError` when
        too many wait, `InvalidRequestError` for a name in use.
        """
        with self._lock:
            waiting = len(self._sinks) + len(arriving) - 1 - self._config.max_batch
            if waiting >= self._config.max_queue:
                raise self._queue_full(f"{waiting} requests wait", waiting, "max_queue", finished_per_s)
            tokens = self._tokens - kv_capacity
            if tokens > 0 and tokens + sum(len(p.spec.prompt) for p in arriving) > self._config.max_queue_tokens:
                why = f"requests of {tokens} prompt tokens wait"
                raise self._queue_full(why, tokens, "max_queue_tokens", finished_per_s)
            handles = [make_handle(self._name(prepared.spec.id), prepared) for prepared in arriving]
            for handle in handles:
                self._sinks[handle.id] = sink or handle.put, len(handle.prompt_tokens)
                self._tokens += len(handle.prompt_tokens)
        return handles

    def _name(self, wanted: str | None) -> str:
        """The name of a request: the one it asks for, or one that nobody has."""
        if wanted is None:
            return next(name for n in self._names if (name := f"request-{n}") not in self._sinks)
        if wanted in self._sinks:
            raise InvalidRequestError(
                f"id {wanted!r} is in flight already", param="id", value=wanted, hint="use another id, or none"
            )
        return wanted

    def _queue_full(self, why: str, value: int, param: str, finished_per_s: float) -> QueueFullError:
        retry = min(max(1.0 / finished_per_s, 0.1), 60.0) if finished_per_s else 1.0
        limit = getattr(self._config, param)
        return QueueFullError(f"{why} already", value=value, limit=limit, retry_after_s=retry, param=param)

    def deliver(self, event: Event) -> None:
        """Pass an event on, unless its request was ended meanwhile from outside the loop."""
        if event.result is None:  # the common case, of every row in every step: one look that no other thread can split
            entry = self._sinks.get(event.request_id)
        else:
            with self._lock:
                entry = self._sinks.get(event.request_id)
                self._forget(event.request_id)
        if entry is not None:
            entry[0](event)

    def withdraw(self, handles: Sequence[Handle]) -> None:
        """These do not join after all: nobody hears of them."""
        with self._lock:
            for handle in handles:
                self._forget(handle.id)

    def _forget(self, name: str) -> None:
        _, tokens = self._sinks.pop(name, (None, 0))
        self._tokens -= tokens

    def take_all(self) -> dict[str, Sink]:
        """Remove every request; the caller delivers their last events."""
        with self._lock:
            sinks, self._sinks, self._tokens = self._sinks, {}, 0
        return {name: sink for name, (sink, _) in sinks.items()}
