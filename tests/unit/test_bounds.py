"""Whatever is kept per caller, per prefix, per key or per deadline has a bound."""

from __future__ import annotations

from shoal import Namespace, Request, SamplingParams
from shoal.core.audit import check_integrity
from shoal.core.commands import Abort
from shoal.core.prefix_tree import PrefixTree
from shoal.runners.fake import FakeRunner
from tests.support.engines import Driver, finish, toy_loop


def tree_of(driver: Driver) -> PrefixTree:
    return driver.scheduler.kv.tree


def test_a_namespace_that_left_nothing_in_the_tree_is_not_kept_for_ever() -> None:
    driver = Driver(8)
    for number in range(6000):
        driver.add([1, 2, 3], max_tokens=1, namespace=Namespace(task=f"key-{number}"))
        driver.drain()
    assert len(tree_of(driver)._roots) <= 8 + 4096 + 1
    check_integrity(driver.scheduler)


def test_looking_for_a_prefix_leaves_no_trace_of_its_namespace() -> None:
    driver = Driver(8)
    for number in range(50):
        tree_of(driver).match([1, 2, 3, 4], Namespace(task=str(number)), limit=3)
    assert len(tree_of(driver)._roots) == 0


def test_a_version_is_remembered_while_other_namespaces_come_and_go() -> None:
    driver = Driver(8)
    driver.add([1, 2, 3, 4, 5], max_tokens=1, namespace=Namespace("a", version=2))
    driver.drain()
    for number in range(1000):
        driver.add([1, 2, 3], max_tokens=1, namespace=Namespace(task=f"key-{number}"))
        driver.drain()
    stale = driver.add([1, 2, 3, 4, 5], max_tokens=1, namespace=Namespace("a", version=1))
    driver.drain()
    assert stale.miss == "stale"


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    driver = Driver(8)
    waiting = driver.add([9], max_tokens=3, deadline=1e9)
    for _ in range(2000):
        seq = driver.add([1, 2, 3], max_tokens=1, deadline=1e9)
        driver.apply(Abort(seq.seq_id))
    assert len(driver.scheduler._deadlines) < 200
    assert (waiting.deadline, waiting.seq_id) in driver.scheduler._deadlines._heap


def test_a_thousand_requests_leave_no_table_longer() -> None:
    loop = toy_loop(FakeRunner(num_blocks=8, block_size=4))
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for _ in range(20):
        finish(loop, [Request(prompt_tokens=[n, 1], sampling=sampling, deadline_s=1e6) for n in range(50)])
    scheduler = loop.scheduler
    assert not loop._states
    assert len(scheduler._deadlines) < 200
    assert len(scheduler.kv.tree) <= 8
    assert not scheduler.kv.tree.eviction._announced
    assert not scheduler.queue._service
