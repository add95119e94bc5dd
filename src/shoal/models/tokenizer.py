"""Text to token ids and back, from GGUF metadata or from a directory's `tokenizer.json`.

The `tokenizers` library does the work. What is here is the mapping of GGUF's metadata to it (in `pretokenize`), which
tokens end a generation, and the exact bytes of each token, which streaming and grammar masks need.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.gguf import GgufModel, Value
from shoal.models.pretokenize import pre_tokenizer
from shoal.models.template import ChatTemplate

END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Control tokens that end a turn under whatever id: files often name only one of the two or three a model uses."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character to byte: printable Latin-1 stands for itself, the rest is moved to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_ALPHABET = _byte_alphabet()


class Spelling(Enum):
    """How the strings of the vocabulary spell bytes."""

    BYTE_LEVEL = "byte-level"  # each character is one byte in GPT-2's alphabet
    METASPACE = "metaspace"  # as SentencePiece: U+2581 is a space, <0xAB> is a byte, the rest is UTF-8


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning. `control` are invisible in text (b""); `literal` tokens spell themselves in UTF-8,
    `unused` ones nothing. `append` goes after a text that gets its special tokens."""

    eos: frozenset[int]
    bos: int | None
    add_bos: bool
    control: frozenset[int]
    literal: frozenset[int] = frozenset()
    unused: frozenset[int] = frozenset()
    append: tuple[int, ...] = ()


class Tokenizer:
    """Token ids of one vocabulary. `token_bytes` joined over `encode(text)` gives back the bytes of `text`.

    May be shared between threads. Leaves stop strings and characters split over tokens to the caller.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
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
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._backend = backend
        self._special = special
        self._spelling = spelling
        self._strips = strips_leading_space
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special` puts the beginning-of-sequence token first where the model wants one.

        With `parse_special`, control tokens spelt out in the text become those tokens, as in llama.cpp's completion;
        without it they are ordinary text (user-defined tokens are found either way). Lone surrogates become U+FFFD.
        """
        if not _encodable(text):  # the library takes UTF-8 only; JSON can smuggle in half a surrogate pair
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self._lock:  # the switch is state of the shared backend
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if not add_special:
            return ids
        head = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return [*head, *ids, *self._special.append]

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template: special tokens parsed, and the beginning token there exactly once.

        Special tokens that a user spelt out in a message are parsed as well: the text no longer tells them apart.
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
        text = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None or token in self._special.unused or (token in self.special_ids and not special):
            return b""
        if token in self.special_ids or token in self._special.literal:
            return text.encode()
        if self._spelling is Spelling.METASPACE:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes((int(text[3:5], 16),))
            return text.replace("\u2581", " ").encode()
        try:
            return bytes([_ALPHABET[c] for c in text])
        except KeyError:  # a token outside the byte alphabet can only stand for itself
            return text.encode()

    def token_id(self, text: str) -> int | None:
        """Id of the token spelt `text` in the vocabulary ("<|im_end|>"), or None."""
        return self._backend.token_to_id(text)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tokenizer_from_gguf(model: GgufModel) -> Tokenizer:
    """Build the tokenizer that the metadata of `model` describes; ids equal llama.cpp's.

    Raises `UnsupportedModelError` for anything but byte-level BPE with a known pre-tokenizer, `ModelFormatError`
    when the vocabulary is missing or contradicts itself.
    """
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{model.path}: tokenizer model {kind!r}",
            value=kind,
            limit="gpt2",
            hint="only byte-level BPE is read from GGUF; use a directory with a tokenizer.json",
        )
    rules = pre_tokenizer(model.metadata.get("tokenizer.ggml.pre") or "default", model.path)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_strings(model, "tokenizer.ggml.tokens"))]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _broken(model.path, "the vocabulary names a token twice", len(tokens), len(vocab))
    merges = []
    for merge in _strings(model, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise _broken(model.path, f"merge {merge!r} is not a pair", merge)
        merges.append((left, right))
    try:
        backend = tokenizers.Tokenizer(BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    except Exception as error:  # the library has no exception types of its own
        raise _broken(model.path, f"the merges do not fit the vocabulary ({error})") from error
    backend.pre_tokenizer = rules.build()
    special = _gguf_special(model, tokens, vocab, add_bos=rules.add_bos)
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(special.control)])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(special.literal)])
    template = ChatTemplate(model.chat_template, bos_token=_name(tokens, special.bos), eos_token=_eos(model, tokens))
    return Tokenizer(backend, special, Spelling.BYTE_LEVEL, template)


def _broken(path: Path, what: str, value: object = None, limit: object = None) -> ModelFormatError:
    return ModelFormatError(f"{path}: {what}", value=value, limit=limit, hint="fetch the model again")


def _strings(model: GgufModel, key: str) -> tuple[str, ...]:
    value = model.metadata.get(key)
    if not isinstance(value, tuple):
        raise _broken(model.path, f"no {key}", value)
    return value


