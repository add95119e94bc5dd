"""Window blocks: who has one, who loses it, and where hits end then. Blocks have 4 tokens, the window is of 8."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.core.commands import Abort, Expect, PreemptAll, Restore, Unpin
from shoal.core.kv import KVCacheManager
from shoal.core.tiers import Paths, Tier, TierPlanner
from shoal.core.windows import WindowBlocks
from shoal.errors import KVBudgetError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import windows_in_turn
from shoal.types import FinishReason, Namespace, Request, SamplingParams
from tests.support.engines import BLOCK, Driver, finish, spec, toy_loop
from tests.support.tiers import Lab, alone

A = list(range(100, 124))  # six blocks


def driver(windows: int = 32, blocks: int = 64, **settings: Any) -> tuple[Driver, WindowBlocks]:
    made = Driver(blocks, window=8, num_windows=windows, **settings)
    kept = made.scheduler.kv.windows
    assert kept is not None
    return made, kept


def run(made: Driver, tokens: list[int], max_tokens: int = 1, **fields: Any) -> int:
    """Run one request to its end; returns its cached tokens."""
    seq = made.add(tokens, max_tokens, **fields)
    made.drain()
    check_integrity(made.scheduler)
    return seq.cached_tokens


def test_a_plan_names_the_window_blocks_that_it_sees_and_writes_and_no_others() -> None:
    made, kept = driver(max_step_tokens=16)
    made.add(A, max_tokens=3)
    plans = [made.step().sequences[0] for _ in range(4)]
    assert [(p.start, len(p.tokens), p.windows) for p in plans] == [
        (0, 16, (0, 1, 2, 3)),
        (16, 8, (2, 3, 4, 5)),  # position 16 sees 9 to 16
        (24, 1, (4, 5, 6)),  # position 24 sees 17 to 24
        (25, 1, (4, 5, 6)),
    ]
    assert all(p.block_table[:6] == (0, 1, 2, 3, 4, 5) for p in plans)
    assert kept.num_spare == 7, "what nobody needs is kept for hits"


def test_a_long_sequence_needs_its_window_and_no_more() -> None:
    """32,768 positions of a model with a window of 512, scaled to a sixteenth."""
    made = Driver(520, window=32, num_windows=64, max_step_tokens=64, decode_chunk=1, speculation=False)
    kept = made.scheduler.kv.windows
    assert kept is not None
    seq = made.add(list(range(1000, 2900)), max_tokens=148)
    most = 0
    while not made.scheduler.idle:
        made.step()
        most = max(most, kept.num_needed if seq.decoding else 0)
    assert len(seq.tokens) == 2048
    assert most == 32 // BLOCK + 1
    assert made.scheduler.kv.pool.num_cached == 512


def test_a_prompt_goes_in_pieces_that_there_are_window_blocks_for() -> None:
    made, _ = driver(windows=6, max_step_tokens=1024)
    made.add(list(range(100, 180)))
    sizes = []
    while made.scheduler.running or not made.ended:
        (item,) = made.step().sequences
        sizes.append(len(item.tokens))
        check_integrity(made.scheduler)
    assert sizes[:2] == [24, 16]
    assert sum(sizes) == 80 + 3


def test_a_hit_is_whole_while_the_last_window_is_there() -> None:
    made, _ = driver()
    run(made, A)
    assert run(made, [*A, 1, 2, 3]) == 24
    assert run(made, A[:17]) == 16, "cut anywhere while nothing was lost"
    assert run(made, [*A[:14], 7]) == 14, "and copied in part"


def test_what_lies_behind_all_windows_goes_first() -> None:
    made, kept = driver(windows=8)
    run(made, A)
    run(made, list(range(200, 212)))  # takes two of what was free, and one of A's first
    tree = made.scheduler.kv.tree
    path = tree.path(A, Namespace(), limit=24)
    assert [kept.of(node.block) is not None for node in path] == [False, True, True, True, True, True]
    assert run(made, [*A, 1]) == 24
    assert run(made, A[:9]) == 0, "its window is not all there any more"


def test_a_hit_is_cut_back_to_the_last_place_whose_window_is_there() -> None:
    made, kept = driver(windows=8)
    run(made, A)
    path = made.scheduler.kv.tree.path(A, Namespace(), limit=24)
    kept._spare.move_to_end(path[4].block, last=False)
    run(made, list(range(200, 212)))
    assert kept.of(path[4].block) is None
    seq = made.add([*A, 1], max_tokens=3)
    made.step()
    assert (seq.cached_tokens, seq.miss) == (16, "evicted")
    assert seq.blocks[:4] == [node.block for node in path[:4]]


def test_what_is_computed_again_is_found_again_and_lies_once() -> None:
    made, kept = driver(windows=8)
    run(made, A)
    path = made.scheduler.kv.tree.path(A, Namespace(), limit=24)
    kept._spare.move_to_end(path[4].block, last=False)
    run(made, list(range(200, 212)))
    before = made.scheduler.kv.pool.num_cached
    assert run(made, [*A, 1]) == 16
    assert kept.of(path[4].block) is not None, "it has a window block again"
    assert made.scheduler.kv.pool.num_cached <= before + 1
    assert made.scheduler.kv.tree.recomputed == 8
    assert run(made, [*A, 2]) == 24


def test_what_no_hit_can_end_at_is_dropped() -> None:
    made, _ = driver(windows=6)
    run(made, A[:10])  # two blocks and a tail
    cached = made.scheduler.kv.pool.num_cached
    assert cached == 3
    run(made, list(range(200, 216)))  # four blocks: three free, and the tail's goes first
    tree = made.scheduler.kv.tree
    assert len(tree) == 2 + 4
    assert run(made, A[:10]) == 8


def test_waiting_requests_keep_what_they_will_take_up() -> None:
    made, _ = driver(windows=8)
    run(made, A[:16])
    made.apply(Expect(tuple(A[:16]), Namespace(), 5))
    run(made, list(range(200, 216)))
    run(made, list(range(300, 316)))
    assert run(made, [*A[:16], 1]) == 16


def test_a_pinned_prefix_keeps_its_last_window() -> None:
    made, _ = driver(windows=12)
    seq = made.add(A, max_tokens=1, prefill_only=True)
    made.drain()
    for i in range(4):
        run(made, list(range(200 + 50 * i, 216 + 50 * i)))
    assert run(made, [*A, 1]) == 24
    made.apply(Unpin(seq.seq_id))
    check_integrity(made.scheduler)
    for i in range(4):
        run(made, list(range(200 + 50 * i, 224 + 50 * i)))
    assert run(made, [*A, 2]) < 24


def test_a_request_that_pins_leave_no_window_for_is_refused() -> None:
    made, kept = driver(windows=6)
    made.add(A, max_tokens=1, prefill_only=True)
    made.drain()
    assert kept.available == 4
    made.add(list(range(200, 224)), max_tokens=1)
    made.drain()
    assert isinstance(made.ended[-1].error, KVBudgetError)


def test_sequences_give_way_when_windows_run_short_and_all_end() -> None:
    made, kept = driver(windows=9, max_batch=4, max_step_tokens=32)
    for i in range(4):
        made.add(list(range(1000 * i, 1000 * i + 4)), max_tokens=60)
    steps = 0
    while not made.scheduler.idle:
        made.step()
        check_integrity(made.scheduler)
        steps += 1
        assert steps < 2000
    assert [e.finish for e in made.ended] == [FinishReason.LENGTH] * 4
    assert made.scheduler.preemptions > 0
    assert kept.num_needed == 0


def test_without_sharing_windows_are_free_at_once() -> None:
    made, kept = driver(prefix_sharing=False, max_step_tokens=16)
    made.add(A, max_tokens=8)
    for _ in range(3):
        made.step()
    assert (kept.num_needed, kept.num_spare) == (3, 0)
    made.apply(PreemptAll())
    assert kept.available == kept.total
    made.drain()
    check_integrity(made.scheduler)


def test_an_abort_between_plan_and_commit_keeps_the_books() -> None:
    made, _ = driver()
    run(made, A)
    seq = made.add([*A[:22], 5, 6], max_tokens=4)
    plan = made.plan()
    assert plan.copies
    assert plan.window_copies == ((5, 6),)
    made.apply(Abort(seq.seq_id))
    made.commit(plan)
    check_integrity(made.scheduler)


def test_cached_prefixes_are_bounded_with_their_window_blocks() -> None:
    limit = 10 * spec().block_bytes
    facts = spec(64, window=8, num_windows=4)
    config = EngineConfig(prefix_memory=limit)
    assert KVCacheManager(facts, config)._max_cached == 6  # six blocks and four window blocks
    assert KVCacheManager(spec(64, window=8, num_windows=32), config)._max_cached == 5


def test_only_whole_blocks_go_out() -> None:
    made, kept = driver()
    kv = made.scheduler.kv
    planner = TierPlanner(kv.tree, Paths("", b""))
    run(made, A)
    path = kv.tree.path(A, Namespace(), limit=24)
    taken = kept._free[:]
    kept._free.clear()  # none is free: the next takes the one that has been spare for longest
    kept._give(kv.pool.take())
    assert taken
    assert kept.of(path[0].block) is None
    out = []
    while (outgoing := planner.take(lambda digest: False)) is not None:
        out.append((outgoing.block, outgoing.window))
    assert out == [(node.block, kept.of(node.block)) for node in path[1:]]
    assert planner.lost == 1


def test_of_what_comes_back_only_the_last_window_is_whole() -> None:
    made, _ = driver()
    waiting = made.add([*A, 1])
    made.apply(Restore(waiting.seq_id, 0, 6, Tier.HOST))
    restored = made.scheduler.take_restored()
    assert [window is not None for window in restored.windows] == [False] * 4 + [True] * 2
    check_integrity(made.scheduler)
    made.step()
    assert waiting.cached_tokens == 24


def test_window_blocks_that_were_lost_come_back_to_blocks_that_are_still_there() -> None:
    made, kept = driver(windows=8)
    kv = made.scheduler.kv
    planner = TierPlanner(kv.tree, Paths("", b""))
    run(made, A)
    path = kv.tree.path(A, Namespace(), limit=24)
    kept._spare.move_to_end(path[4].block, last=False)
    run(made, list(range(200, 212)))
    wanted = planner.wanted([*A, 1], Namespace(), limit=24, known=lambda digest: True)
    assert wanted is not None
    assert (wanted.first, wanted.blocks) == (4, (planner.digest(path[4]), planner.digest(path[5])))
    waiting = made.add([*A, 1])
    made.apply(Restore(waiting.seq_id, wanted.first, 2, Tier.HOST))
    restored = made.scheduler.take_restored()
    assert (restored.blocks, restored.skipped) == ((path[4].block, path[5].block), 0)
    assert restored.windows == (kept.of(path[4].block), kept.of(path[5].block))
    check_integrity(made.scheduler)
    made.step()
    assert waiting.cached_tokens == 24


def toy(windows: int) -> FakeRunner:
    return FakeRunner(num_blocks=64, block_size=8, window=20, num_windows=windows)


def test_the_toy_model_writes_the_same_with_few_windows_and_with_many() -> None:
    prompts = [[i, *range(60)] for i in range(6)]
    requests = [Request(prompt_tokens=p, sampling=SamplingParams(max_tokens=20, ignore_eos=True)) for p in prompts]
    few, many = (finish(toy_loop(toy(n), max_batch=3), requests) for n in (8, 64))
    assert [result.tokens for result in few] == [result.tokens for result in many]


@pytest.mark.parametrize("windows", [8, 40])
def test_kv_from_a_tier_gives_the_tokens_of_a_run_without(windows: int) -> None:
    prompt = list(range(90))
    lab = Lab(host=1 << 20, runner=toy(windows))
    written, _ = lab.ask(prompt, 6)
    assert written == alone(prompt, 6, window=20, num_windows=40)
    lab.loop.scheduler.apply(PreemptAll(drop_cached=True))
    again, receipt = lab.ask([*prompt, *written, 3], 6)
    assert again == alone([*prompt, *written, 3], 6, window=20, num_windows=40)
    assert receipt.host_tokens == (88 if windows == 40 else receipt.host_tokens)
    lab.close()


def test_plans_made_by_hand_use_their_share_in_turn() -> None:
    facts = spec(64, window=8, num_windows=12)
    assert windows_in_turn(facts, 0, 9, 0, 2) == (0, 1, 2)
    assert windows_in_turn(facts, 40, 1, 1, 2) == (6 + 8 % 6, 6 + 9 % 6, 6 + 10 % 6)
    assert windows_in_turn(spec(), 0, 9) == ()
