from __future__ import annotations

from shoal.core.pacing import Pacer


def test_it_starts_small_and_settles_within_the_bound() -> None:
    pacer = Pacer(max_stall_ms=100)
    assert pacer.prompt_budget(512) == 32
    for _ in range(30):
        pacer.observe(8, 0, 10.0)
        chunk = pacer.prompt_budget(512)
        pacer.observe(8, chunk, 10.0 + 0.35 * chunk)
    predicted = 10.0 + 0.35 * pacer.prompt_budget(512)
    assert 80 < predicted <= 90


def test_a_price_that_rises_is_followed_at_once() -> None:
    pacer = Pacer(max_stall_ms=100)
    pacer.observe(8, 0, 10.0)
    pacer.observe(8, 100, 45.0)
    before = pacer.prompt_budget(512)
    pacer.observe(8, before, 10.0 + 2 * 0.35 * before)
    assert pacer.prompt_budget(512) < 0.75 * before


def test_a_bound_too_small_for_the_machine_still_moves_prompts_on() -> None:
    pacer = Pacer(max_stall_ms=1)
    pacer.observe(8, 0, 50.0)
    pacer.observe(8, 32, 80.0)
    assert pacer.prompt_budget(512) == 8


def test_the_limit_is_respected() -> None:
    pacer = Pacer(max_stall_ms=10_000)
    pacer.observe(1, 100, 1.0)
    assert pacer.prompt_budget(77) == 77
    assert pacer.prompt_budget(3) == 3
