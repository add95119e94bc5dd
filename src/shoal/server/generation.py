"""From a call of the API to requests of the engine, and their events back, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from shoal.errors import ShoalError
from shoal.handles import Handle
from shoal.sampling import derive_seed
from shoal.server.config import ServerConfig
from shoal.server.errors import ApiError, bad_request, from_result, from_shoal
from shoal.server.fields import Common
from shoal.server.hub import ModelHub, Served
from shoal.server.metrics import Metrics
from shoal.types import Event, FinishReason, Request, Result, SamplingParams

T = TypeVar("T")
Prepare = Callable[[Served], Sequence[Request]]
Wave = list[tuple[int, Event]]
Letter = tuple[int, Event] | None


class Mailbox:
    """Events on their way from the engine's thread to the event loop: one wake-up for all that a step brings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[asyncio.Queue[Letter], int, Event]] = deque()
        self._woken = False

    def put(self, queue: asyncio.Queue[Letter], index: int, event: Event) -> None:
        """Take an event in; on the engine's thread."""
        self._letters.append((queue, index, event))
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop is closed: nobody listens
            return

    def _deliver(self) -> None:
        self._woken = False  # first: what comes from here on wakes us again
        while self._letters:
            queue, index, event = self._letters.popleft()
            queue.put_nowait((index, event))


class Call:
    """The generations of one call: submitted together, their events in one queue, all gone when it is closed.

    Closing aborts what has not ended; it never waits.
    """

    def __init__(self, api: Api, served: Served, http: HttpRequest) -> None:
        self.served = served
        self.results: dict[int, Result] = {}
        self.record: dict[str, Any] = http.scope["state"]["record"]
        self._api = api
        self._handles: list[Handle] = []
        self._closed = False
        self._mailbox = api.mailbox
        self._events: asyncio.Queue[Letter] = asyncio.Queue()
        self._quiet = False
        self._cut: set[int] = set()
        self._written = 0
        self._released = False

    def submit(self, prepare: Prepare, names: Mapping[str, str]) -> None:
        """Prepare and submit all requests; on a worker thread, for templates, tokenizers and grammars take a while."""
        try:
            for index, request in enumerate(prepare(self.served)):
                handle = self.served.engine.submit(request, sink=partial(self._mailbox.put, self._events, index))
                self._handles.append(handle)
                if self._closed:
                    handle.abort()
        except ShoalError as error:
            self.abort()
            raise from_shoal(error, names) from error

    async def waves(self, silence_s: float | None = None) -> AsyncIterator[Wave]:
        """Events as they come, those that are there together; an empty wave after about that much silence.

        Ends after the last generation has ended. ApiError for one that failed.
        """
        watching = asyncio.ensure_future(self._watch_silence(silence_s)) if silence_s is not None else None
        try:
            while len(self.results) < len(self._handles):
                wave = await self._next()
                for index, event in wave:
                    self._written += len(event.tokens)
                    if event.result is not None:
                        self._note(index, event.result)
                yield wave
        finally:
            if watching is not None:
                watching.cancel()

    async def _next(self) -> Wave:
        letters = [await self._events.get()]
        while not self._events.empty():
            letters.append(self._events.get_nowait())
        self._quiet = False
        return [letter for letter in letters if letter is not None]

    async def _watch_silence(self, silence_s: float) -> None:
        """Bring an empty wave when nothing came for a while. One timer a stream: one per token costs more."""
        while True:
            self._quiet = True
            await asyncio.sleep(silence_s)
            if self._quiet:
                self._events.put_nowait(None)

    def _note(self, index: int, result: Result) -> None:
        self.results[index] = result
        self._api.metrics.count_generation(result)
        error = None if index in self._cut and result.finish_reason is FinishReason.ABORTED else from_result(result)
        if error is not None:
            raise error

    def cut(self, index: int) -> None:
        """End one generation on purpose: what it has written so far is its answer."""
        if index not in self.results:
            self._cut.add(index)
            self._handles[index].abort()

    async def finish(self, each: Callable[[int, Event], object]) -> None:
        """Run to the end, handing every event to `each`."""
        async for wave in self.waves():
            for index, event in wave:
                each(index, event)

    def abort(self) -> None:
        """End at the next token boundary whatever has not ended."""
        self._closed = True
        for handle in self._handles:
            handle.abort()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if not self._released:
            self._released = True
            left = len(self._handles) - len(self.results)
            if left:
                self.abort()
                self._api.metrics.count_aborted(left)
                self.record.setdefault("error", "client_gone")
            self._note_record(left)
            self._api.hub.release(self.served)

    def _note_record(self, left: int) -> None:
        results = self.results.values()
        cached = sum(r.cached_tokens for r in results)
        self.record.update(
            model=self.served.name,
            prompt_tokens=sum(len(handle.admissible.tokens) for handle in self._handles),
            generated_tokens=self._written,
            prefix_tokens=cached,
            cache_hit=cached > 0,
            finish=[*(str(r.finish_reason) for r in results), *["aborted"] * left],
        )

    def check_complete(self) -> None:
        """ApiError when the client went away before the end; nobody reads it, but the log and the counters do."""
        if len(self.results) < len(self._handles):
            raise ApiError(499, "the client went away", code="client_gone")

    def usage(self, *, per_prompt: int = 1) -> dict[str, Any]:
        """Token counts; a prompt with several answers (`per_prompt`) counts once."""
        results = [self.results[i] for i in sorted(self.results)]
        prompt = sum(r.prompt_tokens for r in results[::per_prompt])
        output = sum(len(r.tokens) for r in results)
        cached = sum(min(r.cached_tokens, r.prompt_tokens) for r in results[::per_prompt])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


