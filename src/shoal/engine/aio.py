"""The asyncio face of the engine, and what every engine with that face shares."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from shoal.config import Settings
from shoal.engine.batch import Prompt, as_request, branch_requests
from shoal.engine.engine import Engine
from shoal.engine.handles import Expectation, Handle, PrefixCache, pinned_by
from shoal.engine.mailbox import T
from shoal.errors import EngineClosedError, RequestError
from shoal.runners.plan import ModelSpec
from shoal.types import EngineStats, Event, Namespace, Priority, Report, Request, Result, SamplingParams

if TYPE_CHECKING:
    from shoal.models.files import Progress
    from shoal.power.governor import Governor


class AsyncFace(ABC):
    """An engine as asyncio sees it, here or elsewhere. Usable with `async with`, and closed by it.

    Leaving the iteration of `generate` early, also by cancellation, aborts the request at the next token boundary.
    """

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Facts about the model; known inside `async with`."""

    @abstractmethod
    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they come; the last has the result. Raises as `Engine.submit`."""

    @abstractmethod
    async def close(self) -> None:
        """End what is in flight and let go of the model. Idempotent."""

    @abstractmethod
    async def _open(self) -> None:
        """What has to be waited for before the first request."""

    async def complete(self, request: Request) -> Result:
        """Run one request to its end."""
        async with aclosing(self.generate(request)) as events:  # it is over when this returns, not when it is collected
            async for event in events:
                if event.result is not None:
                    return event.result
        raise AssertionError("a request ended without a result")

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncEngine(AsyncFace):
    """An `Engine` for asyncio: the event loop never waits for the model."""

    def __init__(self, engine: Engine) -> None:
        self._loaded: Engine | None = engine
        self._load: partial[Engine] | None = None
        self._outbox: Outbox | None = None

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m",
        *,
        state: str | Path | None = None,
        governor: Governor | None = None,
        progress: Progress | None = None,
        warmup: bool = False,
        **settings: Unpack[Settings],
    ) -> Self:
        """An engine that loads when its `async with` begins. Arguments and errors as `Engine.load`."""
        waiting = cls.__new__(cls)
        waiting._loaded = None
        waiting._load = partial(
            Engine.load, model, state=state, governor=governor, progress=progress, warmup=warmup, **settings
        )
        waiting._outbox = None
        return waiting

    @property
    def engine(self) -> Engine:
        """The engine behind it. EngineClosedError before it is loaded."""
        if self._loaded is None:
            raise EngineClosedError("the engine is not loaded", hint="use `async with AsyncEngine.load(...) as engine`")
        return self._loaded

    async def _open(self) -> None:
        if self._load is not None:
            self._loaded = await _off_loop(self._load, undo=Engine.close)
            self._load = None

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model."""
        return self.engine.spec

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they come; the last has the result. Raises as `Engine.submit`."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        put = self._sink(events.put_nowait)
        handle = await _off_loop(partial(self._submit, request, put), undo=Handle.abort)
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.finished
                yield event
        finally:
            if not finished:
                handle.abort()

    def _submit(self, request: Request, sink: Callable[[Event], None]) -> Handle:
        """Hand a request of `generate` to the engine; on a thread that may wait."""
        return self.engine.submit(request, sink=sink)

    async def submit(self, request: Request) -> AsyncHandle:
        """Put a request in line. Raises as `Engine.submit`."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        put = self._sink(events.put_nowait)
        handle = await _off_loop(partial(self.engine.submit, request, sink=put), undo=Handle.abort)
        return AsyncHandle(self, handle, events)

    async def fork(self, handle: AsyncHandle, count: int) -> list[AsyncHandle]:
        """Branch a request at its current token; see `Handle.fork`."""
        events: dict[str, asyncio.Queue[Event]] = defaultdict(asyncio.Queue)
        put = self._sink(lambda event: events[event.request_id].put_nowait(event))
        branch = partial(self.engine.fork, handle.handle, count, sink=put)
        children = await _off_loop(branch, undo=_abort_all)
        return [AsyncHandle(self, child, events[child.id]) for child in children]

    async def run(self, requests: Sequence[Request], *, prefix: PrefixCache | None = None) -> Report:
        """Run requests to their ends and report; see `Engine.run`. Cancelled, it ends those that still run."""
        gone = threading.Event()

        def stop_early(*_: object) -> None:
            if gone.is_set():
                raise asyncio.CancelledError

        try:
            return await asyncio.to_thread(self.engine.run, requests, stop_early, prefix=prefix)
        except asyncio.CancelledError:
            gone.set()
            raise

    async def fan_out(self, shared: Prompt, branches: Sequence[Prompt], **fields: Any) -> Report:
        """Run one request per branch, each the shared part and then its own; see `Engine.fan_out`."""
        return await self.run(branch_requests(shared, branches, fields))

    async def cache_prefix(self, prefix: Prompt, *, namespace: Namespace | None = None) -> PrefixCache:
        """Compute a prefix now and hold its KV until `PrefixCache.release`; see `Engine.cache_prefix`."""
        fields = {"namespace": namespace or Namespace(), "sampling": SamplingParams(max_tokens=1)}
        return await self._pin(as_request(prefix, fields))

    def stats(self) -> EngineStats:
        """What the engine holds and has done so far."""
        return self.engine.stats()

    async def suspend(self, *, drop_kv: bool = False) -> None:
        """Stop at the next token boundary; see `Engine.suspend`."""
        await asyncio.to_thread(self.engine.suspend, drop_kv=drop_kv)

    async def resume(self) -> None:
        """Go on after `suspend`."""
        await asyncio.to_thread(self.engine.resume)

    def _sink(self, receive: Callable[[Event], None]) -> Callable[[Event], None]:
        """A sink for the engine whose events `receive` gets on the running event loop."""
        self._outbox = outbox = Outbox.of_running_loop(self._outbox)
        self.engine.on_step_start(outbox.wake)
        return outbox.sink(receive)

    async def expect(
        self,
        prompts: Sequence[Prompt],
        *,
        steps: int = 0,
        compute: bool = False,
        namespace: Namespace | None = None,
        group: str = "",
    ) -> Expectation | None:
        """Announce the beginning that all `prompts` share; see `Engine.expect`. None when they share nothing.

        With `compute` it is computed as well, in the lowest class and only as far as there is room: a refusal is not
        an error, since whoever comes computes what is missing.
        """
        tokens = await asyncio.to_thread(self._shared, prompts)
        if not tokens:
            return None
        expectation = self.engine.expect(tokens, steps=steps, namespace=namespace)
        if compute:
            fields = {"priority": Priority.LOW, "group": group, "namespace": namespace or Namespace()}
            request = as_request(tokens, {"sampling": SamplingParams(max_tokens=1), **fields})
            try:
                with suppress(RequestError):
                    (await self._pin(request)).release()
            except BaseException:
                expectation.release()
                raise
        return expectation

    def _shared(self, prompts: Sequence[Prompt]) -> tuple[int, ...]:
        return PrefixCache.longest_common_prefix([self.engine.tokenize(as_request(p, {})) for p in prompts])

    async def _pin(self, request: Request) -> PrefixCache:
        events: asyncio.Queue[Event] = asyncio.Queue()
        put = self._sink(events.put_nowait)
        handle = await _off_loop(partial(self.engine.prefill, request, sink=put), undo=Handle.abort)
        try:
            result = (await events.get()).result
        except asyncio.CancelledError:
            handle.abort()
            raise
        assert result is not None
        return pinned_by(self.engine, handle, result)

    def detach(self) -> None:
        """Take no more events from the engine, which goes on: for one face of many over it, when it has no request."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    async def close(self) -> None:
        """End what is in flight and free the model. Idempotent."""
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)


