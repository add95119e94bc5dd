"""The engine: the ways to talk to a step loop that runs on a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from shoal.checks import is_number
from shoal.config import EngineConfig, Settings
from shoal.core.commands import Keep, SetMaxStall
from shoal.core.request import RequestSpec
from shoal.core.sequence import Status
from shoal.engine.admission import Admission
from shoal.engine.batch import OnTokens, Prompt, as_request, branch_requests, branch_seeds, run_requests
from shoal.engine.feed import BlockFeed
from shoal.engine.handles import Expectation, Handle, PrefixCache, pinned_by
from shoal.engine.inflight import NOTHING, Output, Sink
from shoal.engine.inputs import Codec, InputProcessor, PreparedRequest, refuse_arrival
from shoal.engine.loop import StepLoop
from shoal.engine.mailbox import T
from shoal.engine.thread import LoopThread
from shoal.errors import EngineClosedError, InvalidRequestError, ShoalError
from shoal.runners.base import Runner
from shoal.runners.plan import ModelSpec
from shoal.types import (
    MAX_KEEP_S,
    EngineStats,
    Event,
    FinishReason,
    Namespace,
    Report,
    Request,
    Result,
    SamplingParams,
    StepRecord,
)

if TYPE_CHECKING:
    from shoal.engine.pressure import MemoryWatch
    from shoal.models.files import Progress
    from shoal.power.governor import Governor

log = logging.getLogger("shoal.engine")


class Engine:
    """Batches requests through one model. All methods may be called from any thread.

    One thread, its own, creates the runner and makes every call to it. Requests join and leave the running batch at
    token boundaries. Whatever happens, a submitted request ends in exactly one event with a result; an engine that
    can no longer serve is `closed`, and `failure` says why.
    """

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        codec: Codec | None = None,
        config: EngineConfig | None = None,
        *,
        governor: Governor | None = None,
        memory: MemoryWatch | None = None,
    ) -> None:
        """`make_runner` is called on the engine's thread; what it raises is raised here.

        `governor` sets its pace, in place of the setting `power`; `memory` stands in for what `watch_memory` makes.
        """
        self.config = config or EngineConfig()
        self.codec = codec
        self.governor = governor if governor is not None else _governor(self.config)
        self.memory = memory if memory is not None else _memory_watch(self.config)
        self.warmup_s: float | None = None
        self.restored_handles: list[Handle] = []
        self.restored_prefixes: list[PrefixCache] = []
        self._lock = threading.Lock()
        self._admission = Admission(self.config)
        self._thread = LoopThread(self.config.watchdog_s, self._end_all, self.governor, self.memory)
        self._thread.start(make_runner, self._make_loop)
        self.feed: BlockFeed | None = BlockFeed(self._loop)

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
        """Load a model by name, path or hub id, fetching it first if need be. Settings as `EngineConfig`.

        `state` is a directory that `save` wrote: its pinned prefixes are computed again and its requests go on; they
        are in `restored_prefixes` and `restored_handles`. `governor` is one that several engines share, or that has
        sensors of its own; the setting `power` makes one for this engine alone.
        `warmup` runs passes of representative shapes before it returns; `warmup_s` says how long they took.
        `progress` is called with what takes long ("download", "unpack", "pack"), bytes done and bytes in all.
        Raises `ConfigError`, any `ModelError`, `BackendError`.
        """
        from shoal.engine.loading import open_model

        config = EngineConfig.of(**settings)
        opened = open_model(model, config, progress=progress)
        engine = cls(opened.make_runner, opened.codec, config, governor=governor)
        try:
            if warmup:
                from shoal.engine.warmup import warm_up

                engine.warmup_s = warm_up(engine)
                log.info("warmed up in %.2f s", engine.warmup_s)
            if state is not None:
                from shoal.engine.state import restore

                restore(engine, Path(state))
        except BaseException:
            engine.close()
            raise
        return engine

    # -- asking for text ----------------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model."""
        return self._loop.runner.spec

    @property
    def closed(self) -> bool:
        """True when no more requests are taken."""
        return self._thread.closed

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, where it did not end by `close`."""
        return self._thread.failure

    @property
    def _loop(self) -> StepLoop:
        return self._thread.loop

    def submit(self, request: Request, *, sink: Sink | None = None) -> Handle:
        """Put a request in line and return at once. Its events go to the handle, or to `sink` on the engine's thread.

        Raises a `RequestError` that names the field when it cannot be served, `QueueFullError` when too many wait,
        `PowerLimitError` when the governor refuses it, `EngineClosedError`.
        """
        refuse_arrival(request)
        return self._accept(request, sink)

    def complete(self, request: Request) -> Result:
        """Run one request to its end. Raises as `submit`."""
        with self.submit(request) as handle:
            return handle.result()

    def generate(self, request: Request) -> Generator[Event, None, None]:
        """Events of one request as they come; the last has the result. Leaving early ends it. Raises as `submit`."""
        with self.submit(request) as handle:
            yield from handle

    def tokenize(self, request: Request) -> list[int]:
        """Token ids of a request's prompt. InvalidRequestError names the field that cannot be encoded."""
        return self._loop.inputs.tokenize(request)

    def check_text(self, *texts: str) -> None:
        """Refuse texts that together are far too long for a prompt, before they are tokenised: PromptTooLongError."""
        self._loop.inputs.check_text(*texts)

    def check_grammar(self, sampling: SamplingParams) -> None:
        """Refuse a schema, expression or grammar (one is given) of which no masks can be made: InvalidRequestError."""
        self._loop.inputs.compile(sampling)

    def _accept(self, request: Request, sink: Sink | None) -> Handle:
        """As `submit`, also for a request whose `arrival_s` has come."""
        self._thread.refuse_if_closed()
        return self._submit(self._loop.inputs.prepare(request), sink)

    def _submit(
        self,
        prepared: PreparedRequest,
        sink: Sink | None,
        *,
        before: Output = NOTHING,
    ) -> Handle:
        (handle,) = self._register([prepared], sink)
        arrival = self._loop.clock()

        def join() -> None:
            handle._state = self._loop.add(handle.id, prepared, self._admission.deliver, before=before, arrival=arrival)

        self._post(join, handle.id)
        return handle

    def resume_request(self, spec: RequestSpec, before: Output, *, sink: Sink | None = None) -> Handle:
        """Let a request go on after what it wrote before, as when a saved state is restored. Raises as `submit`."""
        return self._submit(self._loop.inputs.admit(spec), sink, before=before)

    def _register(self, arriving: Sequence[PreparedRequest], sink: Sink | None) -> list[Handle]:
        """Name requests that are about to join: all or none. Refuses a name in use, a full queue, a closed engine."""
        if self.memory is not None:
            self.memory.admit()
        if self.governor is not None:
            for prepared in arriving:
                self.governor.admit(prepared.spec.id)
        self._thread.refuse_if_closed()
        return self._admission.enter(
            arriving,
            sink,
            lambda name, prepared: Handle(self, name, prepared),
            kv_capacity=self.spec.kv_capacity,
            finished_per_s=self._loop.finished_per_s,
        )

    def run(
        self, requests: Sequence[Request], on_tokens: OnTokens | None = None, *, prefix: PrefixCache | None = None
    ) -> Report:
        """Run requests to their ends and report. One that cannot be served ends with its error, the others run on.

        `on_tokens` is called on this thread. `prefix` is held while they run; all must begin with it.
        """
        return run_requests(self, self._accept, requests, on_tokens, prefix)

    def fan_out(
        self, shared: Prompt, branches: Sequence[Prompt], on_tokens: OnTokens | None = None, **fields: Any
    ) -> Report:
        """Run one request per branch, each the shared part and then the branch's own; the shared part is computed once.

        Both are text, token ids, or chat messages, of one kind. `fields` go to every `Request`.
        """
        return self.run(branch_requests(shared, branches, fields), on_tokens)

    def cache_prefix(self, prefix: Prompt, *, namespace: Namespace | None = None) -> PrefixCache:
        """Compute a prefix now and hold its KV until `PrefixCache.release` (or the end of a `with`).

        Raises as `submit` does, `RunnerError` when the pass fails.
        """
        fields = {"namespace": namespace or Namespace(), "sampling": SamplingParams(max_tokens=1)}
        handle = self.prefill(as_request(prefix, fields))
        try:
            return pinned_by(self, handle, handle.result())
        except BaseException:  # also Ctrl-C: nobody could release what would be pinned
            handle.abort()
            raise

    def prefill(self, request: Request, *, sink: Sink | None = None) -> Handle:
        """Compute a request's prompt and no output; its KV is pinned when the result comes. Raises as `submit`."""
        refuse_arrival(request)
        return self._submit(self._loop.inputs.prepare(request, prefill_only=True), sink)

    def expect(self, tokens: Sequence[int], *, steps: int = 0, namespace: Namespace | None = None) -> Expectation:
        """Announce that requests beginning with `tokens` come in about `steps` steps: that prefix is evicted last."""
        return Expectation(self._post, self._loop, tuple(tokens), namespace or Namespace(), steps)

    def keep(self, tokens: Sequence[int], seconds: float, *, namespace: Namespace | None = None) -> None:
        """Evict what is cached of a beginning late for so many seconds, as `Request.keep_s` does after a request."""
        if not is_number(seconds, 0, MAX_KEEP_S):
            raise InvalidRequestError(f"keep is {seconds!r}", param="keep", value=seconds, limit=MAX_KEEP_S)
        command = Keep(tuple(tokens), namespace or Namespace(), self._loop.clock() + seconds)

        def keep() -> None:
            self._loop.scheduler.apply(command)

        self._post(keep)

    def release_prefix(self, prefix: PrefixCache) -> None:
        """Let go of a pinned prefix; `PrefixCache.release` calls this."""
        self._post(lambda: self._loop.unpin(prefix.seq_id))

    def fork(self, handle: Handle, count: int, *, sink: Sink | None = None) -> list[Handle]:
        """Branch a request at its current token; see `Handle.fork`. Events go to the branches, or all to `sink`."""
        children = self._register(branch_seeds(handle._prepared, count), sink)

        def branch() -> None:  # the parent has joined by now: its own command came before this one
            parent = handle._state
            if parent is None or parent.seq.status is Status.FINISHED:
                raise _cannot_fork("a finished request", handle.id)
            if parent.seq.spec.prefill_only:
                raise _cannot_fork("a prefill, which writes nothing,", handle.id)
            before = self._loop.share(parent)
            for child in children:
                child._state = self._loop.add(child.id, child._prepared, self._admission.deliver, before=before)

        try:
            self.call(branch)
        except BaseException:
            self._post(lambda: self._withdraw(children))
            self._admission.withdraw(children)
            raise
        return children

    def _withdraw(self, children: Sequence[Handle]) -> None:
        """End branches whose caller was interrupted before it had them; nothing happens where none has joined."""
        for child in children:
            if child._state is not None:
                self._loop.abort(child._state)

    def abort(self, handle: Handle) -> None:
        """End a request at the next token boundary; nothing happens when it has ended."""

        def leave() -> None:
            if handle._state is not None:
                self._loop.abort(handle._state)

        self._post(leave)

    def listen(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` with every step's record, on the engine's thread, until `unlisten`. It must not block.

        One that raises is logged and told no more.
        """
        self._loop.on_step.append(listener)

    def unlisten(self, listener: Callable[[StepRecord], None]) -> None:
        """Take a listener back."""
        with contextlib.suppress(ValueError):
            self._loop.on_step.remove(listener)

    def on_step_start(self, start_step: Callable[[], bool]) -> None:
        """Call `start_step` on the engine's thread when events are out and a pass is to begin, until it gives False."""
        with self._lock:
            if start_step not in self._loop.step_starters:
                self._loop.step_starters.append(start_step)

    def set_max_stall(self, ms: float) -> None:
        """Change `max_stall_ms` for the steps to come; `config` says the new one. ConfigError when out of range."""
        self.config = dataclasses.replace(self.config, max_stall_ms=ms)
        self.call(lambda: self._loop.scheduler.apply(SetMaxStall(ms)))

    def load_tokens(self) -> tuple[int, int]:
        """Prompt tokens that are still to be computed, and the contexts of running requests; a step old at most."""
        return self.call(self._loop.load)

    def stats(self) -> EngineStats:
        """What the engine holds and has done so far."""
        return self._loop.stats()

    # -- the life of the engine ---------------------------------------------------------------------------------

    def suspend(self, *, drop_kv: bool = False) -> None:
        """Stop at the next token boundary; returns when it is reached. Requests stay and may be added.

        With `drop_kv` all KV, cached prefixes included, is given up and computed again after `resume`: same tokens.
        """

        def halt() -> None:
            self._thread.suspend()
            if drop_kv:
                self._loop.drop_kv()

        self.call(halt)

    def resume(self) -> None:
        """Go on after `suspend`."""
        self.call(self._thread.resume)

    def save(self, path: str | Path) -> None:
        """Write requests in flight and pinned prefixes to a directory (safetensors and JSON), at a token boundary.

        Nothing is ended: save a suspended engine before it is closed. StoreError when the directory cannot be written.
        """
        from shoal.engine.state import save

        self.call(lambda: save(self._loop, Path(path)))

    def close(self, timeout_s: float = 30.0) -> None:
        """End what is in flight as aborted, free the model, stop the thread. Idempotent."""
        self._thread.close(timeout_s)
        self._end_all(EngineClosedError("the engine is closed"), FinishReason.ABORTED)

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure is not None else "closed" if self.closed else "open"
        return f"<Engine {self.spec.name} on {self.spec.runner} ({self.spec.precision}), {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- between threads ----------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread at a token boundary and give its result, or raise what it raised."""
        return self._thread.call(function)

    def _post(self, command: Callable[[], None], name: str | None = None) -> None:
        """Hand a command to the engine's thread. When that is gone, the named request ends here."""
        self._thread.post(command)
        if name is not None and not self._thread.runs:
            self._end_all(EngineClosedError("the engine is closed"), FinishReason.ABORTED)

    def _end_all(self, error: ShoalError, reason: FinishReason) -> None:
        """End whatever has not ended, from outside the loop."""
        sinks = self._admission.take_all()
        now = self._loop.clock()
        known = {state.request_id: state.result(now, reason, error) for state in self._loop.states}
        for name, sink in sinks.items():
            result = known.get(name) or Result(name, (), "", reason, 0, None, 0.0, 0, error=error)
            try:
                sink(Event(name, result=result))
            except Exception:
                log.exception("the sink of request %r raised", name)
        self._loop.start_step()

    def _make_loop(self, runner: Runner) -> StepLoop:
        """What carries the requests out; on the engine's thread."""
        inputs = InputProcessor(runner.spec, self.codec, self.config.seed)
        loop = StepLoop(runner, inputs, self.config, self.governor, memory=self.memory)
        loop.wake = self._thread.wake
        if self.memory is not None:
            self.memory.on_change = self._thread.wake
        return loop


def _governor(config: EngineConfig) -> Governor | None:
    """The governor that the settings ask for, over the sensors of this machine."""
    if config.power is False:
        return None
    from shoal.power import Governor, PowerPolicy  # here: most engines have none

    return Governor(policy=PowerPolicy.of(config.power))


def _memory_watch(config: EngineConfig) -> MemoryWatch | None:
    """The watch over this machine's memory that the settings ask for."""
    if not config.watch_memory:
        return None
    from shoal.engine.pressure import MemoryWatch  # here: most engines have none
    from shoal.power.memory import find_memory_sensors

    return MemoryWatch(find_memory_sensors())


def _cannot_fork(what: str, name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} cannot be forked", param="fork", value=name, hint="submit it again")