class Api:
    """What the endpoints share."""

    def __init__(self, hub: ModelHub, config: ServerConfig, metrics: Metrics) -> None:
        self.hub = hub
        self.config = config
        self.metrics = metrics
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """Where engines put their events; made on the event loop that serves."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        return self._mailbox

    async def open(self, http: HttpRequest, body: Common, prepare: Prepare, names: Mapping[str, str]) -> Call:
        """Submit the requests of a call. ApiError when they cannot be served."""
        call = Call(self, self.hub.acquire(body.model), http)
        task, agent = body.agent()
        call.record.update(task_id=task, agent_id=agent)
        if self.config.log_prompts:
            call.record["body"] = body.model_dump(exclude_none=True)
        try:
            await asyncio.to_thread(call.submit, prepare, names)
        except BaseException:
            call.abort()
            call.close()
            raise
        return call

    def request(self, body: Common, tokens: Sequence[int], sampling: SamplingParams) -> Request:
        """A request of the engine for a prompt in tokens."""
        return Request(
            prompt_tokens=tokens,
            sampling=sampling,
            priority=body.priority_class(),
            deadline_s=body.timeout if body.timeout is not None else self.config.request_timeout_s,
            namespace=body.namespace(),
        )

    def check_count(self, count: int, param: str) -> None:
        """Refuse more generations in one call than the server allows."""
        if count > self.config.max_choices:
            raise bad_request(f"{count} answers are asked for, the limit is {self.config.max_choices}", param)


def choice_seeds(seed: int | None, count: int) -> list[int | None]:
    """A seed for each answer: the first has the caller's own, so that `n` does not change it."""
    if seed is None:
        return [None] * count
    return [seed, *(derive_seed(seed, number) for number in range(1, count))]


def output_limit(served: Served, prompt_tokens: int, wanted: int | None) -> int:
    """The most tokens of an answer: what was asked for, or all that context and KV memory leave."""
    if wanted is not None:
        return wanted
    spec = served.engine.spec
    return max(1, min(spec.context_length, spec.kv_capacity) - prompt_tokens)


async def unless_gone(gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, when `gone` returns first: the client went away."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Returns when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
