"""From a call of an API to requests of the engine, and back; a client that goes away ends its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from shoal.engine.aio import Outbox
from shoal.engine.handles import Handle
from shoal.errors import RequestError, ShoalError
from shoal.processes import kv_mb
from shoal.sampling.sampler import derive_seed
from shoal.server.config import ServerConfig
from shoal.server.errors import ApiError, bad_request, from_result, from_shoal
from shoal.server.hub import ModelHub, Served
from shoal.server.metrics import Metrics
from shoal.server.nextturn import NextTurns
from shoal.server.openai.fields import Common
from shoal.server.openai.prompts import Chat
from shoal.server.openai.schemas import ChatMessage
from shoal.server.openai.stored import KeptAccess
from shoal.types import Event, FinishReason, Namespace, Request, Result, SamplingParams

T = TypeVar("T")
Prepare = Callable[[Served], Sequence[Request]]
Wave = list[tuple[int, Event]]


class Call:
    """The generations of one call: submitted together, their events in one place, all gone when it is closed.

    Closing aborts what has not ended; it never waits.
    """

    def __init__(self, api: Api, served: Served, record: dict[str, Any]) -> None:
        """`record` is what the log says of the call."""
        self.served = served
        self.results: dict[int, Result] = {}
        self.record = record
        self.chat: Chat | None = None  # what was asked, where that was a chat
        self.answer: ChatMessage | None = None  # the whole answer, as it may come back
        self.namespace = Namespace()
        self.at_close: Callable[[], None] = lambda: None
        self._api = api
        self._handles: list[Handle] = []
        self._closed = False
        self._outbox = api.outbox
        self._wave: Wave = []
        self._waiter: asyncio.Future[None] | None = None
        self._cut: set[int] = set()
        self.thinking_tokens = 0  # of what was written
        self._written = 0
        self._released = False
        self._names: Mapping[str, str] = {}
        self._requests: dict[int, Request] = {}  # kept while something is on trial: the other side may answer them too

    def submit(self, prepare: Prepare, names: Mapping[str, str]) -> None:
        """Prepare and submit all requests; on a worker thread, for templates, tokenizers and grammars take a while."""
        engine, outbox = self.served.engine, self._outbox
        self._names = names
        engine.on_step_start(outbox.wake)
        try:
            for index, request in enumerate(prepare(self.served)):
                if self.served.ride is not None:
                    self._requests[index] = request
                handle = engine.submit(request, sink=outbox.sink(partial(self._receive, index)))
                self._handles.append(handle)
                if self._closed:
                    handle.abort()
        except ShoalError as error:
            self.abort()
            raise from_shoal(error, names) from error

    def adopt(self, handle: Handle) -> None:
        """Take a request that is in flight already, without its events: a process before this one began it."""
        self._handles.append(handle)

    def ended(self, index: int, result: Result) -> None:
        """An adopted request has this result. ApiError when it failed."""
        self._written += len(result.tokens)
        self._note(index, result)

    def _receive(self, index: int, event: Event) -> None:
        self._wave.append((index, event))
        self.nudge()

    def nudge(self) -> None:
        """Let `next_wave` return, with nothing if nothing is there."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def complete(self) -> bool:
        """True when every generation has ended."""
        return len(self.results) == len(self._handles)

    async def next_wave(self) -> Wave:
        """The events that are there, waiting for one; ApiError when one of them tells of a failure."""
        if not self._wave:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        wave, self._wave = self._wave, []
        for index, event in wave:
            self._written += len(event.tokens)
            if event.result is not None:
                self._note(index, event.result)
        return wave

    def _note(self, index: int, result: Result) -> None:
        self.results[index] = result
        if self.served.ride is not None:
            self.served.ride.ended(self._requests[index], result, result.latency_s)
        self._api.metrics.count_generation(result)
        error = (
            None
            if index in self._cut and result.finish_reason is FinishReason.ABORTED
            else from_result(result, self._names)
        )
        if error is not None:
            raise error

    def prompt(self, index: int) -> Sequence[int]:
        """The prompt of one generation, in tokens."""
        return self._handles[index].prompt_tokens

    def cut(self, index: int) -> None:
        """End one generation on purpose: what it has written so far is its answer."""
        if index not in self.results:
            self._cut.add(index)
            self._handles[index].abort()

    async def finish(self, each: Callable[[int, Event], object]) -> None:
        """Run to the end, handing every event to `each`."""
        while not self.complete:
            for index, event in await self.next_wave():
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
            self.at_close()
            self._api.hub.release(self.served)
            if self.chat is not None and self.answer is not None and len(self._handles) == 1 and not left:
                self._api.turns.answered(self.served, self.namespace, self.chat, self.answer)

    def _note_record(self, left: int) -> None:
        results = self.results.values()
        cached = sum(r.cached_tokens for r in results)
        self.record.update(
            model=self.served.name,
            prompt_tokens=sum(len(handle.prompt_tokens) for handle in self._handles),
            generated_tokens=self._written,
            prefix_tokens=cached,
            cache_hit=cached > 0,
            kv_mb=kv_mb(self.served.engine.spec.kv_bytes_per_token, self._added()),
            finish=[*(str(r.finish_reason) for r in results), *["aborted"] * left],
        )

    def note_refusal(self, cause: BaseException | None) -> None:
        """The engine refused the call: counted where something is on trial, unless the fault is the caller's."""
        ride = self.served.ride
        if ride is not None and isinstance(cause, ShoalError) and not isinstance(cause, RequestError):
            ride.failed(cause, 0.0)

    def _added(self) -> int:
        """Tokens whose KV this call's generations added: what they found cached is somebody else's."""
        prompts = sum(len(handle.prompt_tokens) for handle in self._handles)
        return prompts + self._written - sum(r.cached_tokens for r in self.results.values())

    def check_complete(self) -> None:
        """ApiError when the client went away before the end: for the log and the counters, no client reads it."""
        if not self.complete:
            raise ApiError(499, "the client went away", code="client_gone")

    def usage(self, *, per_prompt: int = 1) -> dict[str, Any]:
        """Token counts; a prompt with several answers (`per_prompt`) counts once."""
        results = [self.results[i] for i in sorted(self.results)]
        prompt = sum(r.prompt_tokens for r in results[::per_prompt])
        output = sum(len(r.tokens) for r in results)
        whole = self.served.engine.spec.block_size if self._api.config.share_prefixes else 1
        found = (min(r.cached_tokens, r.prompt_tokens) for r in results[::per_prompt])
        cached = sum(tokens // whole * whole for tokens in found)
        details = {"reasoning_tokens": self.thinking_tokens, "audio_tokens": 0}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {**details, **self._prediction_usage()},
        }

    def _prediction_usage(self) -> dict[str, int]:
        """Of the tokens that were predicted, those that came where they were expected, and the others."""
        predicted = [self._handles[i].predicted_tokens for i in self.results]
        if not any(predicted):
            return {}
        foretold = [result.receipt.foretold for result in self.results.values()]
        accepted = sum(map(min, predicted, foretold))
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(predicted) - accepted,
        }


