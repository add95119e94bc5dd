"""Log-probabilities of prompts: those of the model, whatever is cached, preempted or beside it, in bounded memory."""

from __future__ import annotations

import time

import numpy as np
import pytest

from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.types import FinishReason, Priority, Request, SamplingParams, TokenLogprob

PROMPT = list(b"The quick brown fox jumps over the lazy dog, and then it sleeps for the rest of the day.")


def runner(max_rows: int = 16, **settings: object) -> FakeRunner:
    return FakeRunner(max_rows=max_rows, keep_plans=True, **settings)  # type: ignore[arg-type]


def engine(fake: FakeRunner, **settings: object) -> Engine:
    return Engine(lambda: fake, ByteTokenizer(), EngineConfig(**settings))  # type: ignore[arg-type]


def expected(tokens: list[int], top: int) -> list[TokenLogprob]:
    """By the definition: a fresh model, each prefix in a pass of its own."""
    entries = []
    for end in range(1, len(tokens)):
        item = ScheduledSequence(1, tuple(tokens[:end]), 0, tuple(range(8)), Want.LOGITS)
        logits = FakeRunner().execute(StepPlan(1, (item,))).logits
        assert logits is not None
        row = logits[0].astype(np.float64)
        row -= np.log(np.exp(row).sum())
        best = np.argsort(-row, kind="stable")[:top]
        entries.append(TokenLogprob(tokens[end], float(row[tokens[end]]), tuple((int(t), float(row[t])) for t in best)))
    return entries


def check(found: tuple[TokenLogprob, ...], tokens: list[int], top: int = 2) -> None:
    wanted = expected(tokens, top)
    assert [entry.token for entry in found] == tokens[1:]
    for entry, exact in zip(found, wanted, strict=True):
        assert entry.logprob == pytest.approx(exact.logprob, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for token, _ in exact.top]


def scored(tokens: list[int], *, top: int = 2, max_tokens: int = 4, **fields: object) -> Request:
    sampling = SamplingParams(prompt_logprobs=top, max_tokens=max_tokens)
    return Request(prompt_tokens=tokens, sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_each_prompt_token_has_the_log_probability_of_the_model(max_rows: int) -> None:
    fake = runner(max_rows)
    with engine(fake, max_batch=4) as one:
        plain = one.run([Request(prompt_tokens=PROMPT, sampling=SamplingParams(max_tokens=4))]).results[0]
        report = one.run([scored(PROMPT), scored(PROMPT[:40]), Request(prompt_tokens=PROMPT), scored(PROMPT[3:])])
    for result, tokens in zip(report.results, (PROMPT, PROMPT[:40], [], PROMPT[3:]), strict=True):
        if tokens:
            check(result.prompt_logprobs, tokens)
    assert report.results[0].tokens == plain.tokens
    assert report.results[0].receipt.miss == "scored"
    assert report.results[2].prompt_logprobs == ()
    assert fake.plans is not None
    for plan in fake.plans:
        assert sum(item.rows for item in plan.sequences if item.want is Want.LOGITS) <= max(max_rows, 4)


def test_the_first_event_brings_them_and_no_other() -> None:
    with engine(runner()) as one:
        events = list(one.submit(scored(PROMPT)))
    result = events[-1].result
    assert result is not None
    check(events[0].prompt_logprobs, PROMPT)
    assert all(event.prompt_logprobs == () for event in events[1:])
    assert result.prompt_logprobs == events[0].prompt_logprobs


def test_nothing_need_be_written() -> None:
    with engine(runner()) as one:
        results = one.run([scored(PROMPT, max_tokens=0), scored(PROMPT[:1], max_tokens=0)]).results
    check(results[0].prompt_logprobs, PROMPT)
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 2
    assert [result.tokens for result in results] == [(), ()]
    assert results[1].prompt_logprobs == ()
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_a_preempted_one_goes_on_where_its_scores_ended() -> None:
    fake = runner(4, num_blocks=4, step_s=0.04)  # slow until both are there
    hurried = Request(prompt_tokens=PROMPT[5:], sampling=SamplingParams(max_tokens=8), priority=Priority.HIGH)
    with engine(fake, max_batch=2, max_step_tokens=16) as one:
        low = one.submit(scored(PROMPT, priority=Priority.LOW))
        while one.stats().steps < 3:
            time.sleep(0.001)
        high = one.run([hurried]).results[0]
        result = low.result()
    assert high.finish_reason is FinishReason.LENGTH
    assert result.receipt.preemptions == 1
    check(result.prompt_logprobs, PROMPT)


def test_recurrent_state_is_kept_for_others_and_not_for_it() -> None:
    with engine(runner(checkpoints=4)) as one:
        results = one.run([scored(PROMPT), scored(PROMPT[:50])]).results
        again = one.run([Request(prompt_tokens=PROMPT, sampling=SamplingParams(max_tokens=4))]).results[0]
    assert results[0].tokens == again.tokens
    assert len(results[0].prompt_logprobs) == len(PROMPT) - 1
    assert results[0].prompt_logprobs[:49] == results[1].prompt_logprobs


def test_logits_that_are_no_numbers_end_it_alone() -> None:
    fake = runner()
    fake.nan_for.add(1)
    with engine(fake) as one:
        results = one.run([scored(PROMPT), scored(PROMPT)]).results
    assert results[0].finish_reason is FinishReason.ERROR
    check(results[1].prompt_logprobs, PROMPT)
