"""Prefixes that are announced: evicted last, the most distant need first; computed ahead without holding anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.core.audit import check_integrity
from shoal.core.blocks import BlockPool
from shoal.core.commands import Abort, Keep
from shoal.core.prefix_tree import PrefixTree
from shoal.engine.aio import AsyncEngine
from shoal.engine.handles import Expectation
from shoal.engine.record import replay
from shoal.errors import InvalidRequestError
from shoal.runners.fake import FakeRunner
from shoal.types import Namespace, Request, SamplingParams
from tests.support.engines import Driver, toy_engine

HOME = Namespace()
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def fill(tree: PrefixTree, pool: BlockPool, *paths: list[int]) -> None:
    for path in paths:
        blocks = [pool.take() for _ in range(len(path) // 4)]
        standing = tree.insert(path, blocks, HOME)
        assert standing == blocks
        tree.release(blocks)


def test_what_is_needed_later_goes_first() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool, 4)
    soon, late, never = [1] * 4, [2] * 4, [3] * 4
    fill(tree, pool, soon, late, never)
    tree.eviction.announce(tree.path_hashes(soon, HOME), 10)
    tree.eviction.announce(tree.path_hashes(late, HOME), 500)
    gone = []
    for _ in range(3):
        tree.evict(1)
        gone.append([path[0] for path in (soon, late, never) if not tree.match(path, HOME, limit=4).tokens])
    assert gone == [[3], [2, 3], [1, 2, 3]]


def test_a_nearer_need_of_the_same_prefix_counts() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool, 4)
    fill(tree, pool, [1] * 4, [2] * 4)
    for due in (900, 5):
        tree.eviction.announce(tree.path_hashes([1] * 4, HOME), due)
    tree.eviction.announce(tree.path_hashes([2] * 4, HOME), 50)
    tree.evict(1)
    assert tree.match([1] * 4, HOME, limit=4).tokens == 4
    tree.eviction.withdraw(tree.path_hashes([1] * 4, HOME), 5)
    fill(tree, pool, [2] * 4)
    tree.evict(1)
    assert tree.match([2] * 4, HOME, limit=4).tokens == 4


def test_of_an_expected_chain_the_end_goes_before_its_beginning_and_before_nearer_ones() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool, 4)
    chain, near = [1] * 12, [2] * 4
    fill(tree, pool, chain, near)
    tree.eviction.announce(tree.path_hashes(chain, HOME), 100)
    tree.eviction.announce(tree.path_hashes(near, HOME), 1)
    tree.evict(2)
    assert tree.match(chain, HOME, limit=12).tokens == 4
    assert tree.match(near, HOME, limit=4).tokens == 4


def test_the_longest_critical_path_of_a_group_joins_first() -> None:
    driver = Driver(max_batch=1)
    short = driver.add([1, 2], group="g", critical_path=10)
    long = driver.add([3, 4], group="g", critical_path=90)
    other = driver.add([5, 6], group="h", critical_path=1)
    driver.drain()
    order = [p.seq for p in driver.ended]
    assert order.index(long) < order.index(short), "inside a group the longest path goes first"
    assert order.index(other) < order.index(short), "between groups service decides, not the path"


def test_ageing_lifts_a_short_path_past_long_ones() -> None:
    driver = Driver(max_batch=1, ageing_s=1.0)
    old = driver.add([1, 2], group="g", critical_path=1, arrival=0.0)
    driver.now = 5.0
    driver.add([3, 4], group="g", critical_path=99)
    driver.drain()
    assert driver.ended[0].seq is old


def test_low_priority_gives_way_first_under_memory_pressure() -> None:
    driver = Driver(num_blocks=8, max_batch=4)
    low = driver.add(list(range(10)), max_tokens=12, rank=2)
    high = driver.add(list(range(50, 60)), max_tokens=12, rank=0)
    driver.drain()
    assert low.preemptions > 0
    assert high.preemptions == 0


def announced(engine: AsyncEngine) -> int:
    return engine.engine.call(lambda: len(engine.engine._loop.scheduler.kv.tree.eviction._announced))


def held(engine: AsyncEngine) -> int:
    def count() -> int:
        check_integrity(engine.engine._loop.scheduler)
        return engine.engine._loop.scheduler.kv.pool.num_held

    return engine.engine.call(count)


def test_an_expected_prefix_is_computed_ahead_and_then_found() -> None:
    async def main() -> None:
        rules = "Rules that every agent has, longer than one block of KV. "
        async with AsyncEngine(toy_engine()) as engine:
            expectation = await engine.expect([rules + "A", rules + "B"], compute=True)
            assert expectation is not None
            assert expectation.tokens == tuple(rules.encode())
            assert held(engine) == 0
            assert announced(engine) == len(rules) // 32
            result = await engine.complete(Request(prompt=rules + "C", sampling=SHORT))
            assert result.receipt.cached_tokens == len(rules)
            assert result.queue_s is not None
            assert 0 <= result.queue_s <= result.latency_s
            expectation.release()
            expectation.release()
            assert announced(engine) == 0

    asyncio.run(main())


def test_prompts_that_share_nothing_expect_nothing() -> None:
    async def main() -> None:
        async with AsyncEngine(toy_engine()) as engine:
            assert await engine.expect(["abc", "xyz"]) is None

    asyncio.run(main())


def test_a_prefetch_that_cannot_be_served_is_no_error() -> None:
    async def main() -> None:
        async with AsyncEngine(toy_engine(FakeRunner(num_blocks=2))) as engine:
            expectation = await engine.expect(["x" * 500], compute=True)
            assert expectation is not None
            expectation.release()
            assert announced(engine) == 0

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_cancelled_task_leaves_no_request_and_no_pin(delay_s: float) -> None:
    async def main() -> None:
        async with AsyncEngine(toy_engine(FakeRunner(step_s=0.01), max_step_tokens=32)) as engine:
            sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
            work: list[Any] = [
                engine.complete(Request(prompt="endless", sampling=sampling)),
                engine.expect(["y" * 200], compute=True),
            ]
            tasks = [asyncio.ensure_future(one) for one in work]
            await asyncio.sleep(delay_s)
            for task in tasks:
                task.cancel()
            _, expectation = await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(expectation, Expectation):  # it was quicker than the cancel
                expectation.release()
            for _ in range(100):
                await asyncio.sleep(0.02)
                if engine.engine.call(lambda: engine.engine._loop.idle):
                    break
            assert engine.engine.call(lambda: engine.engine._loop.idle), "an abandoned request still runs"
            assert held(engine) == 0
            assert announced(engine) == 0

    asyncio.run(main())


def test_a_record_with_expectations_replays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def main() -> None:
        async with AsyncEngine(toy_engine(FakeRunner(num_blocks=12), record=str(path))) as engine:
            expectation = await engine.expect(["k" * 70], compute=True)
            for i in range(12):
                await engine.complete(Request(prompt=f"{i:02d}" * 40, sampling=SHORT))
            assert expectation is not None
            expectation.release()

    asyncio.run(main())
    steps = list(replay(path))
    assert steps
    assert all(step.same for step in steps)


def test_a_turn_that_is_kept_goes_after_newer_ones_until_its_time_is_over() -> None:
    driver = Driver(num_blocks=8)
    driver.add([1] * 8, max_tokens=1, keep_s=60.0)
    driver.drain()
    driver.add([2] * 8, max_tokens=1)
    driver.drain()
    tree = driver.scheduler.kv.tree

    def left() -> list[int]:
        return [first for first in (1, 2) if tree.match([first] * 8, HOME, limit=8).tokens == 8]

    tree.evict(1)
    assert left() == [1]  # older, and kept
    driver.now += 61.0
    driver.add([3] * 4, max_tokens=1)
    driver.drain()
    assert not tree.eviction._announced
    check_integrity(driver.scheduler)


def test_a_beginning_is_kept_as_a_turn_is() -> None:
    """A chat that waits for a tool: its next turn's beginning is evicted after newer ones, until its time is over."""
    driver = Driver(num_blocks=8)
    for first in (1, 2):
        driver.add([first] * 8, max_tokens=1)
        driver.drain()
    driver.apply(Keep((1,) * 8, HOME, driver.now + 60.0))
    tree = driver.scheduler.kv.tree
    tree.evict(1)
    assert [first for first in (1, 2) if tree.match([first] * 8, HOME, limit=8).tokens == 8] == [1]
    driver.now += 61.0
    driver.add([3] * 4, max_tokens=1)
    driver.drain()
    assert not tree.eviction._announced


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
def test_a_beginning_is_kept_for_a_number_of_seconds(seconds: float) -> None:
    with toy_engine() as engine, pytest.raises(InvalidRequestError, match="keep is"):
        engine.keep([1, 2], seconds)


def test_a_turn_that_was_left_is_not_kept() -> None:
    driver = Driver(num_blocks=8)
    seq = driver.add([1] * 8, keep_s=60.0)
    driver.step()
    driver.apply(Abort(seq.seq_id))
    assert not driver.scheduler.kv.tree.eviction._announced


def test_what_is_kept_is_bounded_by_the_blocks_there_are() -> None:
    driver = Driver(num_blocks=8)
    for turn in range(50):
        driver.add([turn] * 16, max_tokens=1, keep_s=600.0 - turn)
        driver.drain()
    assert sum(map(len, driver.scheduler.kv.tree.eviction._announced.values())) <= 8


@pytest.mark.parametrize("seconds", [-1, float("nan"), 1e9, "60", True])
def test_a_time_to_keep_is_a_number_of_seconds(seconds: object) -> None:
    with pytest.raises(InvalidRequestError, match="keep_s"):
        Request(prompt="x", keep_s=seconds)  # type: ignore[arg-type]