class Api:
    """What the endpoints share."""

    def __init__(self, hub: ModelHub, config: ServerConfig, metrics: Metrics) -> None:
        self.hub = hub
        self.config = config
        self.metrics = metrics
        self.kept = KeptAccess(config)
        self.turns = NextTurns(self)
        self._outbox: Outbox | None = None

    @property
    def outbox(self) -> Outbox:
        """Where engines put their events; made on the event loop that serves."""
        self._outbox = outbox = Outbox.of_running_loop(self._outbox)
        return outbox

    def caller(self, http: HttpRequest) -> str:
        """Among whose calls prefixes are shared: a name of the API key, the same for all where they may share."""
        return "" if self.config.share_prefixes else str(http.scope["state"].get("caller", ""))

    async def open(self, http: HttpRequest, body: Common, prepare: Prepare, names: Mapping[str, str]) -> Call:
        """Submit the requests of a call. ApiError when they cannot be served."""
        task, agent = body.agent()
        record = http.scope["state"]["record"]
        call = Call(self, self.hub.acquire(body.model, task or record["request_id"]), record)
        self.turns.make_way()
        call.record.update(task_id=task, agent_id=agent)
        body.of_caller(self.caller(http))
        call.namespace = body.namespace()
        if self.config.log_prompts:
            call.record["body"] = body.model_dump(exclude_none=True)
        try:
            await asyncio.to_thread(call.submit, prepare, names)
            call.chat = body.chat_shown if body.hints.speculative_prefill is not False else None
            if body.note is not None:
                call.record["note"] = body.note
        except BaseException as error:
            call.note_refusal(error.__cause__)
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
            group=body.task_id or "",
            critical_path=body.hints.osl or 0,
            keep_s=body.keep_s,
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
