"""`Engine.run` and `Engine.fan_out`: many requests at once, on the caller's thread, to a report."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.engine.handles import Handle, PrefixCache
from shoal.engine.inflight import Sink
from shoal.engine.inputs import PreparedRequest
from shoal.errors import InvalidRequestError, RequestError
from shoal.sampling.sampler import derive_seed
from shoal.types import Event, FinishReason, Message, Report, Request, Result, StepRecord

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

Prompt = str | Sequence[int] | Sequence[Message]
OnTokens = Callable[[str, tuple[int, ...], str, bool], None]
"""request id, new tokens, the text they completed, whether the request is finished."""


def run_requests(
    engine: Engine,
    submit: Callable[[Request, Sink], Handle],
    requests: Sequence[Request],
    on_tokens: OnTokens | None,
    prefix: PrefixCache | None,
) -> Report:
    """Run requests to their ends; see `Engine.run`. `submit` takes one in at once, whatever its `arrival_s`."""
    if prefix is not None:
        _check_prefix(engine, requests, prefix)
    return _Run(engine, submit, requests, on_tokens).to_report()


SWEET_SHARE = 0.84  # of the most tokens a second: what a batch must reach to be worth its wait


def smallest_batch(rates: Mapping[int, float], share: float = SWEET_SHARE) -> int:
    """The smallest batch whose tokens a second reach `share` of the most of any. `rates` by batch, at least one."""
    most = max(rates.values())
    return min(batch for batch, rate in rates.items() if rate >= share * most)


class _Run:
    """One call of `Engine.run`: requests not yet arrived, in flight, and ended.

    Events wait in `_inbox` until the engine says that all of a step are out: this thread is woken once a step, while
    the device computes. Woken by each event it would take turns with the engine's thread, which has a device to feed.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Request, Sink], Handle],
        requests: Sequence[Request],
        on_tokens: OnTokens | None,
    ) -> None:
        self._engine = engine
        self._submit = submit
        self._on_tokens = on_tokens
        self._inbox: deque[Event] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # something is in the inbox
        self._closed = False
        self._coming = sorted(enumerate(requests), key=lambda pair: (-pair[1].arrival_s, -pair[0]))
        self._places: dict[str, int] = {}
        self._handles: dict[str, Handle] = {}
        self._results: dict[int, Result] = {}
        self._begin = time.perf_counter()

    def to_report(self) -> Report:
        steps: list[StepRecord] = []
        listener = steps.append
        self._engine.listen(listener)
        self._engine.on_step_start(self._wake)
        try:
            while self._coming or self._handles:
                self._submit_due()
                self._take_events()
        finally:
            self._closed = True
            for handle in self._handles.values():  # only when something was raised here: leave nothing running
                handle.abort()
            self._engine.unlisten(listener)
        results = tuple(self._results[i] for i in sorted(self._results))
        return Report(results, time.perf_counter() - self._begin, tuple(steps))

    def _submit_due(self) -> None:
        now = time.perf_counter() - self._begin
        while self._coming and self._coming[-1][1].arrival_s <= now:
            place, request = self._coming.pop()
            try:
                handle = self._submit(request, self._inbox.append)
            except RequestError as error:
                self._end(place, _refused(request, place, error))
                continue
            self._places[handle.id] = place
            self._handles[handle.id] = handle

    def _wake(self) -> bool:
        """A step's events are all out; on the engine's thread. False once nobody waits for them."""
        if self._inbox:
            self._news.put(None)
        return not self._closed

    def _take_events(self) -> None:
        """Wait for events, until the next request is due at most, and take all that are there."""
        if not self._handles and not self._coming:
            return
        wait = None
        if self._coming:
            wait = max(self._begin + self._coming[-1][1].arrival_s - time.perf_counter(), 0.0)
        try:
            self._news.get(timeout=wait)
        except queue.Empty:
            return
        while self._inbox:
            self._take(self._inbox.popleft())

    def _take(self, event: Event) -> None:
        if event.result is not None:
            del self._handles[event.request_id]
            self._results[self._places[event.request_id]] = event.result
        if self._on_tokens is not None:
            self._on_tokens(event.request_id, event.tokens, event.text, event.finished)

    def _end(self, place: int, result: Result) -> None:
        self._results[place] = result
        if self._on_tokens is not None:
            self._on_tokens(result.id, (), "", True)


def _refused(request: Request, place: int, error: RequestError) -> Result:
    name = request.id or f"refused-{place}"
    return Result(name, (), "", FinishReason.ERROR, 0, None, 0.0, request.sampling.seed or 0, error=error)


def _check_prefix(engine: Engine, requests: Sequence[Request], prefix: PrefixCache) -> None:
    if prefix.released:
        raise InvalidRequestError("the prefix was released", param="prefix", hint="compute it again with cache_prefix")
    for request in requests:
        tokens = engine.tokenize(request)
        if tuple(tokens[: len(prefix.tokens)]) != prefix.tokens or request.namespace != prefix.namespace:
            raise InvalidRequestError(
                "a request does not begin with the prefix",
                param="prefix",
                value=request.id,
                hint="give it the same tokens and namespace, or run it without prefix=",
            )


def as_request(prompt: Prompt, fields: Mapping[str, Any]) -> Request:
    """A request from text, token ids or chat messages."""
    if isinstance(prompt, str):
        return Request(prompt=prompt, **fields)
    if prompt and isinstance(prompt[0], int):
        return Request(prompt_tokens=prompt, **fields)  # type: ignore[arg-type]
    return Request(messages=prompt, **fields)  # type: ignore[arg-type]


def branch_requests(shared: Prompt, branches: Sequence[Prompt], fields: Mapping[str, Any]) -> list[Request]:
    """One request per branch: the shared part and then the branch's own, of one kind."""
    requests = []
    for branch in branches:
        if isinstance(shared, str) and isinstance(branch, str):
            requests.append(as_request(shared + branch, fields))
        elif isinstance(shared, str) or isinstance(branch, str):
            raise InvalidRequestError(
                "the shared part and a branch are of different kinds",
                param="branches",
                value=type(branch).__name__,
                limit=type(shared).__name__,
                hint="give both as text, both as token ids, or both as messages",
            )
        else:
            requests.append(as_request([*shared, *branch], fields))
    return requests


def branch_seeds(prepared: PreparedRequest, count: int) -> list[PreparedRequest]:
    """The same request `count` times, without its name and each with a seed of its own."""
    spec = dataclasses.replace(prepared.spec, id=None)
    seeds = (derive_seed(spec.seed, number) for number in range(1, count + 1))
    return [dataclasses.replace(prepared, spec=dataclasses.replace(spec, seed=seed)) for seed in seeds]
