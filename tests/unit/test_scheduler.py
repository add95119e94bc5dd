"""Who is planned when, with exact block ids, and no device. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from shoal.core.audit import check_integrity
from shoal.core.commands import Abort, Fail, PreemptAll, Unpin
from shoal.core.sequence import Status
from shoal.errors import KVBudgetError, RunnerError
from shoal.runners.plan import StepPlan, Want
from shoal.types import FinishReason, Namespace
from tests.support.engines import Driver, fed

P = list(range(1, 11))  # ten tokens: two blocks and a tail of two


def item(plan: StepPlan, seq_id: int) -> object:
    return next(i for i in plan.sequences if i.seq_id == seq_id)


def test_a_prompt_then_one_token_a_step_then_the_end() -> None:
    driver = Driver()
    seq = driver.add(P, max_tokens=3)
    plan = driver.step()
    (only,) = plan.sequences
    assert (only.tokens, only.start, only.block_table, only.want) == (tuple(P), 0, (0, 1, 2), Want.ARGMAX)
    plan = driver.step()
    (only,) = plan.sequences
    assert (only.tokens, only.start, only.block_table) == ((1000,), 10, (0, 1, 2))
    driver.step()
    assert seq.tokens == [*P, 1000, 1001, 1002]
    assert driver.ended[0].finish is FinishReason.LENGTH
    assert driver.scheduler.idle
    assert driver.scheduler.take_released() == [1]


def test_a_block_is_added_when_the_last_is_full_and_the_table_object_stays_until_then() -> None:
    driver = Driver()
    driver.add([1, 2, 3], max_tokens=6)
    tables = [driver.step().sequences[0].block_table for _ in range(4)]
    assert tables == [(0,), (0,), (0, 1), (0, 1)]
    assert tables[0] is tables[1]
    assert tables[2] is tables[3]


def test_prompts_are_chunked_and_only_the_last_chunk_wants_logits() -> None:
    driver = Driver(64, max_step_tokens=16)
    driver.add(list(range(40)))
    plans = [driver.step() for _ in range(3)]
    assert [len(p.sequences[0].tokens) for p in plans] == [16, 16, 8]
    assert [p.sequences[0].want for p in plans] == [Want.NOTHING, Want.NOTHING, Want.ARGMAX]


def test_join_and_leave_at_token_boundaries() -> None:
    driver = Driver(max_batch=2)
    driver.add([1, 1], max_tokens=2)
    driver.add([2, 2], max_tokens=4)
    driver.add([3, 3], max_tokens=2)
    widths = []
    while not driver.scheduler.idle:
        widths.append(sorted(fed(driver.step())))
    assert widths == [[1, 2], [1, 2], [2, 3], [2, 3]]


def test_decodes_come_before_prefills_and_a_long_prompt_leaves_half_to_the_next() -> None:
    driver = Driver(200, max_step_tokens=64, max_stall_ms=10_000)
    driver.add([1, 2], max_tokens=50)
    driver.step()
    driver.scheduler.pacer.token_ms = 0.001
    driver.add(list(range(100, 300)))
    driver.add(list(range(300, 400)))
    plan = driver.plan()
    assert [i.seq_id for i in plan.sequences] == [1, 2, 3]
    assert fed(plan) == {1: 1, 2: 32, 3: 31}


def test_a_step_in_which_kernels_were_compiled_is_no_news_of_what_prompts_cost() -> None:
    driver = Driver(200, max_step_tokens=64, max_stall_ms=100)
    driver.add([1, 2], max_tokens=50)
    driver.step()
    pacer = driver.scheduler.pacer
    before = pacer.decode_ms, pacer.token_ms
    for start in (100, 200):
        driver.add(list(range(start, start + 40)))
        driver.commit(driver.plan(), 3_500.0, once=True)
    assert (pacer.decode_ms, pacer.token_ms) == before
    driver.commit(driver.plan(), 20.0)
    assert pacer.token_ms is not None


def test_a_second_identical_request_computes_one_token() -> None:
    driver = Driver()
    driver.add(P, max_tokens=1)
    driver.drain()
    again = driver.add(P, max_tokens=1)
    plan = driver.step()
    assert fed(plan) == {2: 1}
    assert plan.sequences[0].start == 9
    assert plan.copies == ((2, 3),)
    assert plan.sequences[0].block_table == (0, 1, 3)
    assert (again.cached_tokens, again.computed_tokens, again.miss) == (9, 1, None)


def test_an_exact_hit_on_whole_blocks_leaves_one_token_too() -> None:
    driver = Driver()
    driver.add(P[:8], max_tokens=1)
    driver.drain()
    driver.add(P[:8], max_tokens=1)
    plan = driver.step()
    assert (plan.sequences[0].start, plan.copies) == (7, ((1, 2),))


def test_without_copies_a_hit_ends_at_a_block() -> None:
    driver = Driver(copies_blocks=False)
    driver.add(P, max_tokens=1)
    driver.drain()
    driver.add(P, max_tokens=1)
    plan = driver.step()
    assert (plan.sequences[0].start, plan.copies) == (8, ())


def test_cold_fan_out_computes_the_trunk_once() -> None:
    driver = Driver(200, max_step_tokens=16)
    trunk = list(range(38))  # ends inside a block
    branches = [driver.add([*trunk, 500 + i], max_tokens=2) for i in range(6)]
    driver.drain()
    assert sum(seq.computed_tokens for seq in branches) == len(trunk) + 2 * len(branches)
    assert [seq.cached_tokens for seq in branches] == [0, *[38] * 5]
    assert branches[0].shared_with == 5


def test_followers_go_on_when_their_leader_goes_away() -> None:
    driver = Driver(200, max_step_tokens=16)
    trunk = list(range(40))
    leader = driver.add([*trunk, 500], max_tokens=1)
    follower = driver.add([*trunk, 501], max_tokens=1)
    driver.step()
    assert follower.status is Status.WAITING
    driver.apply(Abort(leader.seq_id))
    driver.drain()
    assert follower.cached_tokens == 16
    assert follower.computed_tokens == 25


def test_followers_join_as_soon_as_the_shared_part_is_there() -> None:
    driver = Driver(200, max_step_tokens=16)
    driver.add([*range(20), *range(100, 160)], max_tokens=1)
    follower = driver.add([*range(20), 7], max_tokens=1)
    driver.step()
    assert follower.status is Status.WAITING
    driver.step()
    assert follower.status is Status.WAITING
    driver.step()
    assert follower.cached_tokens == 20


def test_equal_prompts_that_ran_beside_each_other_do_not_write_into_one_block() -> None:
    driver = Driver(max_batch=2)
    driver.add([1, 2], max_tokens=3)
    driver.add([1, 2], max_tokens=3)
    tables = [i.block_table for i in driver.step().sequences]
    tables += [i.block_table for i in driver.step().sequences]
    assert tables == [(0,), (1,), (0,), (1,)]


def test_sharing_can_be_off() -> None:
    driver = Driver(prefix_sharing=False)
    driver.add(P, max_tokens=1)
    driver.drain()
    again = driver.add(P, max_tokens=1)
    driver.drain()
    assert (again.cached_tokens, again.miss) == (0, "off")
    assert driver.scheduler.kv.pool.num_cached == 0


def test_blocks_run_out_and_one_sequence_gives_way() -> None:
    driver = Driver(6, max_batch=2, prefix_sharing=False)
    first = driver.add(list(range(8)), max_tokens=12)
    second = driver.add(list(range(50, 58)), max_tokens=12)
    driver.drain()
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert [len(s.tokens) for s in (first, second)] == [20, 20]
    check_integrity(driver.scheduler)


def test_the_lowest_class_gives_way_first_though_it_came_first() -> None:
    driver = Driver(6, max_batch=2, prefix_sharing=False)
    low = driver.add(list(range(8)), max_tokens=12, rank=2)
    high = driver.add(list(range(50, 58)), max_tokens=12, rank=0)
    driver.drain()
    assert (low.preemptions > 0, high.preemptions) == (True, 0)


def test_a_preempted_sequence_finds_its_prefix_again() -> None:
    driver = Driver(32)
    seq = driver.add(P, max_tokens=5)
    driver.step()
    driver.step()
    driver.apply(PreemptAll())
    assert (seq.status, seq.computed) == (Status.WAITING, 0)
    plan = driver.step()
    assert plan.sequences[0].start == 11  # all but the token that was still to be fed
    driver.drain()
    assert seq.tokens == [*P, *range(1000, 1005)]


def test_dropped_kv_is_computed_again_from_the_start() -> None:
    driver = Driver(32)
    seq = driver.add(P, max_tokens=5)
    driver.step()
    driver.apply(PreemptAll(drop_cached=True))
    assert driver.scheduler.kv.pool.num_free == 32
    plan = driver.step()
    assert (plan.sequences[0].start, len(plan.sequences[0].tokens)) == (0, 11)
    driver.drain()
    assert seq.tokens == [*P, *range(1000, 1005)]


def test_a_high_request_takes_the_place_of_a_low_one() -> None:
    driver = Driver(max_batch=1)
    low = driver.add([1, 2], max_tokens=20, rank=2)
    driver.step()
    high = driver.add([3, 4], max_tokens=2, rank=0)
    plan = driver.step()
    assert fed(plan) == {high.seq_id: 2}
    assert low.preemptions == 1
    driver.drain()
    assert [p.seq.seq_id for p in driver.ended] == [high.seq_id, low.seq_id]


def test_one_that_aged_into_its_place_keeps_it() -> None:
    driver = Driver(max_batch=1, ageing_s=1.0)
    low = driver.add([1, 2], max_tokens=4, rank=2)
    driver.now = 5.0
    driver.step()
    driver.add([3, 4], max_tokens=2, rank=0)
    driver.step()
    assert low.preemptions == 0


def test_deadlines_end_waiting_and_running_ones() -> None:
    driver = Driver(max_batch=1)
    running = driver.add([1, 2], max_tokens=99, deadline=0.0035)
    waiting = driver.add([3, 4], max_tokens=99, deadline=0.0015)
    driver.drain()
    assert [(p.seq, p.finish) for p in driver.ended] == [
        (waiting, FinishReason.TIMEOUT),
        (running, FinishReason.TIMEOUT),
    ]
    assert driver.scheduler.kv.pool.num_held == 0


def test_a_timeout_counts_from_joining() -> None:
    driver = Driver(max_batch=1)
    driver.add([1, 2], max_tokens=10)
    second = driver.add([3, 4], max_tokens=99, timeout_s=0.005)
    driver.drain()
    assert driver.ended[-1].finish is FinishReason.TIMEOUT
    assert 4 <= len(second.tokens) - 2 <= 6


def test_groups_get_equal_service() -> None:
    driver = Driver(400, max_batch=1)
    for _ in range(6):
        driver.add([1, 2], max_tokens=2, group="many")
    few = driver.add([3, 4], max_tokens=2, group="few")
    driver.drain()
    assert [p.seq for p in driver.ended].index(few) == 1


def test_a_pinned_prefix_is_kept_and_one_that_cannot_fit_beside_it_is_told() -> None:
    driver = Driver(4, copies_blocks=False)
    pin = driver.add(list(range(8)), max_tokens=1, prefill_only=True)
    driver.drain()
    assert driver.scheduler.kv.pool.num_held == 2
    too_big = driver.add(list(range(20, 32)), max_tokens=1)
    driver.drain()
    assert isinstance(driver.ended[-1].error, KVBudgetError)
    assert driver.ended[-1].seq is too_big
    hit = driver.add(list(range(9)), max_tokens=1)
    driver.drain()
    assert hit.cached_tokens == 8
    driver.apply(Unpin(pin.seq_id))
    assert driver.scheduler.kv.pool.num_held == 0
    check_integrity(driver.scheduler)


@pytest.mark.parametrize("length", [8, 7])
def test_a_prefix_that_is_there_already_can_be_pinned_again(length: int) -> None:
    driver = Driver(8)
    pins = [driver.add(list(range(length)), max_tokens=1, prefill_only=True)]
    driver.drain()
    pins.append(driver.add(list(range(length)), max_tokens=1, prefill_only=True))
    plan = driver.step()
    assert fed(plan) == {pins[1].seq_id: 1}  # every sequence of a step feeds at least one token
    assert [p.finish for p in driver.ended] == [FinishReason.STOP] * 2
    for pin in pins:
        driver.apply(Unpin(pin.seq_id))
    assert driver.scheduler.kv.pool.num_held == 0
    check_integrity(driver.scheduler)


def test_what_a_failed_pass_wrote_is_forgotten() -> None:
    driver = Driver(32, max_step_tokens=16)
    driver.add(list(range(24)))
    driver.step()  # 16 tokens are in the tree
    plan = driver.plan()
    driver.apply(Fail(tuple(fed(plan)), RunnerError("broken")))
    assert driver.scheduler.idle
    assert len(driver.scheduler.kv.tree) == 0
    fresh = driver.add(list(range(24)), max_tokens=1)
    driver.drain()
    assert fresh.cached_tokens == 0


def test_a_poisoned_row_keeps_what_it_shared_and_drops_what_it_computed() -> None:
    driver = Driver()
    driver.add(P[:8], max_tokens=1)
    driver.drain()
    seq = driver.add([*P[:8], 50, 51, 52, 53, 54], max_tokens=4)
    driver.step()
    assert seq.shared_blocks == 2
    driver.apply(Fail((seq.seq_id,), RunnerError("nan")))
    assert sorted(node.block for node in driver.scheduler.kv.tree.walk()) == [0, 1]
    check_integrity(driver.scheduler)


def test_chains_only_when_everybody_decodes_and_nobody_waits() -> None:
    driver = Driver(decode_chunk=4, max_batch=1)
    seq = driver.add([1, 2], max_tokens=9)
    assert driver.step().chain == 1
    plan = driver.step()
    assert plan.chain == 4
    assert seq.computed == len(seq.tokens) - 1
    driver.add([3], max_tokens=1)
    assert driver.step().chain == 1
    driver.drain()
    assert len(seq.tokens) == 2 + 9


def test_a_chain_stops_at_the_last_token() -> None:
    driver = Driver(decode_chunk=4)
    seq = driver.add([1, 2], max_tokens=4)
    driver.step()
    assert driver.step().chain == 3
    assert len(seq.tokens) == 6


def test_versions_and_namespaces_through_the_scheduler() -> None:
    driver = Driver()
    driver.add(P, max_tokens=1, namespace=Namespace(task="a", version=1))
    driver.drain()
    other = driver.add(P, max_tokens=1, namespace=Namespace(task="b"))
    bumped = driver.add(P, max_tokens=1, namespace=Namespace(task="a", version=2))
    stale = driver.add(P, max_tokens=1, namespace=Namespace(task="a", version=1))
    driver.drain()
    assert [s.cached_tokens for s in (other, bumped, stale)] == [0, 0, 0]
    assert stale.miss == "stale"
    check_integrity(driver.scheduler)


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
def test_abort_frees_everything_wherever_it_strikes(where: str) -> None:
    driver = Driver(64, max_step_tokens=16, max_batch=1)
    if where == "queue":
        driver.add([9], max_tokens=50)
        driver.step()
    seq = driver.add(list(range(100, 140)), max_tokens=50)
    for _ in range({"queue": 0, "prefill": 1, "decode": 4}[where]):
        driver.step()
    neighbours = len(driver.scheduler.running) - (seq.status is Status.RUNNING)
    driver.apply(Abort(seq.seq_id))
    driver.apply(Abort(seq.seq_id))
    ends = driver.scheduler.take_ended()
    assert [(p.seq, p.finish) for p in ends] == [(seq, FinishReason.ABORTED)]
    assert len(driver.scheduler.running) == neighbours
    check_integrity(driver.scheduler)


@pytest.mark.parametrize("length", [8, 10])
def test_a_prefix_that_is_all_cached_is_pinned_by_a_pass_that_feeds_a_token(length: int) -> None:
    """A plan with an empty sequence is refused by real runners, and ends everybody in it."""
    driver = Driver()
    tokens = list(range(length))
    driver.add([*tokens, 99], max_tokens=2)
    driver.drain()
    seq = driver.add(tokens, prefill_only=True)
    other = driver.add(list(range(50, 60)))
    plan = driver.step()
    assert fed(plan)[seq.seq_id] == 1
    assert other.seq_id in fed(plan)
    assert driver.ended[-1].finish is FinishReason.STOP
    assert seq.seq_id in driver.scheduler.pinned
    check_integrity(driver.scheduler)
