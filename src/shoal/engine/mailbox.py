"""Commands from any thread to the one thread that owns a thing."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Mailbox:
    """Takes commands from any thread; its owner runs them, in the order they came, when it calls `run_pending`."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, command: Callable[[], None]) -> None:
        """Leave a command and go on."""
        self._commands.put(command)

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Leave a function whose result, or what it raises, comes in the future."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - it belongs to who asked, not to the owner's thread
                done.set_exception(error)

        self._commands.put(run)
        return done

    def run_pending(self, *, wait: bool = False) -> None:
        """Run the commands that are there; with `wait`, at least one."""
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def run_pending_for(self, seconds: float, *, until: Callable[[], bool]) -> None:
        """Run commands as they come for that long, or until one of them has made `until` true."""
        end = time.monotonic() + seconds
        while not until() and (left := end - time.monotonic()) > 0:
            try:
                command = self._commands.get(timeout=left)
            except queue.Empty:
                return
            command()
