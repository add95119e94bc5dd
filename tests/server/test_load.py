"""Many clients at once, half of them unreliable: the small form of `scripts/server_load.py`."""

from __future__ import annotations

import asyncio
import gc

import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.server.crowd import crowd
from tests.support.live import LETTERS, Live, toy

BODY = {"max_tokens": 24, "temperature": 1, "logit_bias": LETTERS}


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_after_a_crowd_nothing_is_left_and_memory_is_flat() -> None:
    with Live(toy(step_s=0.002, max_batch=8)) as live:
        first = asyncio.run(crowd(live.url, 64, 2, BODY))
        live.wait_idle()
        before = resident()
        ends = asyncio.run(crowd(live.url, 64, 4, BODY, seed=1))
        live.wait_idle()
        grown = resident() - before
        stats = live.engine.stats()
    assert ends["vanished"] > 20
    assert ends["200"] >= 32 * 4
    assert set(ends) <= {"200", "vanished"}, ends
    # A call is one request, and what was answered may have its next turn prepared where nothing else is to do.
    assert stats.finished <= 64 * 6 + first["200"] + ends["200"]
    assert grown < 30e6, f"{grown / 1e6:.1f} MB"
