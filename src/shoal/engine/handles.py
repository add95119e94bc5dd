"""What a caller holds of the engine: a request in flight, a pinned prefix, an announced one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shoal.core.commands import CancelExpectation, Expect
from shoal.core.prefix_tree import common_prefix
from shoal.core.sequence import Status
from shoal.errors import EngineClosedError
from shoal.runners.plan import SeqId
from shoal.types import Event, FinishReason, Namespace, Result

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.engine.inflight import RequestState
    from shoal.engine.inputs import PreparedRequest
    from shoal.engine.loop import StepLoop


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is, as `Handle.progress` saw it between two steps. It may have moved on since.

    `state` is "queued", "prefill", "decoding" or "finished". `computed_tokens` have their KV computed now,
    `cached_tokens` came from the prefix tree when the request joined. `blocks` are the ids of the KV blocks it holds:
    requests that share a prefix hold the same ones; `windows` are those of its window blocks, where the model has them.
    `replica` is where it runs, of a cluster.
    """

    state: str
    prompt_tokens: int
    output_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    blocks: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    replica: str = ""

    @property
    def running(self) -> bool:
        """True while it is in the batch."""
        return self.state in ("prefill", "decoding")


class Handle:
    """One request in flight. Iterate over it for its events, as they come; the last one has the result.

    Each event is given once: iterate from one place, or call `result`, which takes whatever is left. Used in `with`,
    it ends the request where the block is left early.
    """

    def __init__(self, engine: Engine, request_id: str, prepared: PreparedRequest) -> None:
        self.id = request_id
        self._prepared = prepared
        self._state: RequestState | None = None  # set on the engine's thread when the request has joined the loop
        self._engine = engine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._result: Result | None = None

    def put(self, event: Event) -> None:
        """Take an event in; called on the engine's thread."""
        self._events.put(event)

    def __iter__(self) -> Iterator[Event]:
        while self._result is None:
            event = self._events.get()
            self._result = event.result
            yield event

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end and give the result. TimeoutError after `timeout_s`, which does not end the request."""
        while self._result is None:
            try:
                self._result = self._events.get(timeout=timeout_s).result
            except queue.Empty:
                raise TimeoutError(f"request {self.id} has not ended within {timeout_s} s") from None
        return self._result

    @property
    def ended(self) -> bool:
        """True when `result` does not wait."""
        return self._result is not None or (self.state == "finished" and not self._events.empty())

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self._prepared.spec.prompt

    @property
    def predicted_tokens(self) -> int:
        """How many tokens of its output were predicted: `Request.predicted`, as far as it is read."""
        return len(self._prepared.spec.predicted)

    @property
    def state(self) -> str:
        """Where it stands: "queued", "prefill", "decoding" or "finished". It may have moved on by the time you look."""
        if self._result is not None:
            return "finished"
        seq = self._state.seq if self._state is not None else None
        if seq is None or seq.status is Status.WAITING:
            return "queued"
        if seq.status is Status.FINISHED:
            return "finished"
        return "decoding" if len(seq.tokens) > seq.prompt_len else "prefill"

    def progress(self) -> Progress:
        """How far it is now; on any thread, at once."""
        state, prompt = self.state, len(self._prepared.spec.prompt)
        seq = self._state.seq if self._state is not None else None
        if seq is None:
            return Progress(state, prompt)
        assert self._state is not None
        written = len(seq.tokens) - seq.prompt_len
        blocks, windows, replica = tuple(seq.blocks), tuple(seq.windows), self._state.replica
        return Progress(state, prompt, written, seq.computed, seq.cached_tokens, blocks, windows, replica)

    def __repr__(self) -> str:
        return f"<Handle {self.id!r}: {self.state}, {len(self._prepared.spec.prompt)} prompt tokens>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request at the next token boundary, wherever it stands. Idempotent."""
        self._engine.abort(self)

    def fork(self, count: int) -> list[Handle]:
        """Branch the request at its current token into `count` more, which share all KV so far.

        A branch goes on with the same parameters and a seed of its own; its result has the whole output, its events
        what comes after the fork. Greedy branches write what the parent writes. Raises `InvalidRequestError` when the
        request has ended, `QueueFullError`, `EngineClosedError`.
        """
        return self._engine.fork(self, count)


class PrefixCache:
    """A prefix whose KV stays computed and held until it is released; `Engine.cache_prefix` makes it. Usable in `with`.

    shared = PrefixCache.longest_common_prefix(prompts)
    with engine.cache_prefix(shared) as prefix:
        report = engine.run(requests, prefix=prefix)
    """

    def __init__(self, engine: Engine, seq_id: SeqId, tokens: tuple[int, ...], namespace: Namespace) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.namespace = namespace
        self.released = False
        self._engine = engine

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self.tokens)} tokens, {'released' if self.released else 'held'}>"

    @staticmethod
    def longest_common_prefix(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The token ids with which all prompts begin; empty for no prompts."""
        first = tuple(prompts[0]) if prompts else ()
        length = min((common_prefix(first, tuple(prompt)) for prompt in prompts), default=0)
        return first[:length]

    def release(self) -> None:
        """Let the KV go: it stays cached while there is room. Idempotent."""
        if not self.released:
            self.released = True
            self._engine.release_prefix(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def pinned_by(engine: Engine, handle: Handle, result: Result) -> PrefixCache:
    """The prefix that `Engine.prefill` pinned, now that its request has ended with `result`; raises what went wrong."""
    if result.error is not None:
        raise result.error
    if result.finish_reason is not FinishReason.STOP or handle._state is None:
        raise EngineClosedError("the engine closed before the prefix was computed")
    return PrefixCache(engine, handle._state.seq.seq_id, handle._prepared.spec.prompt, handle._prepared.spec.namespace)


class Expectation:
    """An announcement that requests which begin with `tokens` will come; `Engine.expect` makes it.

    Until `release` the full blocks of that beginning are evicted after all that nobody expects, and among expected
    ones those needed soonest go last. It holds nothing: when memory runs out they do go, and are computed again.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        loop: StepLoop,
        tokens: tuple[int, ...],
        namespace: Namespace,
        steps: int,
    ) -> None:
        """`post` runs a command on the engine's thread, in order."""
        self.tokens = tokens
        self.namespace = namespace
        self._post = post
        self._loop = loop
        self._steps = steps
        self._due = 0
        self._released = False
        post(self._begin)

    def _begin(self) -> None:
        self._due = self._loop.steps + self._steps
        self._loop.scheduler.apply(Expect(self.tokens, self.namespace, self._due))

    def _end(self) -> None:
        self._loop.scheduler.apply(CancelExpectation(self.tokens, self.namespace, self._due))

    def release(self) -> None:
        """Take the announcement back. Idempotent."""
        if not self._released:
            self._released = True
            self._post(self._end)
