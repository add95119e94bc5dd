"""What goes on beside the step loop: hung passes are noticed, the governor's sensors are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import RunnerError

if TYPE_CHECKING:
    from shoal.power.governor import Governor


class Watchdog:
    """A small thread that calls `on_hang` once when a pass takes longer than `limit_s`: its callers must not hang too.

    `began` is when the pass that runs now began, on the monotonic clock, and None between passes.
    """

    def __init__(self, limit_s: float, on_hang: Callable[[RunnerError], None], governor: Governor | None) -> None:
        self.began: float | None = None
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._governor = governor
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
        while not self._stopped.wait(often_s):
            if self._governor is not None:
                self._governor.sample()
            began = self.began
            if began is not None and time.monotonic() - began >= self._limit_s:
                self._on_hang(self._error(began))
                return

    def _error(self, began: float) -> RunnerError:
        message = f"a forward pass has not returned for {self._limit_s:g} s"
        elapsed = time.monotonic() - began
        return RunnerError(message, value=elapsed, limit=self._limit_s, hint="load the engine again")
