"""A tokenizer from GGUF metadata: the vocabulary, its kind, and what its tokens mean; ids equal llama.cpp's.

Byte-level BPE, Unigram and WordPiece are models of the `tokenizers` library; what spells bytes as SentencePiece does is
merged by `Merges`. Nothing here needs a model's hyper-parameters: a file with a vocabulary only will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.merges import SPACE, Merges
from shoal.models.pretokenize import PreTokenizer, pre_tokenizer
from shoal.models.special import Special
from shoal.models.template import ChatTemplate
from shoal.models.tokenizer import END_TOKENS, SpecialTokens, Spelling, TextModel, Tokenizer, looks_like_a_marker
from shoal.models.tokenizer_json import LibraryModel

if TYPE_CHECKING:
    from shoal.models.gguf import Value

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_CHANNELS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Control tokens of gpt-oss that divide its answer: whoever parses that must see them."""

_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
"""What a file that does not say means, by kind of vocabulary ("seperator" is the format's own spelling)."""

_ADDS_BOS = ("llama", "bert", "gemma4")  # kinds whose texts begin so unless the file says otherwise


class _Vocabulary:
    """The metadata of one vocabulary, checked: `tokens` by id, their `types`, and ids with a meaning by name."""

    def __init__(self, metadata: Mapping[str, Value], path: Path) -> None:
        self.path, self.metadata = path, metadata
        self.kind = metadata.get("tokenizer.ggml.model")
        name = metadata.get("tokenizer.ggml.pre") or "default"
        self.rules = pre_tokenizer(name, path) if self.kind == "gpt2" else PreTokenizer(())
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.strings("tokens"))]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.broken("the vocabulary names a token twice", len(self.tokens), len(self.ids))
        self.types = self.numbers("token_type", np.full(len(self.tokens), _NORMAL))

    def broken(self, what: str, value: object = None, limit: object = None) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {what}", value=value, limit=limit, hint="fetch the model again")

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, tuple):
            raise self.broken(f"no tokenizer.ggml.{key}", value)
        return value

    def numbers(self, key: str, default: NDArray[np.generic] | None = None) -> NDArray[np.generic]:
        """One number for each token."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray) or value.shape != (len(self.tokens),):
            count = len(value) if isinstance(value, np.ndarray) else value
            raise self.broken(f"tokenizer.ggml.{key} does not fit the vocabulary", count, len(self.tokens))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def id(self, name: str) -> int | None:
        """The token id under `name`; one outside the vocabulary counts as absent, as in llama.cpp."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", _DEFAULT_IDS.get(str(self.kind), {}).get(name))
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def of_type(self, *types: int) -> frozenset[int]:
        return frozenset(np.flatnonzero(np.isin(self.types, types)).tolist())

    def name(self, token: int | None) -> str:
        return "" if token is None else self.tokens[token]


def tokenizer_from_metadata(metadata: Mapping[str, Value], path: Path) -> Tokenizer:
    """Build the tokenizer that the metadata of the file at `path` describes.

    Raises `UnsupportedModelError` for a kind of vocabulary or a pre-tokenizer that is not known, `ModelFormatError`
    when the vocabulary is missing or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    build = _MODELS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise UnsupportedModelError(
            f"{path}: tokenizer model {kind!r}",
            value=kind,
            limit=sorted(_MODELS),
            hint="the file must have one of " + ", ".join(sorted(_MODELS)) + "; or use a directory with tokenizer.json",
        )
    vocabulary = _Vocabulary(metadata, path)
    special = _special(vocabulary)
    try:
        model = build(vocabulary, special)
        source = metadata.get("tokenizer.chat_template")
        return Tokenizer(
            vocabulary.tokens,
            model,
            special,
            Spelling.BYTE_LEVEL if kind == "gpt2" else Spelling.METASPACE,
            ChatTemplate(
                source if isinstance(source, str) else None,
                bos_token=vocabulary.name(special.bos),
                eos_token=vocabulary.name(vocabulary.id("eos")),
            ),
            strips_leading_space=kind in ("llama", "t5", "bert") and vocabulary.flag("add_space_prefix", True),
        )
    except RecursionError as error:
        raise vocabulary.broken("special tokens that begin like each other without end") from error


def _special(vocabulary: _Vocabulary) -> SpecialTokens:
    tokens, ids = vocabulary.tokens, vocabulary.ids
    control = vocabulary.of_type(_CONTROL, _UNKNOWN)
    user_defined = vocabulary.of_type(_USER_DEFINED)
    shown = _CHANNELS | ({"<|end|>"} if {"<|return|>", "<|call|>"} <= ids.keys() else set())  # there it ends a channel
    visible = frozenset(ids[name] for name in shown if name in ids)
    # Some files type these as ordinary text. llama.cpp overrides that, but "</s>" may well occur in HTML.
    ends = {ids[name] for name in END_TOKENS - shown if name in ids}
    ends = {i for i in ends if i in control or tokens[i] != "</s>"}
    control |= ends | visible
    named = {vocabulary.id(key) for key in ("eos", "eot", "eom")}
    found = {tokens[i]: Special(i, control=True, strips_right=_strips_right(vocabulary, tokens[i])) for i in control}
    found |= {tokens[i]: Special(i, control=looks_like_a_marker(tokens[i])) for i in user_defined - control}
    eos = vocabulary.id("eos")
    last = vocabulary.id("seperator") if vocabulary.kind == "bert" else eos
    appends = vocabulary.kind == "bert" or vocabulary.flag("add_eos_token", vocabulary.kind == "t5")
    return SpecialTokens(
        eos=frozenset(i for i in ends | named if i is not None),
        bos=vocabulary.id("bos"),
        add_bos=vocabulary.flag("add_bos_token", vocabulary.kind in _ADDS_BOS or vocabulary.rules.add_bos),
        control=control - visible,
        found=found,
        literal=(user_defined - control) | visible,
        unused=vocabulary.of_type(_UNUSED) - control,
        unknown=vocabulary.id("unknown"),
        append=(last,) if appends and last is not None else (),
    )


def _strips_right(vocabulary: _Vocabulary, token: str) -> bool:
    """Whether white space after a control token is swallowed: Phi-3's tokenizer does, and its files do not say so."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    return ("phi-3" in name or "phi3" in name) and token not in ("<unk>", "<s>", "<|endoftext|>")


