"""What goes on beside the step loop: hung passes are noticed, the governor's sensors are read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import RunnerError

if TYPE_CHECKING:
    from shoal.engine.pressure import MemoryWatch
    from shoal.power.governor import Governor


log = logging.getLogger("shoal.engine")


class Watchdog:
    """A small thread that calls `on_hang` once when a pass takes longer than `limit_s`: its callers must not hang too.

    `began` is when the pass that runs now began, on the monotonic clock, and None between passes. What counts is the
    time in which this process ran: when it is stopped (Ctrl-Z, a paused container, a debugger, a laptop that sleeps),
    this thread stops with it, and a gap between two of its looks counts as two of them at most.
    """

    def __init__(
        self,
        limit_s: float,
        on_hang: Callable[[RunnerError], None],
        governor: Governor | None,
        memory: MemoryWatch | None = None,
    ) -> None:
        self.began: float | None = None
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._governor = governor
        self._memory = memory
        self._complained = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop watching; callable from any thread, its own too."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        often_s = min(self._limit_s / 4, 1.0)
        if self._governor is not None:
            often_s = min(often_s, self._governor.policy.sample_s)
        watched: float | None = None  # the pass that was looked at last, and for how long it has been
        running_s, looked = 0.0, time.monotonic()
        while not self._stopped.wait(often_s):
            now = time.monotonic()
            since_s, looked = min(now - looked, 2 * often_s), now
            self._sample()
            began = self.began
            if began is None:
                watched = None
                continue
            running_s = min(since_s, now - began) if began != watched else running_s + since_s
            watched = began
            if running_s >= self._limit_s:
                message = f"a forward pass has not returned for {self._limit_s:g} s"
                log.error("%s: the engine ends every request and closes", message)
                self._on_hang(RunnerError(message, value=running_s, limit=self._limit_s, hint="load the engine again"))
                return

    def _sample(self) -> None:
        """Let the sensors be read. A fault in that is logged once; the watch goes on."""
        try:
            if self._governor is not None:
                self._governor.sample()
            if self._memory is not None:
                self._memory.sample()
            self._complained = False
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("the sensors could not be read")
