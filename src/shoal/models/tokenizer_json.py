"""A tokenizer from a model directory: `tokenizer.json`, the configs beside it, and the chat template.

The `tokenizers` library reads the file and tokenises; special tokens are found by `Tokenizer`, which knows where in a
text they may stand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from shoal.errors import ModelFormatError, UnsupportedModelError
from shoal.models.merges import SPACE
from shoal.models.special import Special
from shoal.models.template import ChatTemplate
from shoal.models.tokenizer import END_TOKENS, SpecialTokens, Spelling, Tokenizer, looks_like_a_marker


class LibraryModel:
    """A tokenizer of the `tokenizers` library as a `TextModel`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True  # they are found before, by `Tokenizer`
        self._backend = backend
        self._space_first = _take_first_space(backend)
        added = backend.get_added_tokens_decoder().values()
        self._spaceless = (" ", SPACE, *(token.content for token in added if not token.special))

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Ids of a piece of plain text. Raises `ModelFormatError` when the vocabulary's own tables lead nowhere."""
        if first and self._space_first and not text.startswith(self._spaceless):
            text = " " + text
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # a panic of the library is no `Exception`, and would end the thread
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelFormatError(f"the tokenizer is broken ({error})", hint="fetch the model again") from None
        return ids


def _take_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether a space is put before a text, but not before pieces after special tokens: taken over from the library,
    which gets each piece alone and would take it for the first."""
    step = backend.pre_tokenizer
    if not isinstance(step, pre_tokenizers.Metaspace) or step.prepend_scheme != "first":
        return False
    backend.pre_tokenizer = pre_tokenizers.Metaspace(step.replacement, prepend_scheme="never", split=step.split)
    return True


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
    texts: list[str | None] = [None] * (1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1))
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        texts[token] = text
    return Tokenizer(texts, LibraryModel(backend), special, spelling, template, strips_leading_space=strips)


def _broken(path: Path, what: str, value: object) -> ModelFormatError:
    return ModelFormatError(f"{path}: {what}", value=value, hint="fetch the model again")


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
    found = {
        token.content: Special(i, True, token.lstrip, token.rstrip, token.single_word)
        for i, token in added.items()
        if token.special or looks_like_a_marker(token.content)
    }
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
        found=found,
        unknown=backend.token_to_id(getattr(backend.model, "unk_token", None) or ""),
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
