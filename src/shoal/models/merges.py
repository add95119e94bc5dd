"""Byte-pair merging over characters, for vocabularies that spell bytes as SentencePiece does.

The `tokenizers` library has such a model too, but it wants every merge as a pair of strings: for a SentencePiece
vocabulary of 262,144 pieces they would first have to be found, which takes seconds, and pieces of equal score would be
merged in another order. Here the scores themselves are the ranks: the best first, of equal ones the leftmost, as
llama.cpp does it. Words are merged once and remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

SPACE = "\u2581"  # how the strings of such a vocabulary write a space

_MAX_WORDS = 50_000
_MAX_WORD_CHARS = 64  # longer ones are hardly ever seen twice


class Merges:
    """Ids of plain text, without special tokens.

    ids      token id of each string that merging may end with
    ranks    left + separator + right of each pair that may be merged -> its rank, lowest first
    bytes_   the 256 ids of single bytes, for characters that are no token; None where the vocabulary has none
    unknown  the id for what cannot be spelt at all; None leaves it out
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        ranks: Mapping[str, float],
        *,
        separator: str,
        bytes_: Sequence[int | None],
        unknown: int | None,
        prefix: bool = False,
        newlines: bool = False,
    ) -> None:
        self._ids, self._ranks, self._separator = ids, ranks, separator
        self._bytes, self._unknown = bytes_, unknown
        self._prefix, self._newlines = prefix, newlines
        self._cut = _cut_pattern(ids)
        self._known: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, first: bool) -> list[int]:  # noqa: ARG002  (here all pieces are alike)
        """Ids of `text`. `prefix`: a space is put before it; `newlines`: runs of them are words of their own."""
        text = text.replace(" ", SPACE)
        if self._prefix:
            text = SPACE + text
        out: list[int] = []
        for line in re.findall(r"\n+|[^\n]+", text) if self._newlines else (text,):
            if self._newlines and line[0] == "\n" and line in self._ids:
                out.append(self._ids[line])
                continue
            for word in self._cut.split(line):
                out += self._word(word)
        return out

    def _word(self, word: str) -> tuple[int, ...]:
        known = self._known.get(word)
        if known is None:
            known = tuple(self._spell(self._merge(word)))
            if len(word) <= _MAX_WORD_CHARS:
                if len(self._known) >= _MAX_WORDS:
                    self._known.clear()
                self._known[word] = known
        return known

    def _merge(self, word: str) -> list[str]:
        """`word` in pieces that no pair can be merged of. n log n in its length."""
        parts, ranks, separator = list(word), self._ranks, self._separator
        count = len(parts)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap = []
        for left in range(count - 1):
            rank = ranks.get(f"{parts[left]}{separator}{parts[left + 1]}")
            if rank is not None:
                heap.append((rank, left, left + 1, 2))
        heapify(heap)
        while heap:
            _, left, right, size = heappop(heap)
            if not parts[left] or len(parts[left]) + len(parts[right]) != size or not parts[right]:
                continue  # one of the two has been merged with another since
            parts[left] += parts[right]
            parts[right] = ""
            end = after[left] = after[right]
            if end < count:
                before[end] = left
            for a, b in ((before[left], left), (left, end)):
                if a >= 0 and b < count:
                    rank = ranks.get(f"{parts[a]}{separator}{parts[b]}")
                    if rank is not None:
                        heappush(heap, (rank, a, b, len(parts[a]) + len(parts[b])))
        return [part for part in parts if part]

    def _spell(self, parts: Iterable[str]) -> Iterable[int]:
        for part in parts:
            token = self._ids.get(part)
            if token is not None:
                yield token
                continue
            for byte in part.encode():
                token = self._bytes[byte]
                token = self._unknown if token is None else token
                if token is not None:
                    yield token


def _cut_pattern(ids: Mapping[str, int]) -> re.Pattern[str]:
    """Where a text may be cut without changing what is merged: before a space that no token has inside.

    Some vocabularies have a few tokens with a space inside (">\u2581</"): before those spaces nothing is cut.
    """
    inside = set(re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(ids)))
    keep = "".join(map(re.escape, sorted(inside | {SPACE})))
    return re.compile(f"(?<=[^{keep}])(?={SPACE})")
