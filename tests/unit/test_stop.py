from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.stop import IncrementalDecoder, StopChecker
from shoal.types import FinishReason, SamplingParams

EOS = 0
TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "你好世界、很多代理。",
    "👍🏽 👩🏾‍🚀 👨‍👩‍👧‍👦 🇨🇿",
    "plain ASCII",
    "a\u0000b \ufffd \U0010ffff \ud7ff\ue000",
]


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def decode(pieces: Sequence[bytes]) -> list[str]:
    decoder = IncrementalDecoder()
    return [decoder.push(piece) for piece in pieces]


def without_incomplete_end(data: bytes) -> bytes:
    begins = (
        rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
        rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf]{1,2})?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
    )
    return re.sub(begins, b"", data)


class Run:
    """A request whose tokens are pieces of bytes; token 0 is the end token."""

    def __init__(self, params: SamplingParams, pieces: Sequence[bytes]) -> None:
        table = [b"", *pieces]
        self.checker = StopChecker(params, [EOS], table.__getitem__)
        self.deltas: list[str] = []
        self.output: list[int] = []
        self.reason: FinishReason | None = None

    def feed(self, tokens: Sequence[int]) -> Run:
        for token in tokens:
            verdict = self.checker.push(token)
            self.deltas.append(verdict.text)
            if verdict.is_output:
                self.output.append(token)
            if verdict.reason:
                self.reason = verdict.reason
                break
        assert self.checker.num_tokens == len(self.output)
        return self

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def run_text(params: SamplingParams, pieces: Sequence[str]) -> Run:
    return Run(params, [p.encode() for p in pieces]).feed(range(1, len(pieces) + 1))


@pytest.mark.parametrize("text", TEXTS)
def test_text_one_byte_at_a_time_appears_with_the_last_byte_of_each_character(text: str) -> None:
    pieces = [bytes([b]) for b in text.encode()]
    deltas = decode(pieces)
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert deltas == expected


@settings(deadline=None)
@given(text=st.one_of(st.text(), st.sampled_from(TEXTS)), cuts=st.lists(st.integers(0, 10**6), max_size=12))
def test_any_cut_of_valid_text_gives_the_text(text: str, cuts: list[int]) -> None:
    assert "".join(decode(pieces_of(text.encode(), cuts))) == text


AWKWARD = st.lists(
    st.sampled_from([*b"A\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xf0\xf1\xf3\xf4\xf5\xff"])
).map(bytes)


@settings(deadline=None, max_examples=300)
@given(data=st.one_of(st.binary(max_size=40), AWKWARD), cuts=st.lists(st.integers(0, 10**6), max_size=12))
def test_any_cut_of_any_bytes_gives_what_decode_gives_less_an_incomplete_end(data: bytes, cuts: list[int]) -> None:
    pieces = pieces_of(data, cuts)
    seen, text = b"", ""
    for piece, delta in zip(pieces, decode(pieces), strict=True):
        seen, text = seen + piece, text + delta
        assert text == without_incomplete_end(seen).decode(errors="replace")  # after every piece: nothing kept longer


def test_a_broken_character_shows_when_the_next_byte_breaks_it() -> None:
    assert decode([b"\xe4\xbd", b"A", b"\xf0\x9f"]) == ["", "\ufffdA", ""]
    assert decode([b"\xed", b"\xa0", b"\x80"]) == ["", "\ufffd\ufffd", "\ufffd"]


def test_the_end_token_is_not_output() -> None:
    run = Run(SamplingParams(), [b"a", b"b"]).feed([1, 2, EOS, 1])
    assert (run.text, run.output, run.reason) == ("ab", [1, 2], FinishReason.STOP)


def test_a_stop_id_ends_too_and_ignore_eos_spares_only_the_end_token() -> None:
    params = SamplingParams(stop_token_ids=(2,), ignore_eos=True)
    run = Run(params, [b"a", b"b"]).feed([1, EOS, 1, 2, 1])
    assert (run.text, run.output, run.reason) == ("aa", [1, EOS, 1], FinishReason.STOP)


def test_max_tokens_ends_with_the_last_token_in_the_output() -> None:
    run = Run(SamplingParams(max_tokens=2), [b"a", b"b"]).feed([1, 2, 1])
    assert (run.deltas, run.output, run.reason) == (["a", "b"], [1, 2], FinishReason.LENGTH)


