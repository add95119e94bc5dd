"""Where recurrent state is kept and found again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.engine.inflight import RequestState
from shoal.engine.inputs import InputProcessor
from shoal.engine.loop import StepLoop
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import StepPlan
from shoal.types import Request, SamplingParams

SIZE = 32


class Bench:
    def __init__(self, checkpoints: int = 4, **settings: object) -> None:
        self.runner = FakeRunner(checkpoints=checkpoints, keep_plans=True)
        self.loop = StepLoop(self.runner, InputProcessor(self.runner.spec, None, 0), EngineConfig.of(**settings))

    def run(self, *prompts: list[int], prefill_only: bool = False) -> Sequence[RequestState]:
        states = [
            self.loop.add(
                str(i),
                self.loop.inputs.prepare(
                    Request(prompt_tokens=tuple(p), sampling=SamplingParams(max_tokens=3)), prefill_only=prefill_only
                ),
                lambda event: None,
            )
            for i, p in enumerate(prompts)
        ]
        while not self.loop.idle:
            self.loop.step()
            check_integrity(self.loop.scheduler)
        return states

    @property
    def saved_at(self) -> list[int]:
        """Token counts after which state was kept so far."""
        assert self.runner.plans is not None
        return [item.start + len(item.tokens) for plan in self.runner.plans for item in saves(plan)]


def saves(plan: StepPlan) -> list:  # type: ignore[type-arg]
    return [item for item in plan.sequences if item.save is not None]


def trunk_and(tail: int, trunk: int = 80) -> list[int]:
    return [*range(trunk), *(100 + tail for _ in range(20))]


def test_a_prompt_keeps_its_state_at_its_last_block_boundary() -> None:
    bench = Bench()
    bench.run(list(range(100)))
    assert bench.saved_at == [96]
    (again,) = bench.run(list(range(100)))
    assert (again.seq.cached_tokens, again.seq.miss) == (96, "checkpoint")


def test_a_fork_in_the_tree_is_kept_when_it_is_seen() -> None:
    bench = Bench()
    first, second, third = (bench.run(trunk_and(i))[0] for i in range(3))
    assert (first.seq.miss, second.seq.miss, third.seq.miss) == ("cold", "checkpoint", "checkpoint")
    assert (second.seq.cached_tokens, third.seq.cached_tokens) == (0, 64)


def test_a_leader_keeps_what_its_followers_wait_for() -> None:
    bench = Bench()
    states = bench.run(*(trunk_and(i) for i in range(5)))
    assert [t.seq.cached_tokens for t in states] == [0, 64, 64, 64, 64]


@pytest.mark.parametrize("length", [64, 65, 96])
def test_a_follower_may_extend_the_whole_of_its_leader(length: int) -> None:
    bench = Bench()
    leader, follower = bench.run(list(range(length)), [*range(length), 200, 201])
    assert (leader.seq.cached_tokens, follower.seq.cached_tokens) == (0, (length - 1) // SIZE * SIZE)


def test_a_prefix_computed_for_others_is_kept_to_its_last_token() -> None:
    bench = Bench()
    bench.run(list(range(75)), prefill_only=True)
    (hit,) = bench.run([*range(75), 200, 201])
    assert hit.seq.cached_tokens == 75


def test_the_least_recently_used_checkpoint_makes_room() -> None:
    bench = Bench(checkpoints=2)
    prompts = [[i] * 40 for i in range(3)]
    for prompt in prompts:
        bench.run(prompt)
    oldest, newest = bench.run(prompts[0])[0], bench.run(prompts[2])[0]
    assert (oldest.seq.cached_tokens, oldest.seq.miss) == (0, "checkpoint")
    assert newest.seq.cached_tokens == 32


@pytest.mark.parametrize("sharing", [True, False])
def test_nothing_is_kept_where_nothing_is_shared(sharing: bool) -> None:
    bench = Bench(prefix_sharing=sharing)
    bench.run(list(range(100)))
    assert bool(bench.saved_at) is sharing
