"""Branching a request that runs, waits, has just been submitted, or has just ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal import Engine, FinishReason, Request, SamplingParams
from shoal.core.audit import check_integrity
from shoal.engine.handles import Handle
from shoal.engine.inflight import Output
from shoal.errors import EngineClosedError, InvalidRequestError, QueueFullError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import StepPlan
from tests.support.engines import toy_engine

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def nothing_is_left(engine: Engine) -> None:
    engine.call(lambda: check_integrity(engine._loop.scheduler))
    assert not engine._admission
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.kv_held_bytes) == (0, 0, 0)


class Gate:
    """Holds the pass of one step until it is opened."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        if plan.step == self.step:
            self.reached.set()
            assert self.opened.wait(60)


def forked_at(gate: Gate, parent: Handle, count: int) -> list[Any]:
    """Fork while the pass at the gate runs; gives the branches, or the error that was raised."""
    told: list[Any] = []

    def fork() -> None:
        try:
            told.extend(parent.fork(count))
        except InvalidRequestError as error:
            told.append(error)

    assert gate.reached.wait(60)
    thread = threading.Thread(target=fork)
    thread.start()
    while parent._engine._thread._mailbox._commands.empty():  # the command waits for the pass to end
        thread.join(0.005)
        assert thread.is_alive(), told
    gate.opened.set()
    thread.join(20)
    return told


def test_a_fork_right_after_submit_branches_at_the_first_boundary() -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    with toy_engine(max_batch=2) as engine:
        expected = engine.run([Request(prompt="x" * 40, sampling=sampling)]).results[0].tokens
        for _ in range(20):
            parent = engine.submit(Request(prompt="x" * 40, sampling=sampling))
            children = parent.fork(2)
            results = [handle.result(20) for handle in (parent, *children)]
            assert results[0].tokens == expected
            assert [(len(r.tokens), r.finish_reason) for r in results] == [(30, FinishReason.LENGTH)] * 3
        nothing_is_left(engine)


def test_a_request_that_waits_can_be_forked() -> None:
    with toy_engine(FakeRunner(step_s=0.001), max_batch=1) as engine:
        running = engine.submit(Request(prompt="first", sampling=LONG))
        waiting = engine.submit(Request(prompt="second", sampling=SamplingParams(max_tokens=5, ignore_eos=True)))
        (child,) = waiting.fork(1)
        running.abort()
        assert child.result(20).tokens == waiting.result(20).tokens
        nothing_is_left(engine)


def test_a_fork_that_is_refused_leaves_none_of_its_branches_in_line() -> None:
    with toy_engine(FakeRunner(step_s=0.001), max_batch=1, max_queue=3) as engine:
        parent = engine.submit(Request(prompt="x", sampling=LONG))
        next(iter(parent))
        with pytest.raises(QueueFullError):
            parent.fork(5)
        assert len(engine._admission) == 1
        children = parent.fork(3)
        for handle in (parent, *children):
            handle.abort()
            assert handle.result(20).finish_reason is FinishReason.ABORTED
        nothing_is_left(engine)


def test_a_parent_that_ends_meanwhile_refuses_and_leaves_no_branch() -> None:
    gate = Gate(step=5)
    with toy_engine(FakeRunner(fault=gate)) as engine:
        parent = engine.submit(Request(prompt="x", sampling=SamplingParams(max_tokens=5, ignore_eos=True)))
        told = forked_at(gate, parent, 3)
        assert [type(error) for error in told] == [InvalidRequestError]
        assert "finished" in str(told[0])
        assert parent.result(20).finish_reason is FinishReason.LENGTH
        nothing_is_left(engine)


@pytest.mark.parametrize("stop", [True, False])
def test_branches_never_write_past_a_limit_or_a_stop_string(stop: bool) -> None:
    """Wherever the fork strikes: its branches end where their parent ends."""
    with toy_engine() as engine:
        written = engine.run([Request(prompt="y", sampling=LONG)]).results[0].text
    sampling = SamplingParams(
        max_tokens=9 if not stop else 400, stop=(written[11:13],) if stop else (), ignore_eos=True
    )
    for step in range(1, 12):
        gate = Gate(step)
        with toy_engine(FakeRunner(fault=gate)) as engine:
            parent = engine.submit(Request(prompt="y", sampling=sampling))
            while not gate.reached.wait(0.01) and parent.state != "finished":
                pass
            if not gate.reached.is_set():  # it ended before that step
                assert parent.result(20).error is None
                gate.opened.set()
                continue
            told = forked_at(gate, parent, 2)
            expected = parent.result(20)
            for child in told:
                if isinstance(child, Handle):
                    result = child.result(20)
                    assert (result.tokens, result.text) == (expected.tokens, expected.text)
                    assert result.finish_reason is expected.finish_reason
            nothing_is_left(engine)


def test_log_probabilities_from_before_a_fork_are_kept() -> None:
    sampling = SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True)
    gate = Gate(step=8)
    with toy_engine(FakeRunner(fault=gate)) as engine:
        parent = engine.submit(Request(prompt="x", sampling=sampling))
        (child,) = forked_at(gate, parent, 1)
        streamed = [entry for event in child for entry in event.logprobs]
        result = child.result(20)
        assert [entry.token for entry in result.logprobs] == list(result.tokens)
        assert result.logprobs == parent.result(20).logprobs
        assert streamed == list(result.logprobs[8:])


def test_output_that_had_ended_already_does_not_go_on() -> None:
    with toy_engine() as engine:
        request = Request(prompt="x", sampling=SamplingParams(max_tokens=3, ignore_eos=True))
        prepared = engine._loop.inputs.prepare(request)
        result = engine.resume_request(prepared.spec, Output((65, 66, 67, 68))).result(20)
        assert (result.tokens, result.text, result.finish_reason) == ((65, 66, 67), "ABC", FinishReason.LENGTH)
        nothing_is_left(engine)


def test_an_engine_that_closes_meanwhile_refuses_the_fork() -> None:
    engine = toy_engine(FakeRunner(step_s=0.001))
    parent = engine.submit(Request(prompt="x", sampling=LONG))
    engine.close()
    with pytest.raises(EngineClosedError):
        parent.fork(2)
    assert parent.result(5).finish_reason is FinishReason.ABORTED
    assert not engine._admission


def test_a_prefill_has_nothing_to_branch() -> None:
    with toy_engine(FakeRunner(step_s=0.05), max_step_tokens=16) as engine:  # 25 steps: it has not ended
        handle = engine.prefill(Request(prompt="x" * 400))
        with pytest.raises(InvalidRequestError, match="prefill"):
            handle.fork(1)
        handle.abort()
        handle.result(20)
        nothing_is_left(engine)


def test_what_the_prompt_was_worth_is_known_to_a_branch() -> None:
    gate = Gate(step=4)
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=1, ignore_eos=True)
    with toy_engine(FakeRunner(fault=gate)) as engine:
        parent = engine.submit(Request(prompt="worth something", sampling=sampling))
        (child,) = forked_at(gate, parent, 1)
        results = [parent.result(20), child.result(20)]
        assert results[0].prompt_logprobs == results[1].prompt_logprobs
        assert [entry.token for entry in results[0].prompt_logprobs] == list(b"orth something")
        assert results[1].receipt.miss != "scored"
        nothing_is_left(engine)