def test_an_end_token_right_at_the_limit_never_comes() -> None:
    run = Run(SamplingParams(max_tokens=1), [b"a"]).feed([1, EOS])
    assert run.reason == FinishReason.LENGTH
    run = Run(SamplingParams(max_tokens=1), [b"a"]).feed([EOS])
    assert (run.reason, run.output) == (FinishReason.STOP, [])


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "konec 👍🏽", "x"])
@pytest.mark.parametrize("around", [("before ", " after"), ("", ""), ("SSTOSTO\n", "STOP")])
def test_a_stop_string_split_at_every_place_never_shows(stop: str, around: tuple[str, str]) -> None:
    text = around[0] + stop + around[1]
    data = text.encode()
    expected = text[: text.index(stop)]
    needed = len((expected + stop).encode())
    for a in range(len(data) + 1):
        for b in range(a, len(data) + 1):
            pieces = [p for p in (data[:a], data[a:b], data[b:]) if p]
            run = Run(SamplingParams(stop=(stop,)), pieces).feed(range(1, len(pieces) + 1))
            assert (run.text, run.reason) == (expected, FinishReason.STOP)
            # The tokens are kept up to the one that completed the string.
            sizes = [len(p) for p in pieces]
            assert len(run.output) == next(n for n in range(1, 4) if sum(sizes[:n]) >= needed)


def test_what_may_become_a_stop_string_is_held_and_released_when_it_cannot() -> None:
    run = run_text(SamplingParams(stop=("abcd", "cx")), ["1a", "b", "c", "c", "y", "ab"])
    assert run.deltas == ["1", "", "", "abc", "cy", ""]
    assert run.checker.flush() == "ab"
    assert run.checker.flush() == ""


@pytest.mark.parametrize("last", [EOS, 2])
def test_held_text_is_flushed_at_an_end_token_and_at_the_limit(last: int) -> None:
    run = Run(SamplingParams(stop=("END",), max_tokens=2), [b"xE", b"N"]).feed([1, last])
    assert run.deltas == (["x", "E"] if last == EOS else ["x", "EN"])
    assert run.reason == (FinishReason.STOP if last == EOS else FinishReason.LENGTH)


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    run = run_text(SamplingParams(stop=("b",), max_tokens=2), ["a", "b"])
    assert (run.text, run.reason) == ("a", FinishReason.STOP)


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    run = Run(SamplingParams(max_tokens=2, stop=("zz",)), ["ž".encode(), "ž".encode()[:1]]).feed([1, 2])
    assert (run.text, run.output) == ("ž", [1, 2])


def test_nothing_but_the_limit_ends_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=3, max_tokens=9, stop=("ab",))
    run = run_text(params, ["ab", "a", "b", "c"])
    assert (run.text, len(run.output), run.reason) == ("ab", 3, FinishReason.STOP)  # completed by the third token
    run = Run(params, [b"x"]).feed([1, EOS, 1, EOS])
    assert (run.text, run.output, run.reason) == ("xx", [1, EOS, 1], FinishReason.STOP)


def test_a_stop_string_passed_over_before_min_tokens_does_not_count_later() -> None:
    params = SamplingParams(min_tokens=2, stop=("ab", "xaby"))
    run = run_text(params, ["xab", "q", "r"])  # "xab" is held for "xaby" and holds "ab"
    assert (run.text, run.reason) == ("xabqr", None)
    run = run_text(params, ["xab", "y"])
    assert (run.text, run.reason) == ("", FinishReason.STOP)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Start of the stop string complete first, character by character; of those complete together the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_text_does_not_depend_on_the_cuts_and_holds_no_more_than_needed(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = pieces_of(text.encode(), cuts)
    run = Run(SamplingParams(stop=tuple(stops)), pieces)
    start = first_stop(text, stops)
    seen = ""
    for token, piece in enumerate(pieces, start=1):
        seen += piece.decode()
        run.feed([token])
        if run.reason:
            break
        held = seen[len(run.text) :]
        begins = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)]
        assert seen.startswith(run.text)
        assert len(held) == max(begins)
    assert (run.reason == FinishReason.STOP) == (start is not None)
    assert run.text + run.checker.flush() == (text if start is None else text[:start])
