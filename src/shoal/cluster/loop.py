"""Requests carried out elsewhere: what stands in a cluster's engine where a step loop stands in one with a model.

On the engine's own thread requests come, hear of their events and end; on a thread with an event loop each is sent to
the replica that the router chooses, and the replicas' events are followed. A request that was lost before anything of
its answer came is sent to another replica, once; one that had begun ends with an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from shoal.cluster.links import Link, follow
from shoal.cluster.router import Route, Router
from shoal.core.commands import Command
from shoal.core.journal import content_hashes
from shoal.core.sequence import Sequence, Status
from shoal.engine.inflight import NOTHING, InFlight, Output, RequestState, Sink, sink_raised
from shoal.engine.inputs import InputProcessor, PreparedRequest
from shoal.errors import EngineClosedError, QueueFullError, ReplicaLostError, RunnerError, ShoalError
from shoal.runners.base import Runner
from shoal.runners.plan import SeqId
from shoal.types import EngineStats, Event, FinishReason, Namespace, Result, StepRecord

log = logging.getLogger("shoal.cluster")

_PING_S = 1.0  # between two questions whether a replica lives
_ELSEWHERE = (ReplicaLostError, RunnerError, EngineClosedError, QueueFullError)  # of the replica, not of the request


@dataclass(slots=True, eq=False, kw_only=True)
class RemoteState(RequestState):
    """One request in flight, and the task that carries it out; its result is for one that no replica ended."""

    before: Output
    task: asyncio.Task[None] | None = None
    begun: bool = False  # something of its answer came
    why: ReplicaLostError | None = None  # its replica was given up


class _Commands:
    """Takes the commands of a scheduler. What there is to hint at is on the replicas, which get whole requests."""

    def apply(self, command: Command) -> None:
        """Nothing: hints about KV are for one engine, and a request brings its own."""
        del command


class ClusterLoop(InFlight[RemoteState]):
    """Has the face of a `StepLoop`; its steps are elsewhere.

    Invariant: every state's sink gets exactly one event with a result, and nothing after it.
    """

    def __init__(
        self,
        runner: Runner,
        inputs: InputProcessor,
        router: Router,
        post: Callable[[Callable[[], None]], None],
        silence_s: float,
    ) -> None:
        """`post` runs a command on the engine's thread; a replica that answers nothing for `silence_s` is given up."""
        super().__init__()
        self.runner = runner
        self.inputs = inputs
        self.router = router
        self.silence_s = silence_s
        self.clock = time.perf_counter
        self.scheduler = _Commands()
        self.on_step: list[Callable[[StepRecord], None]] = []
        self.prefixes: dict[SeqId, tuple[tuple[int, ...], Namespace]] = {}
        self.steps = self.failures = 0
        self.rest_s = 0.0
        self.sent: dict[str, int] = {}  # requests that a replica was given, by its name
        self.resent: dict[str, int] = {}  # requests sent away from a replica that had taken them, by its name
        self.lost = 0  # requests that ended since their replica was lost
        self._post = post
        self._links: dict[str, Link] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._well: set[str] = set()
        self._cached = self._computed = 0
        self._aio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._aio.run_forever, name="shoal-cluster", daemon=True)
        self._thread.start()

    # -- the face of a step loop, on the engine's thread --------------------------------------------------------

    idle = True  # there is no step to make; what happens comes as commands

    kv_on_its_way = False  # no KV lies here, nor is any brought

    def step(self) -> None:
        """Nothing is computed here."""

    def copy_out(self) -> bool:
        """No KV lies here: nothing to copy to further tiers."""
        return False

    def drop_kv(self) -> None:
        """No KV lies here: what the replicas hold is theirs."""

    def load(self) -> tuple[int, int]:
        """Tokens that wait at all replicas together, and the contexts of requests that run there."""
        loads = [self.router.load(name) for name in self.router.replicas]
        return sum(queued for queued, _ in loads), sum(running for _, running in loads)

    def add(
        self,
        request_id: str,
        prepared: PreparedRequest,
        sink: Sink,
        *,
        before: Output = NOTHING,
        arrival: float | None = None,
    ) -> RemoteState:
        """Take a request in, and have it sent."""
        self._next_id += 1
        arrival = self.clock() if arrival is None else arrival
        seq = Sequence(self._next_id, prepared.spec, arrival=arrival, written=before.tokens)
        logprobs, scores = list(before.logprobs), list(before.prompt_logprobs)
        state = RemoteState(request_id, prepared, seq, sink, logprobs=logprobs, prompt_logprobs=scores, before=before)
        self._states[seq.seq_id] = state
        self._aio.call_soon_threadsafe(self._start, state)
        return state

    def share(self, state: RemoteState) -> Output:
        """A request's output so far: its branches go on after it, wherever they are sent."""
        return state.output()

    def abort(
        self, state: RemoteState, reason: FinishReason = FinishReason.ABORTED, error: ShoalError | None = None
    ) -> None:
        """End a request here and, soon, where it runs. One that has ended stays as it is."""
        if state.seq.status is not Status.FINISHED:
            self._aio.call_soon_threadsafe(self._cancel, state)
            self._finish(state, state.result(self.clock(), reason, error))
            self.start_step()

    def abort_all(self, error: ShoalError | None = None) -> None:
        """End every request, with `error` or as aborted."""
        for state in self.states:
            self.abort(state, FinishReason.ERROR if error is not None else FinishReason.ABORTED, error)

    def unpin(self, seq_id: SeqId) -> None:
        """Nothing is pinned here: a prefix that was computed ahead is cached where it was computed."""

    def stats(self) -> EngineStats:
        """What was done through this door; sizes of KV are the replicas'."""
        running = sum(state.begun for state in self._states.values())
        zeros = {field.name: 0 for field in dataclasses.fields(EngineStats) if field.default is dataclasses.MISSING}
        told = {
            "waiting": len(self._states) - running,
            "running": running,
            "finished": self._finished,
            "cached_tokens": self._cached,
            "computed_tokens": self._computed,
        }
        return EngineStats(**{**zeros, "peak_bytes": None, **told})  # type: ignore[arg-type]

    def close(self) -> None:
        """Leave all replicas, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._leave_all(), self._aio).result(10.0)
        self._aio.call_soon_threadsafe(self._aio.stop)
        self._thread.join(10.0)
        self._aio.close()

    def _deliver(self, state: RemoteState, event: Event) -> None:
        """News of a request arrive on the engine's thread."""
        if state.seq.status is Status.FINISHED:
            return
        if event.result is not None:
            self._finish(state, event.result, event)
        else:
            state.seq.status = Status.RUNNING
            self._tell(state, event._replace(request_id=state.request_id))
        self.start_step()

    def _tell(self, state: RemoteState, event: Event) -> None:
        state.seq.tokens += event.tokens
        state.text.append(event.text)
        state.logprobs += event.logprobs
        state.prompt_logprobs += event.prompt_logprobs
        if event.tokens and state.first_token_at is None:
            state.first_token_at = self.clock()
        try:
            state.sink(event)
        except Exception as cause:  # noqa: BLE001 - a caller's own fault: only its own request is to pay for it
            error = sink_raised(state.request_id, cause)
            if event.result is None:
                self.abort(state, FinishReason.ERROR, error)

    def _finish(self, state: RemoteState, result: Result, event: Event | None = None) -> None:
        now = self.clock()
        state.seq.status = Status.FINISHED
        state.seq.cached_tokens = result.receipt.cached_tokens
        del self._states[state.seq.seq_id]
        self._finished += 1
        self._ends.append(now)
        self._cached += result.receipt.cached_tokens
        self._computed += result.receipt.computed_tokens
        tokens = event.tokens if event is not None else ()
        if tokens and state.first_token_at is None:
            state.first_token_at = now
        first = None if state.first_token_at is None else state.first_token_at - state.seq.arrival
        result = dataclasses.replace(
            result, id=state.request_id, ttft_s=first, latency_s=now - state.seq.arrival, seed=state.seq.spec.seed
        )
        last = event or Event(state.request_id)
        self._tell(state, last._replace(request_id=state.request_id, result=result))

    # -- on the event loop: requests ----------------------------------------------------------------------------

    def _start(self, state: RemoteState) -> None:
        state.task = self._aio.create_task(self._carry_out(state))

    def _cancel(self, state: RemoteState) -> None:
        if state.task is not None:
            state.task.cancel()

    async def _carry_out(self, state: RemoteState) -> None:
        """Send a request, and once more where the first replica is lost before it has begun."""
        spec, tried = state.prepared.spec, set[str]()
        hashes = content_hashes(state.seq.tokens, spec.namespace, self.router.block_size)
        error: ShoalError = EngineClosedError("no replica takes requests", hint="look at /cluster")
        while len(tried) < 2:
            now = self._aio.time()
            route = self.router.route(
                hashes, len(state.seq.tokens), now, key=session_of(spec.namespace, spec.group), without=tried
            )
            if route is None:
                break
            if tried:
                first = next(iter(tried))
                self.resent[first] = self.resent.get(first, 0) + 1
                log.warning("request %r goes to %s after %s: %s", state.request_id, route.replica, first, error)
            tried.add(route.replica)
            self.sent[route.replica] = self.sent.get(route.replica, 0) + 1
            state.replica, state.why = route.replica, None
            try:
                await self._attempt(state, route)
                return
            except asyncio.CancelledError:
                if state.why is None:
                    raise
                error = state.why  # its replica was given up, and this cancelled only to say so
                _uncancel()
            except ShoalError as refused:
                error = refused
            except Exception as failed:  # noqa: BLE001 - whatever it was, the request must end
                error = RunnerError(f"the door failed: {failed!r}")
            finally:
                self.router.ended(route)
            if state.begun or not isinstance(error, _ELSEWHERE):
                break
        self.lost += isinstance(error, ReplicaLostError)
        self._post(lambda: self._end_with(state, error))

    def _end_with(self, state: RemoteState, error: ShoalError) -> None:
        if state.seq.status is not Status.FINISHED:
            self._finish(state, state.result(self.clock(), FinishReason.ERROR, error))
            self.start_step()

    async def _attempt(self, state: RemoteState, route: Route) -> None:
        """One replica's answer, passed on as it comes. Raises what it was refused with, or lost by."""
        link = self._links[route.replica]
        spec = state.prepared.spec
        if spec.deadline_s is not None:
            left = spec.deadline_s - (self.clock() - state.seq.arrival)
            spec = dataclasses.replace(spec, deadline_s=max(left, 1e-3))
        if spec.prefill_only:  # cached where it is computed, and not pinned there: nobody would ever release it
            sampling = dataclasses.replace(spec.sampling, max_tokens=1, min_tokens=0)
            spec = dataclasses.replace(spec, prefill_only=False, sampling=sampling)
        async with aclosing(link.run(dataclasses.replace(spec, id=None), state.before)) as events:
            async for event in events:
                if event.tokens and not state.begun:
                    self.router.started(route)
                if event.result is not None and event.result.error is not None:
                    error = RunnerError(f"{route.replica}: {event.result.error}")
                    if not state.begun:
                        raise error
                    event = event._replace(result=dataclasses.replace(event.result, error=error))
                state.begun = state.begun or bool(event.tokens or event.text)
                told = _prefilled(event) if state.prepared.spec.prefill_only else event
                if told is not None:
                    self._post(partial(self._deliver, state, told))
                if event.result is not None:
                    return
        raise ReplicaLostError(f"{route.replica} ended the answer without an end", value=route.replica)

    # -- on the event loop: replicas ----------------------------------------------------------------------------

    def connect(self, links: Mapping[str, Link]) -> None:
        """Use these replicas from now on, and no others; on any thread. Returns when their state was asked for once."""
        asyncio.run_coroutine_threadsafe(self._connect(dict(links)), self._aio).result()

    async def _connect(self, links: dict[str, Link]) -> None:
        for name in set(self._links) - set(links):
            await self._leave(name)
        for name, link in links.items():
            if name not in self._links:
                self._links[name] = link
                self.router.add(name)
                self.router.use(name, False)
                await self._look(name)
                self._watching[name] = self._aio.create_task(self._watch(name))

    async def _leave(self, name: str) -> None:
        task = self._watching.pop(name)
        self._well.discard(name)
        task.cancel()
        await asyncio.wait({task})
        self._give_up(name, ReplicaLostError(f"the replica {name} is gone", value=name))
        self.router.remove(name)
        await self._links.pop(name).close()

    async def _leave_all(self) -> None:
        for name in list(self._links):
            await self._leave(name)

    async def _watch(self, name: str) -> None:
        """Follow what a replica holds, and ask it from time to time whether it lives."""
        following = self._aio.create_task(follow(self._links[name], self.router))
        try:
            while True:
                await asyncio.sleep(_PING_S)
                await self._look(name)
        finally:
            following.cancel()

    async def _look(self, name: str) -> None:
        try:
            await self._links[name].ping(self.silence_s)
        except ReplicaLostError as error:
            self._give_up(name, error)
        else:
            self._well.add(name)
            self.router.use(name, True)

    def _give_up(self, name: str, error: ReplicaLostError) -> None:
        """Send a replica nothing until it answers again, and what it has elsewhere."""
        self.router.use(name, False)
        if name in self._well:
            self._well.discard(name)
            log.warning("%s", error)
        for state in self._states.copy().values():
            if state.replica == name and state.task is not None and state.why is None:
                state.why = error
                state.task.cancel()

    def describe(self) -> dict[str, object]:
        """What there is, for people and for tests."""
        return {
            "replicas": [self._row(name) for name in list(self._links)],
            "lost": self.lost,
            "escapes": self.router.escapes,
        }

    def _row(self, name: str) -> dict[str, object]:
        queued, running = self.router.load(name)
        return {
            "name": name,
            "url": getattr(self._links[name], "url", None),
            "well": name in self._well,
            "sent": self.sent.get(name, 0),
            "requests": sum(state.replica == name for state in self.states),
            "queued_tokens": queued,
            "running_tokens": running,
            "held_blocks": self.router.held_blocks(name),
            "resent": self.resent.get(name, 0),
        }


def session_of(namespace: Namespace, group: str) -> str:
    """What is best kept together: a `prompt_cache_key`, or the agents of one graph."""
    return f"{namespace.task}/{namespace.agent}" if namespace.task or namespace.agent else group


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _prefilled(event: Event) -> Event | None:
    """What a prefill hears: that it is done."""
    if event.result is None:
        return None
    done = (
        event.result
        if event.result.error is not None
        else dataclasses.replace(event.result, finish_reason=FinishReason.STOP)
    )
    return Event(event.request_id, result=dataclasses.replace(done, tokens=(), text=""))
