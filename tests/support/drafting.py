"""A drafter that tries tokens whether that pays or not, so that tests see many drafts, right and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from shoal.core.draft import FOR_EVER, Drafter
from shoal.core.sequence import Sequence as ScheduledTokens
from shoal.engine.loop import StepLoop


class AnyDrafter(Drafter):
    """Drafts random numbers of tokens, whether that pays or not."""

    def __init__(self, rng: random.Random, max_rows: int) -> None:
        super().__init__(max_rows, patience=FOR_EVER, least_gain=0.0)
        self._rng = rng

    def choose(
        self,
        rows: Sequence[tuple[ScheduledTokens, int]],
        most: int,
        most_ms: float,
        ms: Callable[[int], float],
    ) -> list[int]:
        counts = []
        for seq, limit in rows:
            draft = seq.draft
            there = 0 if draft is None or draft.at < 0 else len(draft.source.tokens) - draft.at
            count = self._rng.choice((0, 1, 2, 5, 15))
            counts.append(max(min(count, limit, there, most), 0))
            most -= counts[-1]
        return counts


def draft_anything(loop: StepLoop, rng: random.Random) -> None:
    """Let a loop, before its first request, draft random numbers of tokens where it drafts at all."""
    if loop.scheduler._drafter is not None:
        loop.scheduler._drafter = AnyDrafter(rng, loop.runner.spec.max_rows)