def _id(metadata: Mapping[str, Value], key: str, limit: int) -> int | None:
    """The token id under `key`; one outside the vocabulary counts as absent, as in llama.cpp."""
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return value if isinstance(value, int) and 0 <= value < limit else None


def _name(tokens: list[str], token: int | None) -> str:
    return "" if token is None else tokens[token]


def _eos(model: GgufModel, tokens: list[str]) -> str:
    return _name(tokens, _id(model.metadata, "eos", len(tokens)))


def _gguf_special(model: GgufModel, tokens: list[str], vocab: dict[str, int], *, add_bos: bool) -> SpecialTokens:
    metadata = model.metadata
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(len(tokens), _NORMAL)
    if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
        count = len(types) if isinstance(types, np.ndarray) else types
        raise _broken(model.path, "tokenizer.ggml.token_type does not fit the vocabulary", count, len(tokens))
    control = {int(i) for i in np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN))}
    # Some files type these as ordinary text. llama.cpp overrides that, but "</s>" may well occur in HTML.
    named = {vocab[name] for name in END_TOKENS if name in vocab}
    named = {i for i in named if i in control or tokens[i] != "</s>"}
    control |= named
    ends = {_id(metadata, key, len(tokens)) for key in ("eos", "eot", "eom")} - {None}
    eos = _id(metadata, "eos", len(tokens))
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    return SpecialTokens(
        eos=frozenset(i for i in ends | named if i is not None),
        bos=_id(metadata, "bos", len(tokens)),
        add_bos=flag if isinstance(flag, bool) else add_bos,
        control=frozenset(control),
        literal=frozenset(int(i) for i in np.flatnonzero(types == _USER_DEFINED)) - control,
        unused=frozenset(int(i) for i in np.flatnonzero(types == _UNUSED)) - control,
        append=(eos,) if metadata.get("tokenizer.ggml.add_eos_token") is True and eos is not None else (),
    )


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Build the tokenizer of a model directory: `tokenizer.json`, beside it the configs and the chat template.

    Raises `ModelFormatError` when a file is missing or malformed, `UnsupportedModelError` when the vocabulary spells
    bytes neither as byte-level BPE nor as SentencePiece does.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise _broken(path, "no tokenizer.json", str(file))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no exception types of its own
        raise _broken(file, f"not a tokenizer ({error})", str(file)) from error
    backend.no_truncation()  # a file may carry the limits of somebody's training run
    backend.no_padding()
    config = _json(path / "tokenizer_config.json")
    spelling, strips = _spelling(path, backend)
    special = _directory_special(path, backend, config)
    template = ChatTemplate(
        _directory_template(path, config),
        bos_token=_content(config.get("bos_token")) or "",
        eos_token=_content(config.get("eos_token")) or "",
    )
    return Tokenizer(backend, special, spelling, template, strips_leading_space=strips)


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, f"not readable as JSON ({error})", str(path)) from error
    if not isinstance(value, dict):
        raise _broken(path, "not a JSON object", str(path))
    return value


def _content(token: object) -> str | None:
    """A token in a config is its text, or an object with its text under "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _spelling(path: Path, backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How tokens spell bytes, and whether decoding removes the space before a text; read off the decoder."""
    config = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = {step["type"]: step for step in config.get("decoders", [config]) if "type" in step}
    if "ByteLevel" in steps:
        return Spelling.BYTE_LEVEL, False
    if steps.keys() & {"Metaspace", "ByteFallback"}:
        prepends = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return Spelling.METASPACE, prepends or "Strip" in steps
    raise UnsupportedModelError(
        f"{path}: tokens are decoded by {sorted(steps) or 'nothing'}",
        value=sorted(steps),
        limit="ByteLevel, Metaspace or ByteFallback",
        hint="only byte-level BPE and SentencePiece vocabularies are supported",
    )


def _directory_special(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> SpecialTokens:
    added = backend.get_added_tokens_decoder()
    control = frozenset(i for i, token in added.items() if token.special)
    ends = {i for i in control if added[i].content in END_TOKENS}
    for source in (_json(path / "generation_config.json"), _json(path / "config.json")):
        value = source.get("eos_token_id")
        ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    eos, bos = _content(config.get("eos_token")), _content(config.get("bos_token"))
    ends |= {i for i in [backend.token_to_id(eos) if eos else None] if i is not None}
    around = backend.encode("", add_special_tokens=True).ids  # what the post-processor puts around any text
    bos_id = backend.token_to_id(bos) if bos else (around[0] if around and around[0] not in ends else None)
    leads = bool(around) and around[0] == bos_id
    flag = config.get("add_bos_token")
    return SpecialTokens(
        eos=frozenset(ends),
        bos=bos_id,
        add_bos=flag if isinstance(flag, bool) else leads,
        control=control,
        literal=frozenset(added) - control,
        append=tuple(around[1:] if leads else around),
    )


def _directory_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _broken(file, f"not readable ({error})", str(file)) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one for plain chat
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
