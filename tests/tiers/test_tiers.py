"""KV that leaves the device and comes back: from host memory and from disk, for the next process too."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal.engine.kv.disk
from shoal.config import EngineConfig
from shoal.core.commands import Abort
from shoal.core.kv import KVCacheManager
from shoal.engine.record import replay
from shoal.errors import ConfigError
from shoal.runners.fake import FakeRunner
from shoal.types import Namespace, Priority
from tests.support.engines import toy_engine, toy_loop
from tests.support.tiers import SIZE, Lab, alone

LONG = [*range(50, 250)]
PROMPT = [*range(10, 60)]  # six whole blocks and two tokens


def test_the_next_process_finds_what_the_last_one_computed(tmp_path: Path) -> None:
    first = Lab(tmp_path)
    tokens, receipt = first.ask(PROMPT)
    assert (tokens, receipt.cached_tokens, receipt.disk_tokens) == (alone(PROMPT), 0, 0)
    first.close()
    second = Lab(tmp_path)
    tokens, receipt = second.ask(PROMPT)
    assert tokens == alone(PROMPT)
    assert (receipt.cached_tokens, receipt.disk_tokens, receipt.computed_tokens) == (48, 48, 2 + 3)
    second.close()


def test_a_turn_goes_on_from_what_was_generated_before_the_restart(tmp_path: Path) -> None:
    first = Lab(tmp_path)
    written, _ = first.ask(PROMPT, 20)
    first.close()
    second = Lab(tmp_path)
    turn = [*PROMPT, *written, 7, 8]
    tokens, receipt = second.ask(turn)
    assert tokens == alone(turn)
    assert receipt.disk_tokens == (len(PROMPT) + 19) // SIZE * SIZE  # the last token was never fed
    second.close()


def test_what_was_evicted_comes_back_from_host_memory() -> None:
    lab = Lab(host=1 << 20, blocks=10)
    lab.ask(PROMPT)
    lab.ask([*range(100, 150)])  # takes the place of the first
    tokens, receipt = lab.ask(PROMPT)
    assert tokens == alone(PROMPT)
    assert receipt.host_tokens >= 24
    assert receipt.cached_tokens == 48
    computed_again = lab.loop.scheduler.kv.tree.recomputed
    assert computed_again < len(PROMPT) - 48 + SIZE, "what comes back is no eviction storm"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_thirty_turns_with_memory_for_five(tmp_path: Path, tier: str) -> None:
    """Three chats take turns; the device has room for about one and a half of them at the end."""
    lab = Lab(tmp_path if tier == "disk" else None, host=1 << 20 if tier == "host" else None, blocks=20)
    chats: list[list[int]] = [[chat] * 20 for chat in (1, 2, 3)]
    computed = prompts = 0
    for turn in range(30):
        chat = chats[turn % 3]
        chat += [50 + turn, 60 + turn, 70 + turn]
        tokens, receipt = lab.ask(chat, 5)
        assert tokens == alone(chat, 5)
        prompts += len(chat)
        computed += receipt.computed_tokens - 4
        chat += tokens
    stats = lab.tiers.stats()
    restored = stats.restored_host_blocks if tier == "host" else stats.restored_disk_blocks
    assert restored > 20
    assert computed < prompts / 4, "most of each history was found again"
    lab.close()


def test_a_state_comes_back_with_its_blocks(tmp_path: Path) -> None:
    def runner() -> FakeRunner:
        return FakeRunner(num_blocks=64, block_size=SIZE, checkpoints=4)

    first = Lab(tmp_path, runner=runner())
    first.ask(PROMPT)
    first.close()
    second = Lab(tmp_path, runner=runner())
    tokens, receipt = second.ask([*PROMPT, 3, 4])
    assert tokens == alone([*PROMPT, 3, 4], checkpoints=4)
    assert receipt.disk_tokens == receipt.cached_tokens == 48
    second.close()


def test_a_state_alone_comes_back_where_the_blocks_are_there_still() -> None:
    lab = Lab(host=1 << 20, runner=FakeRunner(num_blocks=64, block_size=SIZE, checkpoints=1))
    lab.ask(PROMPT)
    lab.ask([*range(100, 150)])  # takes the only checkpoint
    tokens, receipt = lab.ask(PROMPT)
    assert tokens == alone(PROMPT, checkpoints=4)
    assert receipt.cached_tokens == 48


def test_where_generated_tokens_have_other_kv_they_come_back_as_such(tmp_path: Path) -> None:
    def runner() -> FakeRunner:
        return FakeRunner(num_blocks=64, block_size=SIZE, splits_decode=True)

    first = Lab(tmp_path, runner=runner())
    written, _ = first.ask(PROMPT, 20)
    first.close()
    second = Lab(tmp_path, runner=runner())
    turn = [*PROMPT, *written]
    tokens, receipt = second.ask(turn)
    assert tokens == alone(turn, splits_decode=True)
    assert receipt.disk_tokens == 48  # the prompt's, not those of what was generated
    second.close()


def test_another_namespace_version_or_model_finds_nothing(tmp_path: Path) -> None:
    spaces = [Namespace("a", "x"), Namespace("b", "x"), Namespace("a", "y"), Namespace("a", "x", 1)]
    first = Lab(tmp_path)
    first.ask(PROMPT, namespace=spaces[0])
    first.close()
    for space in spaces[1:]:
        lab = Lab(tmp_path)
        lab.ask(PROMPT, namespace=space)
        _, receipt = lab.ask([*PROMPT, 1], namespace=spaces[0])
        assert lab.disk is not None
        assert receipt.disk_tokens == (48 if space.version == 0 else 0)  # an old version finds nothing any more
        lab.close()
    other = Lab(tmp_path, runner=FakeRunner(block_size=SIZE, splits_decode=True))
    assert other.ask(PROMPT, namespace=spaces[0])[1].cached_tokens == 0
    other.close()


def test_a_replay_plans_the_same_without_the_tiers(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    first = Lab(tmp_path / "kv")
    first.ask(PROMPT)
    first.close()
    second = Lab(tmp_path / "kv", record=str(log), host=1 << 20)
    for prompt in (PROMPT, [*range(100, 180)], [*PROMPT, 1, 2, 3]):
        second.ask(prompt)
    assert second.tiers.stats().restored_disk_blocks == 6
    second.close()
    steps = list(replay(log))
    assert steps
    assert all(step.same for step in steps)


def test_many_that_want_the_same_bring_it_back_once(tmp_path: Path) -> None:
    first = Lab(tmp_path)
    first.ask(PROMPT)
    first.close()
    second = Lab(tmp_path)
    asked = [second.add([*PROMPT, tail]) for tail in range(6)]
    second.drain()
    for tail, (_, events) in enumerate(asked):
        result = events[-1].result
        assert result is not None
        assert result.tokens == alone([*PROMPT, tail])
        assert result.receipt.cached_tokens >= 48
    assert second.tiers.stats().restored_disk_blocks == 6
    second.close()


def test_one_that_goes_away_while_it_waits_holds_up_nobody(tmp_path: Path) -> None:
    first = Lab(tmp_path)
    first.ask(PROMPT)
    first.close()
    second = Lab(tmp_path)
    state, gone = second.add(PROMPT)
    _, stays = second.add([*PROMPT, 9])
    assert state.seq.held
    second.loop.abort(state)
    second.drain()
    assert gone[-1].result is not None
    assert stays[-1].result is not None
    assert stays[-1].result.receipt.disk_tokens == 48
    assert not second.tiers.holding
    second.close()


def test_a_prefix_larger_than_the_device_comes_back_as_far_as_it_fits(tmp_path: Path) -> None:
    first = Lab(tmp_path, blocks=64)
    first.ask(LONG)
    first.close()
    small = Lab(tmp_path, blocks=30)
    _, running = small.add([*range(50)], 60)
    small.step()
    _, events = small.add(LONG, 1)
    small.drain()
    assert running[-1].result is not None
    assert running[-1].result.tokens == alone([*range(50)], 60)
    assert events[-1].result is not None
    assert events[-1].result.tokens == alone(LONG, 1)
    small.close()


def test_above_its_quota_the_disk_forgets_what_was_of_no_use_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.engine.kv.disk, "_TOUCH_S", 0.0)
    lab = Lab(tmp_path, quota=12 * (64 + SIZE * 8))
    prompts = [[start + i for i in range(34)] for start in (10, 60, 110, 160)]
    for prompt in prompts:
        lab.ask(prompt)
        lab.ask(prompts[0])
    lab.close()
    again = Lab(tmp_path)
    assert [again.ask([*prompt, 1])[1].disk_tokens for prompt in (prompts[0], prompts[1])] == [32, 0]
    assert len(list(again.disk.files.path.glob("[0-9a-f]*"))) if again.disk else 0
    again.close()


def test_what_is_sure_to_be_wanted_is_deleted_last(tmp_path: Path) -> None:
    lab = Lab(tmp_path, quota=12 * (64 + SIZE * 8))
    prompts = [[start + i for i in range(34)] for start in (10, 60, 110, 160)]
    _, events = lab.add(prompts[0], keep_s=3600.0)
    lab.drain()
    for prompt in prompts[1:]:
        lab.ask(prompt)
    lab.close()
    assert events[-1].result is not None
    again = Lab(tmp_path)
    assert again.ask(prompts[0])[1].disk_tokens == 32
    again.close()


def test_giving_up_all_kv_gives_up_host_memory_too() -> None:
    lab = Lab(host=1 << 20)
    lab.ask(PROMPT)
    lab.loop.drop_kv()
    assert lab.tiers.host is not None
    assert (len(lab.tiers.host), lab.tiers.host.bytes) == (0, 0)
    assert lab.ask(PROMPT)[1].cached_tokens == 0


def test_settings_a_runner_cannot_honour_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    runner = FakeRunner()
    monkeypatch.setattr(FakeRunner, "access", None)
    for settings in ({"kv_cache": "1MiB"}, {"kv_host": "1MiB"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            toy_loop(runner, **settings)
    assert toy_loop(runner, kv_cache="auto").tiering is None
    with pytest.raises(ConfigError, match="kv_cache"):
        EngineConfig(kv_cache="some")


def test_settings_make_the_tiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    results = []
    for _ in range(2):
        with toy_engine(FakeRunner(), kv_cache="auto", kv_host="1MiB") as engine:
            from shoal.types import Request, SamplingParams

            request = Request(prompt="an engine " * 30, sampling=SamplingParams(max_tokens=3, ignore_eos=True))
            results.append(engine.complete(request))
    assert results[0].tokens == results[1].tokens
    assert results[1].receipt.disk_tokens == 288
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "kv").rglob("*") if file.is_file())


def test_one_that_was_preempted_gets_its_kv_back(tmp_path: Path) -> None:
    lab = Lab(host=1 << 20, blocks=24, max_batch=1)
    low, told = lab.add([*range(10, 90)], 30, priority=Priority.LOW)
    for _ in range(12):
        lab.step()
    lab.settle()
    _, first = lab.add([*range(100, 200)], 40, priority=Priority.HIGH)  # takes its place and most of its blocks
    lab.drain()
    assert low.seq.preemptions == 1
    for prompt, events, count in (([*range(10, 90)], told, 30), ([*range(100, 200)], first, 40)):
        assert events[-1].result is not None
        assert events[-1].result.tokens == alone(prompt, count)
    assert lab.tiers.stats().restored_host_blocks >= 4
    assert low.seq.computed_tokens < 80 + 30 + SIZE, "what it had lost was not computed again"


@pytest.mark.parametrize("late", [False, True])
def test_what_may_be_wrong_is_kept_nowhere(tmp_path: Path, late: bool) -> None:
    """A request whose logits were no numbers: neither what it computed nor what came back for it is used again."""
    first = Lab(tmp_path, host=1 << 20)
    if late:
        first.ask(PROMPT)
    else:
        state, events = first.add(PROMPT, 40)
        for _ in range(20):
            first.step()
        first.settle()
        first.runner.nan_for.add(state.seq.seq_id)  # type: ignore[attr-defined]
        first.drain()
        assert events[-1].result is not None
        assert events[-1].result.error is not None
    first.close()
    second = Lab(tmp_path, host=1 << 20)
    if late:
        state, events = second.add(PROMPT, 4)
        second.runner.nan_for.add(state.seq.seq_id)  # type: ignore[attr-defined]
        second.drain()
        assert events[-1].result is not None
        assert events[-1].result.error is not None
        assert events[-1].result.receipt.disk_tokens == 48
    assert second.ask(PROMPT)[1].cached_tokens == 0
    second.close()


def test_a_hold_of_one_that_ended_or_runs_changes_nothing() -> None:
    lab = Lab(host=1 << 20)
    state, _ = lab.add(PROMPT, 8)
    lab.step()
    from shoal.core.commands import Hold, Restore
    from shoal.core.tiers import Tier

    lab.loop.scheduler.apply(Hold(state.seq.seq_id, held=True))
    assert not state.seq.held
    lab.loop.scheduler.apply(Restore(state.seq.seq_id, 0, 2, Tier.HOST))
    assert lab.loop.scheduler.take_restored().blocks == ()
    lab.loop.scheduler.apply(Abort(state.seq.seq_id))
    lab.loop.scheduler.apply(Hold(state.seq.seq_id, held=True))
    assert isinstance(lab.loop.scheduler.kv, KVCacheManager)
