"""Where a text was like its end before: the index that drafts are looked up in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

LONGEST = 16  # tokens of agreement that are counted; a longer one tells no more
_LAST, _BEFORE, _PAIR = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D  # factors of a token, the one before it, the pair before
_MASK = 0xFFFFFFFF
_BULK = 24  # tokens from which on numpy takes them faster than a loop
_LEAST_BITS = 8


class Suffixes:
    """Tokens in order, and for each run of two and of four of them the place behind it where it stood last.

    Only grows. Taking tokens in (`extend`) finds at once where the new end stood before, since the slot that is read is
    the slot that is written; what is only put behind (`add`) is entered when somebody looks. A table is open to
    collisions: a later run may take the slot of an earlier one, which costs a hit and never a wrong answer, since what
    is found is compared. Memory: 4 bytes a token, and two tables of 4 bytes for each of at most 4 slots a token: at
    most 36 bytes a token, 2 KB when empty.
    """

    __slots__ = (
        "_before", "_entered", "_four", "_fours", "_room", "_seen_four", "_seen_two", "_shift", "_two", "_twos",
        "tokens",
    )  # fmt: skip

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._two = self._four = self._before = 0  # hashes of the last two tokens, of four, of two before the last
        self._seen_two = self._seen_four = -1  # where the last two and the last four may have stood before
        self._entered = 0  # tokens of the text that the tables know
        self._make(max(_LEAST_BITS, (len(tokens) - 1).bit_length() + 1))
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def _make(self, bits: int) -> None:
        self._room, self._shift = 1 << bits, 32 - bits
        nowhere = b"\xff\xff\xff\xff" * self._room
        self._twos, self._fours = array("i", nowhere), array("i", nowhere)

    def add(self, tokens: Sequence[int]) -> None:
        """Put more tokens behind, of a text that takes none in: it is there for others to find."""
        self.tokens.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in more tokens: one or a few, or a whole text."""
        text = self.tokens
        if len(tokens) >= _BULK or len(text) + len(tokens) > self._room:
            text.extend(tokens[:-1])
            tokens = tokens[-1:]
            self._enter(len(text) + len(tokens))
        count, shift, twos, fours = len(text), self._shift, self._twos, self._fours
        last = text[-1] if count else 0
        before, two = self._before, self._two
        for token in tokens:
            count += 1
            new = (token * _LAST + last * _BEFORE) & _MASK
            four = (new + before * _PAIR) & _MASK
            before, two, last = two, new, token
            slot = new >> shift
            self._seen_two = twos[slot]
            twos[slot] = count
            slot = four >> shift
            self._seen_four = fours[slot]
            fours[slot] = count
            self._four = four
        text.extend(tokens)
        self._entered, self._before, self._two = count, before, two

    def find(self, text: Suffixes) -> tuple[int, int]:
        """The place behind the last run of tokens that agrees with the end of `text`, and how many tokens agree.

        (-1, 0) when there is none. The place is that of a token. `text` may be this one, which does not find its end.
        """
        tokens = self.tokens
        if text is self:
            four, two = self._seen_four, self._seen_two
        else:
            if self._entered < len(tokens):
                self._enter(len(tokens))
            four, two = self._fours[text._four >> self._shift], self._twos[text._two >> self._shift]
        if 4 <= four < len(tokens):
            length = _agreement(tokens, four, text.tokens)
            if length >= 4:
                return four, length
        if 2 <= two < len(tokens):
            length = _agreement(tokens, two, text.tokens)
            if length >= 2:
                return two, length
        return -1, 0

    def _enter(self, room: int) -> None:
        """Enter what is not yet in the tables, which are made anew where `room` tokens are too many for them."""
        if room > self._room:
            self._make((room - 1).bit_length() + 1)
            self._entered = 0
        begin, self._entered = self._entered, len(self.tokens)
        first = max(begin - 3, 0)
        tokens = np.frombuffer(self.tokens, np.int32)[first:].astype(np.uint32)
        twos = tokens[1:] * np.uint32(_LAST) + tokens[:-1] * np.uint32(_BEFORE)  # [i]: ends with token i + 1
        fours = twos[2:] + twos[:-2] * np.uint32(_PAIR)  # [i]: ends with token i + 3
        shift = np.uint32(self._shift)
        for table, mixed, gram in ((self._twos, twos, 2), (self._fours, fours, 4)):
            skipped = max(begin - first - gram + 1, 0)  # they end before, and are entered
            slots = mixed[skipped:] >> shift
            begins = first + skipped + gram
            np.frombuffer(table, np.int32)[slots] = np.arange(begins, begins + len(slots), dtype=np.int32)
        if len(twos) > 1:
            self._before, self._two = twos[-2:].tolist()


def _agreement(tokens: array[int], at: int, tail: array[int]) -> int:
    """How many tokens before `at` are those at the end of `tail`, at most LONGEST."""
    most = min(LONGEST, at, len(tail))
    for count in range(1, most + 1):
        if tokens[at - count] != tail[-count]:
            return count - 1
    return most
