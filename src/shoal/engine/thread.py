"""The thread that an engine owns: it makes the runner, drives the loop, and runs what other threads ask for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from shoal.engine.loop import StepLoop
from shoal.engine.mailbox import Mailbox, T
from shoal.engine.watchdog import Watchdog
from shoal.errors import EngineClosedError, RunnerError, ShoalError
from shoal.runners.base import Runner
from shoal.types import FinishReason

if TYPE_CHECKING:
    from shoal.engine.pressure import MemoryWatch
    from shoal.power.governor import Governor

log = logging.getLogger("shoal.engine")

_MAX_FAILURES = 3  # passes that fail in a row before the engine gives up


class LoopThread:
    """Drives a loop on a thread of its own, until it is closed or has failed.

    The runner is created and used on that thread alone, and commands run there between two steps. When the thread can
    do no more, or a pass hangs in it, `failure` says why, and `on_end` is called to end every request: on this
    thread, or on the watchdog's.
    """

    loop: StepLoop

    def __init__(
        self,
        watchdog_s: float,
        on_end: Callable[[ShoalError, FinishReason], None],
        governor: Governor | None = None,
        memory: MemoryWatch | None = None,
    ) -> None:
        """`governor` and `memory` are sampled by the watchdog, beside the passes."""
        self.failure: BaseException | None = None
        self.watchdog = Watchdog(watchdog_s, self._hung, governor, memory)
        self._on_end = on_end
        self._mailbox = Mailbox()
        self._closing = False
        self._suspended = False
        self._thread: threading.Thread | None = None

    def start(self, make_runner: Callable[[], Runner], make_loop: Callable[[Runner], StepLoop]) -> None:
        """Make runner and loop on the thread, and begin. Raises here what they raise there."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(make_runner, make_loop, started), name="shoal-engine", daemon=True
        )
        self._thread.start()
        started.result()
        self.watchdog.start()

    @property
    def closed(self) -> bool:
        """True when it takes nothing more."""
        return self._closing or self.failure is not None

    @property
    def runs(self) -> bool:
        """True while commands are run."""
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    def refuse_if_closed(self) -> None:
        """EngineClosedError when it takes nothing more."""
        if self.failure is not None:
            raise EngineClosedError(f"the engine has failed: {self.failure}", hint="load it again") from self.failure
        if self._closing:
            raise EngineClosedError("the engine is closed", hint="load it again")

    def post(self, command: Callable[[], None]) -> None:
        """Hand a command to the thread; one that raises ends it."""
        self._mailbox.post(command)

    def wake(self) -> None:
        """There may be something to do again: the thread looks."""
        self._mailbox.post(_nothing)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread between two steps and give its result, or raise what it raised."""
        self.refuse_if_closed()
        done = self._mailbox.ask(function)
        while True:
            try:
                return done.result(timeout=0.5)
            except TimeoutError:
                if not self.runs:
                    raise EngineClosedError("the engine stopped before it could answer") from self.failure

    def suspend(self) -> None:
        """Make no further step until `resume`. On the thread."""
        self._suspended = True

    def resume(self) -> None:
        """Go on. On the thread."""
        self._suspended = False

    def close(self, timeout_s: float) -> None:
        """Stop between two steps and let the runner go; waits for that, but on the thread itself. Idempotent."""
        self._closing = True
        self.wake()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self.watchdog.stop(timeout_s)

    def _live(
        self, make_runner: Callable[[], Runner], make_loop: Callable[[Runner], StepLoop], started: Future[None]
    ) -> None:
        try:
            runner = make_runner()
            try:
                self.loop = make_loop(runner)
                started.set_result(None)
                with contextlib.closing(self.loop):
                    self._serve(self.loop)
            finally:
                runner.close()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
                return
            self.failure = error
            log.error("the engine has failed and is closed", exc_info=error)
            cause = RunnerError(f"the engine's thread failed: {error}")
            cause.__cause__ = error
            self._on_end(cause, FinishReason.ERROR)

    def _serve(self, loop: StepLoop) -> None:
        while not self._closing:
            idle = loop.idle or self._suspended
            if idle:
                loop.start_step()
            copying = idle and loop.copy_out()
            self._mailbox.run_pending(wait=idle and not copying)
            if self._suspended or self._closing or (copying and loop.idle):
                continue
            self.watchdog.began = time.monotonic()
            loop.step()
            self.watchdog.began = None
            if loop.rest_s:
                loop.start_step()
                self._mailbox.run_pending_for(loop.rest_s, until=partial(self._rested, loop.kv_on_its_way))
            if self.failure is not None:  # the watchdog has ended everything meanwhile
                return
            if loop.failures >= _MAX_FAILURES:
                raise RunnerError(f"{loop.failures} forward passes failed in a row", limit=_MAX_FAILURES)
        self._mailbox.run_pending()
        loop.abort_all()

    def _rested(self, waited_for_kv: bool) -> bool:
        """Whether a rest is to end early: the engine closes, or KV that was waited for has come."""
        return self._closing or (waited_for_kv and not self.loop.kv_on_its_way)

    def _hung(self, error: RunnerError) -> None:
        """The pass that runs may never return: end everything without it. Called on the watchdog's thread."""
        self.failure = error
        self._on_end(error, FinishReason.ERROR)


def _nothing() -> None:
    """A command that only wakes the thread."""
