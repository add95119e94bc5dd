"""Who drafts what and how long; that nothing of a request's output tells whether it was drafted for."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.core import scheduler
from shoal.core.draft import Drafter, NamespaceText, why_not
from shoal.core.pacing import StepTimes
from shoal.core.request import RequestSpec
from shoal.core.sequence import Sequence
from shoal.core.suffixes import LONGEST, Suffixes
from shoal.engine.loop import StepLoop
from shoal.engine.record import replay
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ScheduledSequence
from shoal.types import Namespace, Request, Result, SamplingParams, StepRecord
from tests.support.drafting import AnyDrafter, draft_anything
from tests.support.engines import finish, toy_loop


def sequence(
    prompt: list[int], written: list[int], *, namespace: str = "", predicted: tuple[int, ...] = ()
) -> Sequence:
    spec = RequestSpec(
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=500),
        namespace=Namespace(namespace),
        predicted=predicted,
    )
    return Sequence(1, spec, written=tuple(written))


def upcoming(seq: Sequence, count: int) -> list[int]:
    draft = seq.draft
    assert draft is not None
    return list(draft.source.tokens[draft.at : draft.at + count]) if draft.at >= 0 else []


# -- the index ----------------------------------------------------------------------------------------------------


def test_a_place_is_found_by_two_tokens_and_by_four_first() -> None:
    index = Suffixes([1, 2, 3, 4, 5, 9, 9, 3, 4, 6])
    assert index.find(Suffixes([3, 4])) == (9, 2)  # the last one
    assert index.find(Suffixes([1, 2, 3, 4])) == (4, 4)  # the longer agreement, though it is older
    assert index.find(Suffixes([7, 3, 4])) == (9, 2)
    assert index.find(Suffixes([4, 3])) == (-1, 0)
    assert index.find(Suffixes([4])) == (-1, 0)


def test_a_text_does_not_find_its_own_end() -> None:
    index = Suffixes([5, 6, 7, 8])
    assert index.find(index) == (-1, 0)
    index.extend([5])
    index.extend([6])
    assert index.find(index) == (2, 2)


def test_tokens_at_once_and_one_by_one_make_the_same_index() -> None:
    rng = random.Random(1)
    for size in (3, 30, 255, 256, 257, 3000):
        tokens = [rng.randrange(40) for _ in range(size)]
        whole, grown, mixed = Suffixes(tokens), Suffixes(), Suffixes(tokens[: size // 3])
        for token in tokens:
            grown.extend([token])
        mixed.extend(tokens[size // 3 :])
        for _ in range(50):
            at = rng.randrange(size)
            tail = tokens[max(at - 20, 0) : at]
            found = {index.find(Suffixes(tail)) for index in (whole, grown, mixed)}
            for place, length in found:  # tables may be of other sizes, and so lose other places
                assert place < 0 or (tokens[place - length : place] == tail[-length:] and length <= LONGEST)
        assert whole.tokens == grown.tokens == mixed.tokens


def test_an_index_is_bounded_by_its_tokens() -> None:
    index = Suffixes(range(5000))
    tables = (len(index._twos) + len(index._fours)) * 4
    assert tables + 4 * len(index) <= 36 * len(index)


def test_what_is_put_behind_is_found_when_somebody_looks() -> None:
    rng, index, text = random.Random(2), Suffixes(), list[int]()
    for size in (1, 1, 3, 40, 2, 500):
        more = [rng.randrange(1000) for _ in range(size)]
        index.add(more)
        text += more
        if len(text) > 5:
            at = rng.randrange(4, len(text))
            place, length = index.find(Suffixes(text[:at]))
            assert length >= 2
            assert text[place - length : place] == text[at - length : at]
        assert index.find(Suffixes(text[-4:])) == (-1, 0)  # nothing follows its end


# -- who drafts what ----------------------------------------------------------------------------------------------


def test_a_copy_is_followed_token_by_token() -> None:
    drafter, seq = Drafter(64), sequence([10, 11, 12, 13, 14, 15, 1, 2], [10, 11])
    drafter.follow(seq)
    assert upcoming(seq, 3) == [12, 13, 14]
    seq.tokens.append(12)
    drafter.follow(seq)
    assert upcoming(seq, 2) == [13, 14]
    seq.tokens.append(99)  # it goes its own way
    drafter.follow(seq)
    assert upcoming(seq, 2) == []


def test_text_of_another_namespace_is_never_drafted() -> None:
    drafter, rng = Drafter(64), random.Random(3)
    words = [[rng.randrange(100, 200) for _ in range(80)] for _ in range(6)]
    spaces = ["a", "b", "a", "b", "", "c"]
    for text, space in zip(words, spaces, strict=True):
        seq = sequence([1], text, namespace=space)
        drafter.follow(seq)
        drafter.leave(seq)
    for space in {*spaces, "new"}:
        own = {token for text, name in zip(words, spaces, strict=True) if name == space for token in text}
        for text in words:
            seq = sequence([1], text[:4], namespace=space)
            drafter.follow(seq)
            drafted = upcoming(seq, 30)
            assert set(drafted) <= own | {1, *text[:4]}
            if text in [t for t, name in zip(words, spaces, strict=True) if name == space]:
                assert drafted == text[4:34]  # what its own namespace wrote is found


def test_a_running_sibling_is_read_too() -> None:
    drafter, text = Drafter(64), list(range(200, 300))
    first = sequence([1, 2], text[:70])
    drafter.follow(first)
    second = sequence([3, 4], text[:5])
    drafter.follow(second)
    assert upcoming(second, 20) == []  # nobody ran beside the first one until now
    first.tokens.append(text[70])
    drafter.follow(first)
    second.tokens.append(text[5])
    drafter.follow(second)
    assert upcoming(second, 20) == text[6:26]


def test_what_ended_before_a_step_only_decoded_is_read_too() -> None:
    drafter, text = Drafter(64), list(range(200, 240))
    drafter.leave(sequence([1, 2], text))
    foretold = sequence([1, 2], [50, 51, 7, 52], predicted=(50, 51, 52))
    drafter.leave(foretold)
    assert foretold.foretold == 2
    other = sequence([3, 4], text[:5])
    drafter.follow(other)
    assert upcoming(other, 20) == text[5:25]


def test_a_sequence_whose_drafts_cannot_pay_rests_and_wakes_when_it_copies() -> None:
    rng, drafter = random.Random(1), Drafter(64)
    prompt = [rng.randrange(100, 4000) for _ in range(200)]
    seq, looked = sequence(prompt, [5]), list[int]()
    for _ in range(200):
        if seq.draft is None or len(seq.tokens) >= seq.draft.due:
            drafter.follow(seq, least=0.3)
            looked.append(len(seq.tokens))
        seq.tokens.append(rng.randrange(5000, 9000))
    assert looked[:16] == list(range(201, 217))
    assert [b - a for a, b in pairwise(looked[-3:])] == [16, 16]
    assert len(looked) < 50
    draft = seq.draft
    assert draft is not None
    for written in range(50):
        seq.tokens.append(prompt[written])
        if len(seq.tokens) >= draft.due:
            drafter.follow(seq, least=0.3)
    assert (draft.taken, draft.first > 0.3) == (len(seq.tokens), True)
    assert upcoming(seq, 3) == prompt[50:53]


def test_who_has_a_prediction_does_not_rest() -> None:
    drafter, predicted = Drafter(64), tuple(range(50, 150))
    seq = sequence([1, 2, 3], [50], predicted=predicted)
    for token in (*range(1000, 1060), *predicted[40:]):
        drafter.follow(seq, least=0.9)
        seq.tokens.append(token)
    drafter.leave(seq)
    assert 1 + 60 - 5 < seq.foretold <= 1 + 60 - 2  # two tokens must agree before it is found again, or a few more


def test_histories_are_bounded_in_all() -> None:
    drafter = Drafter(64)
    for number in range(60):
        seq = sequence([1], list(range(16_000)), namespace=str(number))
        drafter.follow(seq)
        drafter.leave(seq)
    held = sum(map(len, drafter._histories.values()))
    assert held == drafter._held
    assert held <= (1 << 19) + 16_000
    text = NamespaceText()
    for _ in range(9):
        text.add(list(range(10_000)))
    assert len(text) <= 2 << 14


def test_a_prediction_is_followed_from_the_first_token_and_taken_up_again() -> None:
    drafter = Drafter(64)
    predicted = tuple(range(50, 90))
    seq = sequence([1, 2, 3], [50, 51], predicted=predicted)
    drafter.follow(seq)
    assert upcoming(seq, 3) == [52, 53, 54]
    seq.tokens += [7, 60, 61]  # an insertion and a gap
    drafter.follow(seq)
    assert upcoming(seq, 3) == [62, 63, 64]
    drafter.leave(seq)
    assert seq.foretold == 2
    assert seq.receipt.foretold == 2


# -- how many -----------------------------------------------------------------------------------------------------


def copying(drafter: Drafter, *, right: bool = True) -> Sequence:
    """A sequence that copies its prompt, or one whose drafts are always wrong."""
    rng = random.Random(5)
    prompt = [rng.randrange(100, 4000) for _ in range(300)]
    seq = sequence(prompt, prompt[:2])
    drafter.follow(seq)
    for i in range(2, 100):
        seq.tokens.append(prompt[i] if right or i % 3 else 5)
        drafter.follow(seq)
    if not right:
        seq.tokens += prompt[150:152]
        drafter.follow(seq)
    return seq


def test_the_likely_draft_long_and_the_unlikely_not_at_all() -> None:
    drafter = Drafter(64)
    good, bad = copying(drafter), sequence([1], [2])
    drafter.follow(bad)
    counts = drafter.choose([(good, 30), (bad, 30)], 40, 1e9, lambda rows: 2.0 + 0.1 * rows)
    assert counts[0] > 8
    assert counts[1] == 0


def test_dear_rows_are_not_drafted() -> None:
    drafter = Drafter(64)
    seq = copying(drafter)
    assert drafter.choose([(seq, 30)], 40, 1e9, lambda rows: 2.0 * rows) == [0]
    assert drafter.choose([(seq, 30)], 40, 1e9, lambda rows: 2.0)[0] == 30
    assert drafter.choose([(seq, 5)], 40, 1e9, lambda rows: 2.0) == [5]
    assert drafter.choose([(seq, 30)], 3, 1e9, lambda rows: 2.0) == [3]


def test_a_step_with_drafts_stays_below_the_stall_bound() -> None:
    drafter = Drafter(64)
    seq = copying(drafter)
    (count,) = drafter.choose([(seq, 30)], 40, 16.0, lambda rows: 10.0 + rows)
    assert count == 5  # six rows take 16 ms


def test_what_slows_all_for_the_sake_of_one_is_left() -> None:
    drafter = Drafter(64)
    seq = copying(drafter)
    others = [(sequence([1], [2]), 30)] * 7  # nothing to draft: the other's tokens only hold them up
    ms = lambda rows: 1.0 + 0.12 * rows  # noqa: E731
    (alone,) = drafter.choose([(seq, 30)], 40, 1e9, ms)
    (among, *rest) = drafter.choose([(seq, 30), *others], 40, 1e9, ms)
    assert alone > 5
    assert among < alone / 2
    assert not any(rest)


# -- what steps cost ----------------------------------------------------------------------------------------------


def test_step_times_follow_what_is_measured() -> None:
    times = StepTimes()
    cost = {1: 2.7, 2: 3.2, 4: 3.8, 8: 4.8, 16: 9.0}
    rng = random.Random(0)
    for _ in range(200):
        rows = rng.choice(list(cost))
        times.observe(rows, cost[rows] * rng.uniform(0.95, 1.05))
    for rows, ms in cost.items():
        assert abs(times(rows) / ms - 1) < 0.1
    assert times(4) < times(5) < times(6) < times(8)


def test_a_jump_in_cost_is_no_news_of_fewer_rows() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(8, 4.8)
        times.observe(9, 7.5)  # another tile
    assert abs(times(8) / 4.8 - 1) < 0.05
    assert abs(times(9) / 7.5 - 1) < 0.05
    assert times(10) > times(9)


def test_what_makes_all_steps_dearer_makes_no_draft_look_cheap() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(8, 4.0)
        times.observe(10, 5.0)
    for _ in range(12):
        times.observe(8, 8.0)  # others sample now
    assert 1.1 < times(10) / times(8) < 1.6


def test_drafts_less_likely_than_the_least_chance_gain_nothing() -> None:
    rng, near = random.Random(3), 0
    for _ in range(300):
        times, streams = StepTimes(), rng.choice((1, 2, 4, 8))
        assert times.least_chance(streams, 1.06) == float("inf")
        a, b = rng.uniform(1, 20), rng.uniform(0.05, 4)
        jump = rng.randrange(2, 30)
        for _ in range(40):
            rows = rng.randrange(streams, streams + 40)
            times.observe(rows, a + b * (rows - rows % jump) + 0.05 * rows)
        least = times.least_chance(streams, 1.06)
        drafter, seqs = Drafter(64), [sequence([1], [2]) for _ in range(streams)]
        for seq in seqs:
            seq.tokens += rng.sample(range(100, 4000), 20)
            seq.tokens += seq.tokens[2:8]
            drafter.follow(seq)
            assert seq.draft is not None
            seq.draft.first = min(rng.uniform(0.5, 1.5) * least, 1.0)
        likely = max(seq.draft.first for seq in seqs if seq.draft is not None)
        counts = drafter.choose([(seq, 30) for seq in seqs], 40, 1e9, times)
        assert not any(counts) or likely >= least - 1e-9
        near += any(counts)
    assert near > 20


def test_rows_never_seen_are_taken_to_cost_as_much_as_those_that_were() -> None:
    times = StepTimes()
    times.observe(4, 20.0)
    assert times.rows_within(127.5) == 25
    times.observe(16, 40.0)
    assert 45 <= times.rows_within(127.5) <= 52


def test_one_slow_step_is_forgotten() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 2.0)
        times.observe(4, 3.0)
    times.observe(4, 60.0)
    for _ in range(600):
        times.observe(1, 2.0)
    assert times(4) < 3.5


# -- in an engine's loop ------------------------------------------------------------------------------------------


class Copies(FakeRunner):
    """The toy model, which mostly goes on as in the alphabet."""

    def _feed(self, item: ScheduledSequence, tokens: Seq[int], start: int, generated: int) -> NDArray[np.float32]:
        logits = super()._feed(item, tokens, start, generated).copy()
        logits[(tokens[-1] + 1) % 30] += 4.2
        return logits


def run_copies(record: str | None = None, **settings: Any) -> tuple[list[Result], StepLoop]:
    runner = Copies(num_blocks=64, block_size=8, max_chain=4)
    loop = toy_loop(runner, record=record, max_stall_ms=10_000, **settings)
    draft_anything(loop, random.Random(2))
    samplings = [
        SamplingParams(max_tokens=90, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.8, seed=1, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.8, seed=2, top_k=20, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.5, seed=3, stop_token_ids=(25,), presence_penalty=0.2),
        SamplingParams(max_tokens=40, speculate=False, ignore_eos=True),
    ]
    prompt = [*range(30), *range(7)]
    requests = [Request(prompt_tokens=[*prompt, i], sampling=s) for i, s in enumerate(samplings)]
    results = finish(loop, requests)
    loop.close()
    return results, loop


def test_drafting_changes_nothing_but_the_number_of_steps() -> None:
    (drafting, first), (plain, second) = run_copies(), run_copies(speculation=False)
    for got, wanted in zip(drafting, plain, strict=True):
        assert (got.tokens, got.logprobs, got.finish_reason) == (wanted.tokens, wanted.logprobs, wanted.finish_reason)
    assert first.steps < second.steps
    stats = first.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 50
    assert sum(result.receipt.accepted for result in drafting) == stats.accepted_tokens
    assert drafting[4].receipt.drafted == 0
    assert second.stats().drafted_tokens == 0


def test_a_record_replays_with_its_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Drafter", lambda rows: AnyDrafter(random.Random(7), rows))
    path = tmp_path / "run.jsonl"
    loop = toy_loop(Copies(num_blocks=64), record=str(path), max_stall_ms=10_000)
    finish(loop, [Request(prompt_tokens=[*range(30), i], sampling=SamplingParams(max_tokens=60)) for i in range(3)])
    loop.close()
    assert loop.stats().drafted_tokens > 20
    steps = list(replay(path))
    assert len(steps) == loop.steps
    assert all(step.same for step in steps)
    assert any(item.rows > 1 for step in steps for item in step.plan.sequences)


def test_steps_and_their_records_count_what_was_written() -> None:
    runner = Copies(num_blocks=64)
    loop = toy_loop(runner, max_stall_ms=10_000)
    draft_anything(loop, random.Random(4))
    records: list[StepRecord] = []
    loop.on_step.append(records.append)
    (result,) = finish(loop, [Request(prompt_tokens=list(range(40)), sampling=SamplingParams(max_tokens=50))])
    assert sum(record.accepted for record in records) == result.receipt.accepted > 0
    assert sum(record.drafted for record in records) == result.receipt.drafted
    assert sum(record.decode_tokens for record in records) == len(result.tokens) - 1  # the last is never fed
    assert sum(record.prefill_tokens for record in records) == 40


def test_nothing_is_preempted_for_a_draft() -> None:
    for blocks in (18, 20, 24):
        runner = Copies(num_blocks=blocks, block_size=8)
        results = {}
        for speculation in (True, False):
            loop = toy_loop(runner, speculation=speculation, prefix_sharing=False, max_batch=3)
            draft_anything(loop, random.Random(1))
            requests = [
                Request(prompt_tokens=[*range(24), i], sampling=SamplingParams(max_tokens=20, ignore_eos=True))
                for i in range(3)
            ]
            results[speculation] = sum(result.receipt.preemptions for result in finish(loop, requests))
        assert results[True] <= results[False]


class Broken(Copies):
    """Gives no finite numbers from a position on."""

    def _feed(self, item: ScheduledSequence, tokens: Seq[int], start: int, generated: int) -> NDArray[np.float32]:
        logits = super()._feed(item, tokens, start, generated)
        return logits * np.float32(np.nan) if start + len(tokens) > 70 else logits


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_row_behind_a_draft_that_is_not_finite_ends_its_request(temperature: float) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=1, ignore_eos=True)
    request = Request(prompt_tokens=[*range(30), *range(7)], sampling=sampling)
    results = []
    for draws in (None, *range(6)):
        loop = toy_loop(Broken(num_blocks=64), speculation=draws is not None, max_stall_ms=10_000)
        draft_anything(loop, random.Random(draws))
        results += finish(loop, [request], most_steps=200)
        assert (loop.stats().accepted_tokens > 0) is (draws is not None)
    assert results[0].error is not None
    assert len(results[0].tokens) == 34
    assert {(result.tokens, str(result.error)) for result in results} == {(results[0].tokens, str(results[0].error))}


def test_why_a_model_is_not_drafted_for() -> None:
    spec = FakeRunner().spec
    assert why_not(spec) is None
    for other, word in (
        (replace(spec, exact=False), "bits"),
        (replace(spec, recurrent=True), "recurrent"),
        (replace(spec, max_rows=1), "last token"),
        (replace(spec, lookahead=1), "next step"),
    ):
        reason = why_not(other)
        assert reason is not None
        assert word in reason
