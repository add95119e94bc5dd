"""What many tests build: sequences, schedulers, engines on the toy model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.core.commands import Add, Command, Commit, JudgedTokens, Schedule
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Ended, Sequence
from shoal.core.stop import StopChecker
from shoal.engine.engine import Engine
from shoal.engine.inputs import InputProcessor
from shoal.engine.loop import StepLoop
from shoal.runners.base import Runner
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ModelSpec, StepPlan, Want
from shoal.types import Event, Priority, Request, Result, SamplingParams

BLOCK = 4


def spec(num_blocks: int = 32, **fields: Any) -> ModelSpec:
    return FakeRunner(num_blocks=num_blocks, block_size=BLOCK, **fields).spec


class Driver:
    """A scheduler without a device: every row that wants a token gets the next of a running number."""

    def __init__(
        self,
        num_blocks: int = 32,
        *,
        copies_blocks: bool = True,
        window: int = 0,
        num_windows: int = 0,
        **settings: Any,
    ) -> None:
        facts = {"copies_blocks": copies_blocks, "window": window, "num_windows": num_windows}
        self.scheduler = Scheduler(spec(num_blocks, **facts), EngineConfig(**settings))
        self.now = 0.0
        self.next_token = 1000
        self.ended: list[Ended] = []
        self.checkers: dict[int, StopChecker] = {}
        self._ids = 0

    def add(
        self,
        tokens: Seq[int],
        max_tokens: int = 4,
        *,
        rank: int = 1,
        arrival: float | None = None,
        deadline: float | None = None,
        **fields: Any,
    ) -> Sequence:
        """A sequence in line; `deadline` is on the driver's clock, `fields` are of its `RequestSpec`."""
        self._ids += 1
        arrival = self.now if arrival is None else arrival
        spec = RequestSpec(
            prompt=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {})),
            priority=list(Priority)[rank],
            deadline_s=None if deadline is None else deadline - arrival,
            **fields,
        )
        self.checkers[self._ids] = StopChecker(spec.sampling, (), lambda token: b"")
        self.apply(Add(self._ids, spec, arrival))
        return self.scheduler.sequence(self._ids)

    def apply(self, command: Command) -> StepPlan | None:
        return self.scheduler.apply(command)

    def plan(self) -> StepPlan:
        plan = self.apply(Schedule(self.now))
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, ms: float = 1.0, *, once: bool = False) -> None:
        sampled = {}
        for item in plan.sequences:
            if item.want is not Want.NOTHING:
                sampled[item.seq_id] = tuple(self.next_token + i for i in range(plan.chain))
                self.next_token += plan.chain
        self.now += ms / 1e3
        outcomes = {seq_id: self.outcome(seq_id, tokens) for seq_id, tokens in sampled.items()}
        self.apply(Commit(plan, outcomes, self.now, ms, once))
        self.ended += self.scheduler.take_ended()

    def outcome(self, seq_id: int, tokens: tuple[int, ...]) -> JudgedTokens:
        for count, token in enumerate(tokens, 1):
            verdict = self.checkers[seq_id].push(token)
            if verdict.reason is not None:
                return JudgedTokens(tokens[:count], count, verdict.reason)
        return JudgedTokens(tokens, len(tokens))

    def step(self) -> StepPlan:
        plan = self.plan()
        self.commit(plan)
        return plan

    def drain(self, limit: int = 500) -> None:
        while not self.scheduler.idle:
            assert limit > 0, "the scheduler does not come to an end"
            limit -= 1
            plan = self.apply(Schedule(self.now))
            if plan is not None:
                self.commit(plan)
            self.ended += self.scheduler.take_ended()


def fed(plan: StepPlan) -> dict[int, int]:
    """Sequence id to tokens fed."""
    return {item.seq_id: len(item.tokens) for item in plan.sequences}


def toy_engine(runner: FakeRunner | None = None, **settings: Any) -> Engine:
    """Requests without a seed get the same ones in every run: some draw an early end."""
    return Engine(lambda: runner or FakeRunner(), ByteTokenizer(), EngineConfig(**{"seed": 0, **settings}))


def toy_loop(runner: Runner, **settings: Any) -> StepLoop:
    return StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), EngineConfig(**settings))


def finish(loop: StepLoop, requests: Seq[Request], most_steps: int = 100_000) -> list[Result]:
    """Run requests on a loop to their ends, each told once."""
    logs: list[list[Event]] = [[] for _ in requests]
    for i, (request, log) in enumerate(zip(requests, logs, strict=True)):
        loop.add(f"r{i}", loop.inputs.prepare(request), log.append)
    while not loop.idle:
        assert most_steps, "requests do not come to an end"
        most_steps -= 1
        loop.step()
        check_integrity(loop.scheduler)
    results = [log[-1].result for log in logs]
    assert all(event.result is None for log in logs for event in log[:-1])
    assert all(results)
    return [result for result in results if result is not None]
