"""The asyncio face of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from shoal.engine import Engine
from shoal.errors import RequestError
from shoal.handles import Expectation, Handle, PrefixCache, pinned_by
from shoal.plan import ModelSpec
from shoal.running import Prompt, as_request
from shoal.types import Event, Namespace, Priority, Request, Result, SamplingParams


class AsyncEngine:
    """An `Engine` for asyncio: the event loop never waits for the model. Usable with `async with`, and closed by it.

    Leaving the iteration of `generate` early, also by cancellation, aborts the request at the next token boundary.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._load: partial[Engine] | None = None

    @classmethod
    def load(cls, model: str = "smollm2-135m", **settings: Any) -> Self:
        """An engine that loads when its `async with` begins. Arguments and errors as `Engine.load`."""
        waiting = cls.__new__(cls)
        waiting._load = partial(Engine.load, model, **settings)
        return waiting

    async def __aenter__(self) -> Self:
        if self._load is not None:
            self.engine = await asyncio.to_thread(self._load)
            self._load = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model."""
        return self.engine.spec

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request as they come; the last has the result. Raises as `Engine.submit`."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        put = partial(_put, asyncio.get_running_loop(), events)
        handle = await _submitted(partial(self.engine.submit, request, sink=put))
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.finished
                yield event
        finally:
            if not finished:
                handle.abort()

    async def complete(self, request: Request) -> Result:
        """Run one request to its end."""
        async for event in self.generate(request):
            if event.result is not None:
                return event.result
        raise AssertionError("a request ended without a result")

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
        return PrefixCache.longest_common_prefix([self.engine.intake.tokenize(as_request(p, {})) for p in prompts])

    async def _pin(self, request: Request) -> PrefixCache:
        events: asyncio.Queue[Event] = asyncio.Queue()
        put = partial(_put, asyncio.get_running_loop(), events)
        handle = await _submitted(partial(self.engine.prefill, request, sink=put))
        try:
            result = (await events.get()).result
        except asyncio.CancelledError:
            handle.abort()
            raise
        assert result is not None
        return pinned_by(self.engine, handle, result)

    async def close(self) -> None:
        """End what is in flight and free the model. Idempotent."""
        if self._load is None:
            await asyncio.to_thread(self.engine.close)


async def _submitted(submit: Callable[[], Handle]) -> Handle:
    """Submit on a thread. When this task is cancelled meanwhile, the request is aborted as soon as it is there."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_abort_orphan)
        raise


def _abort_orphan(submitting: asyncio.Future[Handle]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().abort()


def _put(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    """Hand an event from the engine's thread to the event loop; nobody listens once that is closed."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:  # closed between the question and the call
            return
