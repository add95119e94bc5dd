"""Who drafts what and how long; that nothing of a request's output tells whether it was drafted for."""

from __future__ import annotations

import random

from shoal.core.draft import Drafter, NamespaceText
from shoal.core.pacing import StepTimes
from shoal.core.request import RequestSpec
from shoal.core.sequence import Sequence
from shoal.core.suffixes import LONGEST, Suffixes
from shoal.types import Namespace, SamplingParams


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
    index.append(5)
    index.append(6)
    assert index.find(index) == (2, 2)


def test_tokens_at_once_and_one_by_one_make_the_same_index() -> None:
    rng = random.Random(1)
    for size in (3, 30, 255, 256, 257, 3000):
        tokens = [rng.randrange(40) for _ in range(size)]
        whole, grown, mixed = Suffixes(tokens), Suffixes(), Suffixes(tokens[: size // 3])
        for token in tokens:
            grown.append(token)
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
    tables = sum(len(table) for table in index._tables) * 4
    assert tables + 4 * len(index) <= 36 * len(index)


# -- who drafts what ----------------------------------------------------------------------------------------------


def test_a_copy_is_followed_token_by_token() -> None:
    drafter, seq = Drafter(), sequence([10, 11, 12, 13, 14, 15, 1, 2], [10, 11])
    drafter.follow(seq)
    assert upcoming(seq, 3) == [12, 13, 14]
    seq.tokens.append(12)
    drafter.follow(seq)
    assert upcoming(seq, 2) == [13, 14]
    seq.tokens.append(99)  # it goes its own way
    drafter.follow(seq)
    assert upcoming(seq, 2) == []


def test_text_of_another_namespace_is_never_drafted() -> None:
    drafter, rng = Drafter(), random.Random(3)
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
    drafter, text = Drafter(), list(range(200, 300))
    first = sequence([1, 2], text[:70])
    drafter.follow(first)
    second = sequence([3, 4], text[:6])
    drafter.follow(second)
    assert upcoming(second, 20) == text[6:26]


def test_histories_are_bounded_in_all() -> None:
    drafter = Drafter()
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
    drafter = Drafter()
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
    drafter = Drafter()
    good, bad = copying(drafter), sequence([1], [2])
    drafter.follow(bad)
    counts = drafter.choose([(good, 30), (bad, 30)], 40, 1e9, lambda rows: 2.0 + 0.1 * rows)
    assert counts[0] > 8
    assert counts[1] == 0


def test_dear_rows_are_not_drafted() -> None:
    drafter = Drafter()
    seq = copying(drafter)
    assert drafter.choose([(seq, 30)], 40, 1e9, lambda rows: 2.0 * rows) == [0]
    assert drafter.choose([(seq, 30)], 40, 1e9, lambda rows: 2.0)[0] == 30
    assert drafter.choose([(seq, 5)], 40, 1e9, lambda rows: 2.0) == [5]
    assert drafter.choose([(seq, 30)], 3, 1e9, lambda rows: 2.0) == [3]


def test_a_step_with_drafts_stays_below_the_stall_bound() -> None:
    drafter = Drafter()
    seq = copying(drafter)
    cost = lambda rows: 10.0 + rows  # noqa: E731
    (count,) = drafter.choose([(seq, 30)], 40, 16.0, cost)
    assert count == 5
    assert cost(1 + count) <= 16.0


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


def test_one_slow_step_is_forgotten() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 2.0)
        times.observe(4, 3.0)
    times.observe(4, 60.0)
    for _ in range(600):
        times.observe(1, 2.0)
    assert times(4) < 3.5
