"""Text to token ids and back, in the ids of one vocabulary.

Where vocabularies come from is elsewhere: GGUF metadata (`vocabulary`), a directory's `tokenizer.json`
(`tokenizer_json`). Here special tokens are found in a text, the rest is handed to the vocabulary's own model, and each
token is given its exact bytes, which streaming and grammar masks need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol

from shoal.models.merges import SPACE
from shoal.models.special import Special, SpecialFinder
from shoal.models.template import ChatTemplate
from shoal.models.traced import Traced

END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<EOT>",
        "[EOT]",
        "[e~[",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Control tokens that end a turn under whatever id: files often name only one of the two or three a model uses."""

_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SURROGATES = re.compile("[\ud800-\udfff]")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character to byte: printable Latin-1 stands for itself, the rest is moved to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_ALPHABET = _byte_alphabet()


class TextModel(Protocol):
    """What turns plain text into ids. Thread-safe; knows no special tokens."""

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Ids of a piece of text; `first`: it begins the whole text, where others come after a special token."""
        ...


class Spelling(Enum):
    """How the strings of the vocabulary spell bytes."""

    BYTE_LEVEL = "byte-level"  # each character is one byte in GPT-2's alphabet
    METASPACE = "metaspace"  # as SentencePiece: U+2581 is a space, <0xAB> is a byte, the rest is UTF-8


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning. `control` are invisible in text (b""); `literal` tokens spell themselves in UTF-8,
    `unused` ones nothing. `found` are searched for in a text before the rest of it is tokenised. `unknown` stands for
    what the vocabulary cannot spell. `append` goes after a text that gets its special tokens."""

    eos: frozenset[int]
    bos: int | None
    add_bos: bool
    control: frozenset[int]
    found: Mapping[str, Special]
    literal: frozenset[int] = frozenset()
    unused: frozenset[int] = frozenset()
    unknown: int | None = None
    append: tuple[int, ...] = ()


class Tokenizer:
    """Token ids of one vocabulary. `token_bytes` joined over `encode(text)` gives back the bytes of `text`.

    May be shared between threads. Leaves stop strings and characters split over tokens to the caller.
    """

    def __init__(
        self,
        texts: Sequence[str | None],
        model: TextModel,
        special: SpecialTokens,
        spelling: Spelling,
        chat_template: ChatTemplate,
        *,
        strips_leading_space: bool = False,
    ) -> None:
        self.chat_template = chat_template
        self.special_ids: frozenset[int] = special.control
        self.eos_ids: frozenset[int] = special.eos
        self.bos_id: int | None = special.bos
        self.add_bos: bool = special.add_bos
        self.vocab_size: int = len(texts)
        self._texts, self._model, self._special = texts, model, special
        self._finder = SpecialFinder(special.found)
        # What plain text must never come to, even if a vocabulary can merge its letters into it.
        self._barred = {found.id for found in special.found.values() if found.control} - {special.unknown}
        self._spelling = spelling
        self._strips = strips_leading_space

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special` puts the beginning-of-sequence token first where the model wants one.

        With `parse_special`, control tokens spelt out in the text become those tokens, as in llama.cpp's completion,
        unless the text is `Traced` and it is content that spells them; without it they are ordinary text
        (user-defined tokens are found either way). Lone surrogates become U+FFFD.
        """
        ids: list[int] = []
        for piece in self._finder.cut(_encodable(text), control=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._plain(piece, first=not ids)
        if not add_special:
            return ids
        head = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return [*head, *ids, *self._special.append]

    def _plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of text without special tokens: none of them a control token, whatever the text spells."""
        ids = self._model.encode(text, first=first)
        if self._barred.isdisjoint(ids):
            return ids
        if len(text) < 2:
            return [token for token in ids if token not in self._barred]
        middle = len(text) // 2  # cut it until no piece spells one
        return self._plain(text[:middle], first=first) + self._plain(text[middle:], first=False)

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template: its special tokens parsed, and the beginning token there exactly once.

        What `ChatTemplate.render` returns knows what came from messages and tools: that is text, whatever it spells.
        """
        ids = self.encode(rendered, add_special=False)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Control tokens are left out unless `special`.

        The space that SentencePiece puts before a text is removed: decode(encode(x)) == x.
        """
        text = b"".join(self.token_bytes(i, special=special) for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips else text

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The exact bytes that `token` adds to the text, possibly part of a character.

        Empty for control tokens (their name with `special`) and for ids without a token: the rows that pad an
        embedding can be sampled too.
        """
        text = self._texts[token] if 0 <= token < len(self._texts) else None
        if text is None or token in self._special.unused or (token in self.special_ids and not special):
            return b""
        if token in self.special_ids or token in self._special.literal:
            return text.encode()
        if self._spelling is Spelling.METASPACE:
            if _BYTE.fullmatch(text):
                return bytes((int(text[3:5], 16),))
            return text.replace(SPACE, " ").encode()
        try:
            return bytes([_ALPHABET[c] for c in text])
        except KeyError:  # a token outside the byte alphabet can only stand for itself
            return text.encode()

    def token_id(self, text: str) -> int | None:
        """Id of the token spelt `text` in the vocabulary ("<|im_end|>"), or None."""
        return self._ids_by_text.get(text)

    @cached_property
    def _ids_by_text(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self._texts) if text is not None}


def looks_like_a_marker(text: str) -> bool:
    """Whether a token is a control token by its form, `<|...|>`: older files list many of those as ordinary ones."""
    return _MARKER.fullmatch(text) is not None


def _encodable(text: str) -> str:
    """`text` without half surrogate pairs: JSON can smuggle them in, and they have no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if isinstance(text, Traced):  # one character for one, so that it stays traced
            return Traced(_SURROGATES.sub("\ufffd", text), text._content)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
