"""Special tokens in a text: found by their spelling, but only where they may stand."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shoal.models.traced import content_of, plain


@dataclass(frozen=True, slots=True)
class Special:
    """One token that is found before the rest of the text is tokenised.

    `control`: means something to the model beyond its letters (the end of a turn), and is found only in text that may
    speak for the template. The others are found anywhere. `strips_left`, `strips_right`: white space beside it is
    swallowed. `whole_word`: not found inside of a word.
    """

    id: int
    control: bool
    strips_left: bool = False
    strips_right: bool = False
    whole_word: bool = False


class SpecialFinder:
    """Cuts texts at special tokens: the leftmost first, of those that begin there the longest."""

    def __init__(self, specials: Mapping[str, Special]) -> None:
        self._specials = specials
        self._all = _any_of(specials)
        self._plain = _any_of([text for text, special in specials.items() if not special.control])

    def cut(self, text: str, *, control: bool) -> Iterator[str | int]:
        """`text` as pieces of plain text and ids of special tokens, in order. No piece is empty.

        Without `control`, or where a character is content (see `Traced`), control tokens are plain text.
        """
        content = content_of(text) if control else b""
        text = plain(text)
        pattern = self._all if control else self._plain
        done = position = 0
        while pattern is not None and (match := pattern.search(text, position)) is not None:
            start, end = match.span()
            special = self._specials[match[0]]
            if special.control and b"\1" in content[start:end]:  # somebody's text that spells it, or a part of it
                match = self._plain.match(text, start) if self._plain is not None else None
                if match is None:
                    position = start + 1
                    continue
                end, special = match.end(), self._specials[match[0]]
            if special.whole_word and (_is_word(text, start - 1) or _is_word(text, end)):
                position = start + 1
                continue
            before = text[done:start]
            if special.strips_left:
                before = before.rstrip()
            if before:
                yield before
            yield special.id
            while special.strips_right and end < len(text) and text[end].isspace():
                end += 1
            done = position = end
        if done < len(text):
            yield text[done:]


def _is_word(text: str, index: int) -> bool:
    return 0 <= index < len(text) and (text[index].isalnum() or text[index] == "_")


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Matches the longest of `texts`, or None without any.

    A tree of their letters: a vocabulary may have thousands that begin alike, and one would try them in turn.
    """
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_expression(tree)) if tree else None


def _expression(tree: dict[str, dict]) -> str:  # type: ignore[type-arg]
    ends = "" in tree
    branches = []
    for letter, below in tree.items():
        if letter:
            run = re.escape(letter)
            while len(below) == 1 and "" not in below:  # no fork: no group, and no deeper nesting
                letter, below = next(iter(below.items()))
                run += re.escape(letter)
            branches.append(run + _expression(below))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}"