def _abort_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.abort()


class AsyncHandle:
    """One request in flight on an event loop. Iterate for its events, each given once, or await `result`.

    Used in `async with`, it ends the request where the block is left early.
    """

    def __init__(self, engine: AsyncEngine, handle: Handle, events: asyncio.Queue[Event]) -> None:
        self.id = handle.id
        self.handle = handle
        self._engine = engine
        self._events = events
        self._result: Result | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        while self._result is None:
            event = await self._events.get()
            self._result = event.result
            yield event

    async def result(self) -> Result:
        """Wait for the end and give the result."""
        while self._result is None:
            self._result = (await self._events.get()).result
        return self._result

    def abort(self) -> None:
        """End the request at the next token boundary. Idempotent."""
        self.handle.abort()

    async def fork(self, count: int) -> list[AsyncHandle]:
        """Branch the request at its current token; see `Handle.fork`."""
        return await self._engine.fork(self, count)

    def __repr__(self) -> str:
        return f"<AsyncHandle {self.id!r}: {self.handle.state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


async def _off_loop(make: Callable[[], T], *, undo: Callable[[T], object]) -> T:
    """Make something on a thread. When this task is cancelled meanwhile, it is undone as soon as it is there."""
    there: list[T] = []
    gone = threading.Event()

    def work() -> T:
        there.append(make())
        if gone.is_set():
            undo(there[0])
        return there[0]

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:  # the thread goes on, also when the event loop does not
        gone.set()
        for made in there:
            await asyncio.to_thread(undo, made)  # twice does no harm
        raise


class Outbox:
    """Events on their way from engines' threads to an event loop, which is woken once for all that a step brings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._woken = False
        self._closed = False

    @classmethod
    def of_running_loop(cls, known: Outbox | None) -> Outbox:
        """The `known` one if it belongs to the running event loop, else a new one."""
        loop = asyncio.get_running_loop()
        return known if known is not None and known._loop is loop else cls(loop)

    def sink(self, receive: Callable[[Event], None]) -> Callable[[Event], None]:
        """A sink for `Engine.submit`; `receive` is called on the event loop's thread.

        The engine must know `wake` (`Engine.on_step_start`).
        """
        letters = self._letters
        return lambda event: letters.append((receive, event))

    def wake(self) -> bool:
        """Let the event loop take what lies here; on any thread. False once nobody listens there any more."""
        if self._letters and not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return False
        return not (self._closed or self._loop.is_closed())

    def close(self) -> None:
        """Nobody listens any more."""
        self._closed = True

    def _deliver(self) -> None:
        self._woken = False  # first: what comes from here on wakes us again
        while self._letters:
            receive, event = self._letters.popleft()
            try:
                receive(event)
            except Exception as error:  # noqa: BLE001 - a caller's own fault: the letters behind are for others
                told = {"message": f"what receives events of request {event.request_id!r} raised", "exception": error}
                self._loop.call_exception_handler(told)
