"""An eviction storm: cached prefixes go for want of memory and are computed again soon after. The log tells of it."""

from __future__ import annotations

import logging
import math

from shoal.config import EngineConfig
from shoal.runners.plan import ModelSpec

log = logging.getLogger("shoal.engine")

_WINDOW_S = 10.0  # it must go on for so long; a window is judged within twice that, or forgotten
_LEAST_BLOCKS = 32  # fewer in a window are no storm, whatever their share
_LEAST_SHARE = 0.25  # of the prompt tokens that are computed
_QUIET_S = 60.0  # between two lines


class StormWatch:
    """Warns, at most once a minute, when much of what is computed had been cached and was evicted."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self._least = _LEAST_BLOCKS * spec.block_size
        kept = config.bytes_of("prefix_memory")
        beside = " and memory" if config.memory is not None else ""
        self._setting = "prefix_memory" if kept is not None else f"kv_memory{beside}"
        self._mib = (spec.kv_bytes if kept is None else kept) / 2**20
        self._began = -math.inf  # the window, and the totals when it began
        self._again_before = self._prompt_before = 0
        self._seen = 0
        self._told = -math.inf

    def look(self, now: float, again: int, prompt: int, step: int) -> None:
        """After each step: tokens computed again after an eviction and prompt tokens computed, in all and in the step.

        `now` is in seconds.
        """
        if again == self._seen:
            return
        if now - self._began > 2 * _WINDOW_S:
            self._begin(now, self._seen, prompt - step)
        self._seen = again
        if now - self._began >= _WINDOW_S:
            self._judge(now, again - self._again_before, prompt - self._prompt_before)
            self._begin(now, again, prompt)

    def _begin(self, now: float, again: int, prompt: int) -> None:
        self._began, self._again_before, self._prompt_before = now, again, prompt

    def _judge(self, now: float, repeated: int, computed: int) -> None:
        if repeated < max(self._least, _LEAST_SHARE * computed):
            return
        if now - self._told < _QUIET_S:
            return
        self._told = now
        log.warning(
            "eviction storm: of %d prompt tokens computed in the last %.0f s, %d had been cached and were evicted; "
            "raise %s (now %.4g MiB), or let fewer different prompts run at a time",
            max(computed, repeated), now - self._began, repeated, self._setting, self._mib,
        )  # fmt: skip
