"""Where a text was like its end before: the index that drafts are looked up in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

LONGEST = 16  # tokens of agreement that are counted; a longer one tells no more
_GRAMS = (4, 2)  # tokens that a table finds a place by, the longer first
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_MASK = 0xFFFFFFFF
_BULK = 24  # tokens from which on numpy takes them faster than a loop
_LEAST_BITS = 8


class Suffixes:
    """Tokens in order, and for each run of two and of four of them the place behind it where it stood last.

    Only grows. A table is open to collisions: a later run may take the slot of an earlier one, which costs a hit and
    never a wrong answer, since what is found is compared. Memory: 4 bytes a token, and two tables of 4 bytes for each
    of at most 4 slots a token: at most 36 bytes a token, 2 KB when empty.
    """

    __slots__ = ("_bits", "_tables", "mixed", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self.mixed = (0, 0)  # the hashes of the last four tokens and of the last two, as far as there are so many
        self._bits = _LEAST_BITS
        self._tables = [array("i", [-1]) * (1 << _LEAST_BITS) for _ in _GRAMS]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """One more token."""
        tokens = self.tokens
        at = len(tokens)
        if at >> self._bits:
            self._grow(at + 1)
        if at >= 2:
            # The run that ends before `at` is entered now that something follows it: a text never finds its own end.
            four, two = self.mixed
            shift = 32 - self._bits
            self._tables[1][two >> shift] = at
            if at >= 4:
                self._tables[0][four >> shift] = at
        tokens.append(token)
        self._mix(at + 1)

    def _mix(self, count: int) -> None:
        """Note the hashes of the end of `count` tokens."""
        if count >= 2:
            tokens = self.tokens
            two = tokens[-1] * 0x9E3779B1 + tokens[-2] * 0x85EBCA77
            four = two + tokens[-3] * 0xC2B2AE3D + tokens[-4] * 0x27D4EB2F if count >= 4 else 0
            self.mixed = four & _MASK, two & _MASK

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens, many at once."""
        if len(tokens) < _BULK:
            for token in tokens:
                self.append(token)
            return
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > 1 << self._bits:
            self._grow(len(self.tokens))
        else:
            self._enter(begin)
        self._mix(len(self.tokens))

    def find(self, text: Suffixes) -> tuple[int, int]:
        """The place behind the last run of tokens that agrees with the end of `text`, and how many tokens agree.

        (-1, 0) when there is none. The place is that of a token. `text` may be this one.
        """
        shift, count = 32 - self._bits, len(text.tokens)
        for table, mixed, gram in zip(self._tables, text.mixed, _GRAMS, strict=True):
            at = table[mixed >> shift] if count >= gram else -1
            if at >= 0:
                length = self._agreement(at, text.tokens)
                if length >= gram:
                    return at, length
        return -1, 0

    def _agreement(self, at: int, tail: array[int]) -> int:
        """How many tokens before `at` are those at the end of `tail`, at most LONGEST."""
        tokens = self.tokens
        most = min(LONGEST, at, len(tail))
        for count in range(most):
            if tokens[at - 1 - count] != tail[-1 - count]:
                return count
        return most

    def _grow(self, needed: int) -> None:
        self._bits = max(needed - 1, 1).bit_length() + 1
        self._tables = [array("i", [-1]) * (1 << self._bits) for _ in _GRAMS]
        self._enter(0)

    def _enter(self, begin: int) -> None:
        """Enter every run that ends before a token from place `begin` on."""
        tokens = np.frombuffer(self.tokens, np.int32).astype(np.uint32)
        for table, gram in zip(self._tables, _GRAMS, strict=True):
            first = max(begin, gram)  # place of the first token with a whole run before it
            if first >= len(tokens):
                continue
            mixed = np.zeros(len(tokens) - first, np.uint32)
            for back in range(gram):
                mixed += tokens[first - 1 - back : len(tokens) - 1 - back] * np.uint32(_FACTORS[back])
            slots = mixed >> np.uint32(32 - self._bits)
            np.frombuffer(table, np.int32)[slots] = np.arange(first, len(tokens), dtype=np.int32)