def _byte_level(vocabulary: _Vocabulary, special: SpecialTokens) -> TextModel:  # noqa: ARG001  (as the others)
    rules = vocabulary.rules
    merges = []
    for merge in vocabulary.strings("merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise vocabulary.broken(f"merge {merge!r} is not a pair", merge)
        merges.append((left, right))
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library has no exception types of its own
        raise vocabulary.broken(f"the merges do not fit the vocabulary ({error})") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = rules.build()
    return LibraryModel(backend)


def _sentencepiece(vocabulary: _Vocabulary, special: SpecialTokens) -> TextModel:
    scores = vocabulary.numbers("scores")
    ids = {token: i for token, i in vocabulary.ids.items() if i not in special.control}
    ranks = dict(zip(ids, np.negative(scores.astype(np.float32))[list(ids.values())].tolist(), strict=True))
    prefix = vocabulary.flag("add_space_prefix", True)
    return Merges(ids, ranks, separator="", bytes_=_bytes(vocabulary), unknown=special.unknown, prefix=prefix)


def _gemma4(vocabulary: _Vocabulary, special: SpecialTokens) -> TextModel:
    ids = {token: i for token, i in vocabulary.ids.items() if i not in special.control}
    ranks = {merge: rank for rank, merge in enumerate(vocabulary.strings("merges"))}
    return Merges(ids, ranks, separator=" ", bytes_=_bytes(vocabulary), unknown=special.unknown, newlines=True)


def _bytes(vocabulary: _Vocabulary) -> list[int | None]:
    return [vocabulary.ids.get(f"<0x{byte:02X}>", vocabulary.ids.get(chr(byte))) for byte in range(256)]


def _unigram(vocabulary: _Vocabulary, special: SpecialTokens) -> TextModel:
    scores = vocabulary.numbers("scores").astype(np.float64)
    if special.unknown is None:
        raise vocabulary.broken("a Unigram vocabulary without a token for what is unknown")
    scores[list(vocabulary.of_type(_USER_DEFINED))] = 0.0
    normal = list(vocabulary.of_type(_NORMAL))
    least = scores[normal].min() if normal else 0.0
    pieces = [
        # A control token must keep its place, but no text may spell it: it is called what no text says.
        (f"\U0010ffff{i}", least) if i in special.control else (token, score)
        for i, (token, score) in enumerate(zip(vocabulary.tokens, scores.tolist(), strict=True))
    ]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, special.unknown))
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(charsmap, np.ndarray) and charsmap.size:
        try:
            steps.append(normalizers.Precompiled(charsmap.tobytes()))
        except Exception as error:  # the library has no exception types of its own
            raise vocabulary.broken(f"a broken precompiled_charsmap ({error})") from error
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    prefix = "always" if vocabulary.flag("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=prefix, split=False)
    model = LibraryModel(backend)
    try:
        model.encode("Do the tables of the charsmap hold? \u00e9", first=True)
    except ModelFormatError as error:
        raise vocabulary.broken(f"a broken precompiled_charsmap ({error})") from error
    return model


def _word_piece(vocabulary: _Vocabulary, special: SpecialTokens) -> TextModel:
    # The file marks beginnings of words, the library what continues them.
    ids = {
        token[1:] if token.startswith(SPACE) else token if i in special.control else f"##{token}": i
        for token, i in vocabulary.ids.items()
    }
    if special.unknown is None:
        raise vocabulary.broken("a WordPiece vocabulary without a token for what is unknown")
    unknown = vocabulary.name(special.unknown)
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=1_000_000))
    lower = vocabulary.flag("normalizer.lowercase", True)
    accents = vocabulary.flag("normalizer.strip_accents", lower)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return LibraryModel(backend)


_MODELS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "t5": _unigram,
    "bert": _word_piece,
}
