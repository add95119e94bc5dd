"""Random submits, aborts, forks, faults and suspensions on tiny block budgets; the books audited after every step.

The toy model's logits depend on every cached slot, so each request's tokens are compared with those it gets alone.
"""

from __future__ import annotations

import random
from functools import cache
from math import inf

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.core.commands import CancelExpectation, Expect, KeepCached, PreemptAll, PreemptLow
from shoal.engine.inflight import RequestState
from shoal.engine.inputs import InputProcessor
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.host import HostTier
from shoal.engine.kv.tiering import Tiering
from shoal.engine.loop import StepLoop
from shoal.errors import KVBudgetError, PromptTooLongError, RunnerError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepPlan
from shoal.types import Event, FinishReason, Namespace, Priority, Request, SamplingParams
from tests.support.drafting import draft_anything

TRUNKS = (
    "",
    "The same beginning for all of these agents. ",
    "Another trunk that is rather longer than one block of KV. " * 3,
)
BLOCK = 8


@cache
def alone(
    prompt: str, sampling: tuple[tuple[str, object], ...], splits: bool, states: int, window: int
) -> tuple[int, ...]:
    """The tokens a request gets when nobody else is there and nothing is shared."""
    runner = FakeRunner(
        num_blocks=256,
        block_size=BLOCK,
        context_length=512,
        splits_decode=splits,
        checkpoints=min(states, 1),
        window=window,
        num_windows=256 if window else 0,
    )
    config = EngineConfig(max_batch=1, prefix_sharing=False, speculation=False)
    loop = StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), config)
    events: list[Event] = []
    request = Request(prompt=prompt, sampling=SamplingParams(**dict(sampling)))  # type: ignore[arg-type]
    loop.add("solo", loop.inputs.prepare(request), events.append)
    while not loop.idle:
        loop.step()
    result = events[-1].result
    assert result is not None
    return result.tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(14, 60),
        batch=st.integers(1, 6),
        step_tokens=st.integers(16, 64),
        copies=st.booleans(),
        splits=st.booleans(),
        states=st.sampled_from([0, 0, 1, 4]),
        chunk=st.sampled_from([1, 1, 4]),
        cached=st.sampled_from([None, 0, 5]),
        host=st.sampled_from([None, 5, 1000]),
        window=st.sampled_from([0, 1, 8, 11, 20]),
        windows=st.integers(0, 20),
    )
    def start(
        self,
        blocks: int,
        batch: int,
        step_tokens: int,
        copies: bool,
        splits: bool,
        states: int,
        chunk: int,
        cached: int | None,
        host: int | None,
        window: int,
        windows: int,
    ) -> None:
        window = 0 if states else window
        self.splits, self.states, self.window = splits, states, window
        self.runner = FakeRunner(
            num_blocks=blocks,
            block_size=BLOCK,
            context_length=512,
            copies_blocks=copies,
            splits_decode=splits,
            checkpoints=states,
            window=window,
            num_windows=-(-window // BLOCK) + 3 + windows if window else 0,
        )
        self.runner.fault = self.fault
        config = EngineConfig(
            max_batch=batch,
            max_step_tokens=step_tokens,
            decode_chunk=chunk,
            prefix_memory=None if cached is None else max(cached * 8 * BLOCK, 1),
            ageing_s=0.5,
        )
        self.clock = Clock()
        self.loop = StepLoop(
            self.runner, InputProcessor(self.runner.spec, ByteTokenizer(), 0), config, clock=self.clock
        )
        draft_anything(self.loop, random.Random(blocks))
        if host is not None:
            size = self.runner.block_bytes
            tier, buffers = HostTier(host * size), Buffers(size, 0)
            self.loop.tiering = Tiering(self.loop.scheduler, self.runner, tier, None, buffers)
        self.events: dict[str, list[Event]] = {}
        self.request_states: dict[str, RequestState] = {}
        self.expected: dict[str, tuple[int, ...]] = {}
        self.may_end_early: set[str] = set()
        self.break_next = False
        self.pins: list[int] = []
        self.expected_prefixes: list[tuple[tuple[int, ...], int]] = []

    def fault(self, plan: StepPlan) -> None:
        if self.break_next:
            self.break_next = False
            raise RuntimeError("injected")

    def submit(self, request: Request, *, prefill_only: bool = False) -> str | None:
        name = f"r{len(self.events)}"
        try:
            prepared = self.loop.inputs.prepare(request, prefill_only=prefill_only)
        except (KVBudgetError, PromptTooLongError):
            return None
        self.events[name] = []
        self.request_states[name] = self.loop.add(name, prepared, self.events[name].append)
        return name

    @rule(
        trunk=st.sampled_from(TRUNKS),
        tail=st.integers(0, 3),
        length=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 0.0, 0.9]),
        seed=st.integers(0, 3),
        priority=st.sampled_from(list(Priority)),
        group=st.sampled_from(["", "a", "b"]),
        task=st.sampled_from(["", "t"]),
        path=st.integers(0, 3),
        keep_s=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def arrive(
        self,
        trunk: str,
        tail: int,
        length: int,
        temperature: float,
        seed: int,
        priority: Priority,
        group: str,
        task: str,
        path: int,
        keep_s: float,
    ) -> None:
        prompt = trunk + "x" * tail + "?"
        fields = {"max_tokens": length, "temperature": temperature, "seed": seed}
        sampling = SamplingParams(**fields)  # type: ignore[arg-type]
        request = Request(
            prompt=prompt,
            sampling=sampling,
            priority=priority,
            group=group,
            namespace=Namespace(task=task),
            critical_path=path,
            keep_s=keep_s,
        )
        name = self.submit(request)
        if name is not None:
            room = self.loop.inputs.spec.kv_capacity - len(prompt)
            self.expected[name] = alone(prompt, tuple(fields.items()), self.splits, self.states, self.window)[:room]

    @rule(trunk=st.sampled_from(TRUNKS[1:]))
    @precondition(lambda self: len(self.pins) < 1)
    def pin(self, trunk: str) -> None:
        name = self.submit(
            Request(prompt=trunk, sampling=SamplingParams(max_tokens=1), priority=Priority.HIGH), prefill_only=True
        )
        if name is not None:
            self.may_end_early.add(name)
            self.pins.append(self.request_states[name].seq.seq_id)

    @rule()
    @precondition(lambda self: self.pins)
    def unpin(self) -> None:
        self.loop.unpin(self.pins.pop())

    @rule(trunk=st.sampled_from(TRUNKS[1:]), due=st.integers(0, 50))
    @precondition(lambda self: len(self.expected_prefixes) < 4)
    def expect(self, trunk: str, due: int) -> None:
        self.expected_prefixes.append((tuple(trunk.encode()), due))
        self.loop.scheduler.apply(Expect(tuple(trunk.encode()), Namespace(), due))

    @rule(data=st.data())
    @precondition(lambda self: self.expected_prefixes)
    def cancel_expectation(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.expected_prefixes) - 1))
        tokens, due = self.expected_prefixes.pop(at)
        self.loop.scheduler.apply(CancelExpectation(tokens, Namespace(), due))

    @rule(data=st.data())
    @precondition(lambda self: self.loop.states)
    def abort(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(self.loop.states))
        self.may_end_early.add(state.request_id)
        self.loop.abort(state)

    @rule(data=st.data())
    @precondition(lambda self: self.loop.states)
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.loop.states))
        if parent.seq.spec.prefill_only:
            return
        name = f"r{len(self.events)}"
        self.events[name] = []
        written = self.loop.share(parent)
        self.request_states[name] = self.loop.add(name, parent.prepared, self.events[name].append, before=written)
        self.expected[name] = self.expected[parent.request_id]

    @rule()
    def break_a_step(self) -> None:
        self.break_next = True

    @rule(data=st.data())
    @precondition(lambda self: self.loop.scheduler.running)
    def poison_a_row(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.loop.scheduler.running))
        self.runner.nan_for.add(seq.seq_id)
        self.may_end_early.add(next(t.request_id for t in self.loop.states if t.seq is seq))

    @rule(drop=st.booleans())
    def suspend(self, drop: bool) -> None:
        self.loop.scheduler.apply(PreemptAll(drop_cached=drop))

    @rule(keeping=st.booleans())
    def run_short_of_memory(self, keeping: bool) -> None:
        self.loop.scheduler.apply(KeepCached(keeping))

    @rule()
    def low_gives_way(self) -> None:
        self.loop.scheduler.apply(PreemptLow())

    @rule()
    @precondition(lambda self: self.loop.idle)
    def copy_out(self) -> None:
        self.loop.copy_out()

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.break_next:
                self.may_end_early |= {t.request_id for t in self.loop.states}
            busy = not self.loop.idle
            ended = sum(e[-1].finished for e in self.events.values() if e)
            record = self.loop.step()
            check_integrity(self.loop.scheduler)
            kept = self.loop.scheduler.kv.windows
            if kept is not None:  # whoever reads what is nobody's now writes other tokens
                self.runner.discard_blocks((), kept.free)
            after = sum(e[-1].finished for e in self.events.values() if e)
            assert record is not None or after > ended or not busy, "there was work and nothing was done"

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "loop"):
            check_integrity(self.loop.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.break_next = False
        for _ in range(5000):
            if self.loop.idle:
                break
            self.loop.step()
            check_integrity(self.loop.scheduler)
        assert self.loop.idle, "requests are left over"
        for name, events in self.events.items():
            self.check(name, events)
        for seq_id in list(self.loop.scheduler.pinned):
            self.loop.unpin(seq_id)
        for tokens, due in self.expected_prefixes:
            self.loop.scheduler.apply(CancelExpectation(tokens, Namespace(), due))
        self.loop.scheduler._keeping.expire(inf)
        assert not self.loop.scheduler.kv.tree.eviction._announced, "an announcement was not taken back"
        check_integrity(self.loop.scheduler)
        assert self.loop.scheduler.kv.pool.num_held == 0

    def check(self, name: str, events: list[Event]) -> None:
        assert [e.finished for e in events] == [False] * (len(events) - 1) + [True], f"{name} did not end exactly once"
        result = events[-1].result
        assert result is not None
        if result.finish_reason is FinishReason.ERROR:
            assert isinstance(result.error, KVBudgetError) or name in self.may_end_early
            assert isinstance(result.error, RunnerError | KVBudgetError)
        elif result.finish_reason is FinishReason.ABORTED:
            assert name in self.may_end_early
        elif name in self.expected:
            assert result.tokens == self.expected[name], f"{name} differs from what it writes alone"
        if name in self.expected:
            ours = result.tokens
            assert ours == self.expected[name][: len(ours)]


CoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreMachine = CoreMachine.TestCase
