"""Holds an engine in the middle of its work, however fast it computes."""

from __future__ import annotations

import math
import threading
import time

from shoal.engine.engine import Engine
from shoal.runners.plan import StepOutput, StepPlan


class Brake:
    """Lets the engines it is fitted to compute so many more steps, then none until it is released.

    Each step takes `step_s` at least.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._left = math.inf
        self._change = threading.Condition()

    def fitted(self, engine: Engine) -> Engine:
        """The engine, whose passes wait for this brake from now on."""
        runner = engine._loop.runner
        execute = runner.execute

        def held(plan: StepPlan) -> StepOutput:
            with self._change:
                assert self._change.wait_for(lambda: self._left > 0, 120), "nobody has released the brake"
                self._left -= 1
            time.sleep(self._step_s)
            return execute(plan)

        runner.execute = held  # type: ignore[method-assign]
        return engine

    def set(self, after: int) -> None:
        """Stop after so many steps."""
        with self._change:
            self._left = after

    def release(self) -> None:
        """Go on, and stop no more."""
        with self._change:
            self._left = math.inf
            self._change.notify_all()
