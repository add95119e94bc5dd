"""KV behind sliding windows on the native runner: freed, cut back, computed again, and never another bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.commands import PreemptAll
from shoal.errors import RunnerError
from shoal.runners.native.runner import KvPrecision, NativeRunner, _windows_in
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.types import Request, Result, SamplingParams
from tests.parity.equality import run
from tests.support.engines import finish, toy_loop
from tests.support.native_tiny import isas, open_tiny, tiny_native, windowed
from tests.support.tiers import Lab
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.skipif(not isas(), reason="the extension is not built")


@pytest.mark.parametrize(
    ("name", "windows", "kv"),
    [("gemma3", 6, "auto"), ("gemma4-mixture", 10, "auto"), ("gpt-oss", 8, "auto"), ("gemma3", 12, "u8")],
)
def test_random_schedules_that_lose_windows_change_no_bit(
    name: str, windows: int, kv: KvPrecision, tmp_path: Path
) -> None:
    runner = windowed(name, tmp_path, windows=windows, kv=kv)
    outcome = run(runner, schedules=6, requests=8, seed=windows)
    runner.close()
    assert (outcome.rows_differing, outcome.outputs_differing) == (0, 0)
    for what in ("hit", "window blocks lost", "preemption"):
        assert outcome.seen[what], f"no {what}"


def answers(runner: NativeRunner) -> list[Result]:
    sampling = SamplingParams(max_tokens=40, logprobs=4, ignore_eos=True)
    trunk = [3 + i % 90 for i in range(150)]
    prompts = [[*trunk, 7, i] for i in range(4)] + [[*trunk[:70], i] for i in range(2)]
    return finish(toy_loop(runner, max_batch=4), [Request(prompt_tokens=p, sampling=sampling) for p in prompts])


@pytest.mark.parametrize("name", ["gemma3", "gemma4-mixture", "olmo3"])
def test_where_kv_lies_changes_no_bit(name: str, tmp_path: Path) -> None:
    together = tiny_native(name, tmp_path)
    apart = windowed(name, tmp_path, windows=8)
    assert (together.spec.num_windows, apart.spec.window) == (0, 8)
    found, expected = answers(apart), answers(together)
    assert [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in expected]
    apart.close()
    together.close()


def test_a_long_sequence_takes_memory_for_its_window_only(tmp_path: Path) -> None:
    runner = windowed("gemma3", tmp_path, windows=6)
    loop = toy_loop(runner, max_step_tokens=64, speculation=False, prefix_sharing=False)
    kept, spec = loop.scheduler.kv.windows, runner.spec
    assert kept is not None
    log: list[object] = []
    request = Request(prompt_tokens=[5] * 400, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
    loop.add("long", loop.inputs.prepare(request), log.append)
    held = []
    while not loop.idle:
        loop.step()
        held.append(loop.stats().kv_held_bytes)
    assert max(held[8:]) == 15 * spec.block_bytes + 2 * spec.window_bytes
    assert kept.lost == 0
    runner.close()


def test_a_budget_buys_more_blocks_where_windows_lie_apart(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "gemma3", "Q8_0")
    together, apart = (open_tiny(path, kv_bytes=16 << 20, window_blocks=each).spec for each in (False, True))
    assert apart.num_blocks > 2 * together.num_blocks
    assert apart.num_windows == pytest.approx(apart.num_blocks / 8, abs=2)
    assert apart.kv_bytes <= 16 << 20
    tight = open_tiny(path, kv_bytes=together.block_bytes * 4, window_blocks=True).spec
    assert (tight.num_blocks, tight.window) == (4, 0), "not even one sequence has a window in so little"


@pytest.mark.parametrize(
    ("budget", "windows"),
    [
        (1 << 20, (1 << 20) // 13000),  # an eighth of the blocks have one
        (480_000, 60),  # eight sequences have theirs
        (300_000, 43),  # seven eighths of the fifty blocks that would have room with theirs
        (60_000, 0),  # too few for one
    ],
)
def test_how_many_window_blocks_a_budget_buys(budget: int, windows: int) -> None:
    assert _windows_in(budget, 1000, 5000, 10, 60) == windows


def test_plans_without_the_right_window_blocks_are_refused(tmp_path: Path) -> None:
    runner = windowed("gemma3", tmp_path, blocks=8, windows=6)

    def feed(start: int, count: int, table: tuple[int, ...], windows: tuple[int, ...], seq_id: int = 1) -> StepPlan:
        row = ScheduledSequence(seq_id, (5,) * count, start, table, Want.ARGMAX, windows=windows)
        return StepPlan(0, (row,))

    runner.execute(feed(0, 40, (0, 1), (3, 4)))
    for start, windows, what in [
        (40, (), "end before"),
        (40, (6,), "window block 6 of 6"),
        (40, (-1,), "window block -1"),
        (40, (0,), "nothing was written"),
    ]:
        with pytest.raises(RunnerError, match=what):
            runner.execute(feed(start, 1, (0, 1), windows))
    with pytest.raises(RunnerError, match="not that of block"):
        runner.execute(feed(0, 40, (2, 3), (5, 5)))
    two = tuple(feed(0, 4, (b,), (w,), b).sequences[0] for b, w in ((2, 0), (3, 0)))
    with pytest.raises(RunnerError, match="not that of block"):
        runner.execute(StepPlan(0, two))
    with pytest.raises(RunnerError, match="window block 9"):
        runner.execute(StepPlan(0, feed(40, 1, (0, 1), (4,)).sequences, window_copies=((9, 1),)))
    runner.execute(feed(40, 1, (0, 1), (4,)))  # position 40 sees nothing of the first block
    with pytest.raises(RunnerError, match="window block 0 of 0"):
        open_tiny(tmp_path / "gemma3.gguf").execute(StepPlan(0, (), window_copies=((0, 0),)))
    runner.discard_blocks((), (4,))
    with pytest.raises(RunnerError, match="nothing was written"):
        runner.execute(feed(41, 1, (0, 1), (4,)))
    runner.close()


def test_kv_from_the_disk_has_the_bits_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    prompt = [3 + i % 90 for i in range(300)]
    sampling = SamplingParams(max_tokens=6, logprobs=5, ignore_eos=True)
    runner = windowed("gemma3", tmp_path, windows=20)
    whole = Lab(runner=runner).result_of([*prompt, 9], sampling, "whole")
    before = Lab(tmp_path / "kv", quota=1 << 30, runner=runner)
    before.result_of(prompt, sampling, "before")
    before.settle()
    before.loop.scheduler.apply(PreemptAll(drop_cached=True))
    before.close()
    after = Lab(tmp_path / "kv", quota=1 << 30, runner=runner)
    found = after.result_of([*prompt, 9], sampling, "after")
    after.close()
    runner.close()
    assert found.receipt.disk_tokens == 288
    assert (found.tokens, found.logprobs) == (whole.tokens, whole.logprobs)
