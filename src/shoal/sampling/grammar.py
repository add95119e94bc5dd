"""JSON schemas, regular expressions and Lark grammars as masks over the vocabulary.

    SamplingParams -> GrammarCompiler.compile -> Grammar, shared by requests -> start -> Constraint, one per request

The `llguidance` library does the parsing. What is here: what is refused and why, white space in JSON, limits, and the
masks as numbers to add to a row of logits, filled on a thread of their own while the device computes.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BackendError, InvalidRequestError
from shoal.sampling.schema import check_schema, may_hold_lists, translated
from shoal.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_TEXT = 200_000  # characters of a regular expression, a grammar, or a schema as JSON
_KEPT = 128  # compiled grammars per model, and at most that many characters of their sources:
_KEPT_TEXT = 2 * MAX_TEXT  # a compiled character takes up to 70 bytes
LIST_SPACE = "(?: )?"


def json_options(*schemas: Mapping[str, Any]) -> JsonCompileOptions:
    """How the JSON of a grammar is laid out: with one space between its parts where it may hold lists, else with none.

    Where no space may stand a small model closes its lists at once, and line breaks cost twice the tokens for the same
    items (`scripts/json_space.py`). All parts of a grammar must agree: the library fails over one that has both. A
    schema's own `x-guidance` must not change that, nor make separators of its own.
    """
    return {
        "whitespace_flexible": False,
        "whitespace_pattern": LIST_SPACE if any(map(may_hold_lists, schemas)) else None,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": False,
    }


# Eight bits of a mask as what to add to eight logits: a fifth of the time of unpacking them all.
_BIAS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)


class Vocabulary(Protocol):
    """What masks need of a tokenizer."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an output."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""
        ...


class _Kind(Enum):
    """What the values of a mask are."""

    FORBIDDEN = "forbidden"  # the tokens that may not come
    ALLOWED = "allowed"  # those that may
    BIAS = "bias"  # what to add to the logits, [V]


class _Mask(NamedTuple):
    """A mask as it is used: where few tokens differ from the rest, these, for a pass over V numbers costs more.

    After a forward pass nothing is in the cache, so that the bytes read are what counts.
    """

    kind: _Kind
    values: NDArray[Any]


def _mask_of(data: NDArray[np.uint8], vocab_size: int) -> _Mask:
    """A mask from one bit per token, uint8 [V / 8]."""
    few = max(vocab_size // 128, 8)  # bytes
    other = np.flatnonzero(data != 255)
    if len(other) <= few:
        return _Mask(_Kind.FORBIDDEN, _tokens(~data[other], other, vocab_size))
    some = np.flatnonzero(data)
    if len(some) <= few:
        return _Mask(_Kind.ALLOWED, _tokens(data[some], some, vocab_size))
    return _Mask(_Kind.BIAS, _BIAS[data].reshape(-1)[:vocab_size])


def _tokens(data: NDArray[np.uint8], places: NDArray[np.intp], vocab_size: int) -> NDArray[np.intp]:
    """The tokens whose bits are set in the bytes at `places`."""
    bits = np.flatnonzero(np.unpackbits(data, bitorder="little").view(np.bool_))
    tokens: NDArray[np.intp] = places[bits >> 3] * 8 + (bits & 7)
    return tokens[: np.searchsorted(tokens, vocab_size)]


class Constraint:
    """Where one output stands in its grammar.

    `fill` computes which tokens may come next, `mask` applies that, `accept` moves on. After an `error` nothing is
    allowed any more and the row has no token to choose.
    """

    def __init__(self, matcher: LLMatcher, eos: int, vocab_size: int) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._eos = eos
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), np.int32)
        self._mask = _Mask(_Kind.BIAS, np.zeros(0, np.float32))

    def fill(self) -> None:
        """Work out the mask of the next token; on any thread, while nobody else uses this constraint."""
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            words.fill(0)
        self._mask = _mask_of(words.view(np.uint8), self._vocab_size)

    def mask(self, z: NDArray[np.float32]) -> None:
        """Put -inf on every token that may not come next. `z` is float32 [V], changed in place."""
        kind, values = self._mask
        if kind is _Kind.FORBIDDEN:
            z[values] = -np.inf
        elif kind is _Kind.ALLOWED:
            kept = z[values]
            z.fill(-np.inf)
            z[values] = kept
        else:
            np.add(z, values, out=z)

    def allows(self, token: int) -> bool:
        """Whether a token may come next, by the mask."""
        return bool(self._words.view(np.uint8)[token >> 3] >> (token & 7) & 1)

    def accept(self, token: int) -> None:
        """Move on by a token of the output."""
        if not self._matcher.consume_token(token):
            self.error = self._matcher.get_error()

    def take_forced(self) -> tuple[int, ...]:
        """Move on by the tokens that must follow, and give them; the end token is the last where nothing else can."""
        matcher = self._matcher
        if self.error is not None or matcher.is_stopped():
            return self._end()
        forced: list[int] = matcher.compute_ff_tokens()
        if forced and not matcher.consume_tokens(forced):
            self.error = matcher.get_error()
            return ()
        return (*forced, *self._end()) if matcher.is_stopped() else tuple(forced)

    def _end(self) -> tuple[int, ...]:
        return () if self.error is not None or self._matcher.stop_reason() == "EndOfSentence" else (self._eos,)


class Grammar:
    """A compiled grammar. Thread-safe."""

    def __init__(self, matcher: LLMatcher, eos: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._eos = eos
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def start(self) -> Constraint:
        """A fresh place at its beginning."""
        with self._lock:
            return Constraint(self._matcher.deep_copy(), self._eos, self._vocab_size)


class GrammarCompiler:
    """Compiles the grammars of requests for one vocabulary, and fills masks. Thread-safe.

    The tables of the vocabulary (a quarter of a second) are made for the first request that has a grammar.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._filler: ThreadPoolExecutor | None = None

    def compile(self, sampling: SamplingParams) -> Grammar:
        """The grammar of a request. InvalidRequestError names the field and says what in it cannot be honoured."""
        param, source = _source(sampling)
        key = f"{param}:{source}"
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known
            tokenizer = self._tokenizer or self._load()
        grammar = Grammar(_build(param, source, tokenizer), min(self._vocabulary.eos_ids), self._vocab_size)
        with self._lock:
            self._compiled[key] = grammar
            while len(self._compiled) > _KEPT or sum(map(len, self._compiled)) > _KEPT_TEXT:
                self._compiled.popitem(last=False)
        return grammar

    def warm(self) -> None:
        """Make the tables of the vocabulary now."""
        with self._lock:
            if self._tokenizer is None:
                self._load()

    def begin_fill(self, constraints: Sequence[Constraint]) -> Future[None]:
        """Fill the masks of these on another thread; wait for the future before they are used otherwise."""
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, thread_name_prefix="shoal-masks")
        return self._filler.submit(_fill, constraints)

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise BackendError("llguidance is not installed", hint="pip install llguidance") from error
        if not self._vocabulary.eos_ids:
            raise InvalidRequestError(
                "the model has no end token, so no grammar could end", param="grammar", hint="use another model"
            )
        table = _Table(self._vocabulary, self._vocab_size)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(table),
            n_vocab=self._vocab_size,
            eos_token=sorted(self._vocabulary.eos_ids),
            slices=LLTokenizer.json_slices(),
        )
        return self._tokenizer


class _Table:
    """The vocabulary in the form llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = min(vocabulary.eos_ids)
        self.special_token_ids = sorted(vocabulary.eos_ids)
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        for token in vocabulary.eos_ids:
            self.tokens[token] = f"<|end {token}|>".encode()

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._vocabulary.encode(text, add_special=False)


def _fill(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.fill()


def _source(sampling: SamplingParams) -> tuple[str, str]:
    """The field that is set, and its text."""
    if sampling.json_schema is not None:
        try:
            text = json.dumps(sampling.json_schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused("json_schema", f"not JSON ({error})", "") from error
        param = "json_schema"
    else:
        param = "regex" if sampling.regex is not None else "grammar"
        text = sampling.regex or sampling.grammar or ""
    if len(text) > MAX_TEXT:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters", param=param, value=len(text), limit=MAX_TEXT, hint="make it smaller"
        )
    return param, text


def _build(param: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    try:
        return _compiled(param, source, tokenizer)
    except ValueError as error:  # numbers that the compiler has no room for
        raise _refused(param, str(error), source) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how the library fails inside; no other name for it exists
            raise
        raise _refused(param, f"the compiler failed ({error})", source) from error


def _compiled(param: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    if param == "json_schema":
        schema: dict[str, Any] = json.loads(source)
        check_schema(schema)
        text = LLMatcher.grammar_from_json_schema(dict(translated(schema)), overrides=json_options(schema))
    elif param == "regex":
        text = LLMatcher.grammar_from_regex(source)
    else:
        text = LLMatcher.grammar_from_lark(source)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise _refused(param, matcher.get_error(), source)
    # The first mask tells an empty language, and costs the lexer what the first token would wait for. What is too large
    # for the compiler mostly shows there, or at the text that must follow.
    trial = matcher.deep_copy()
    if not any(trial.compute_bitmask()) or trial.is_error():
        why = "nothing satisfies it" if "NoExtension" in trial.get_error() else trial.get_error()
        raise _refused(param, why, source)
    forced = trial.compute_ff_tokens()
    if forced and trial.consume_tokens(forced) and not trial.is_stopped():
        trial.compute_bitmask()
    if trial.is_error():
        raise _refused(param, trial.get_error(), source)
    return matcher


def gave_up(sampling: SamplingParams, why: str) -> InvalidRequestError:
    """The error of a request whose grammar turned out too large for the compiler while it was written to."""
    param, source = _source(sampling)
    return _refused(param, why, source)


def _refused(param: str, why: str, source: str) -> InvalidRequestError:
    reason = " ".join(why.replace("<non-verbose/>", "").split("<backtrace>")[0].split())[:500]
    hint = "see docs/server.md"
    if "too many" in reason.lower() or "max is" in reason or "too complex" in reason.lower():
        part = _largest_part(source)
        hint = f"make it smaller: the largest part of it is {part}" if part else "make it smaller"
    return InvalidRequestError(f"{param} cannot be honoured: {reason}", param=param, hint=hint)


_REPEATED = re.compile(r"\{(\d+)(?:,(\d*))?\}|\"(?:min|max)(?:Items|Length|Properties)\": (\d+)")


def _largest_part(source: str) -> str | None:
    """The repetition that asks for the most, with what stands before it; None without any."""
    found = max(_REPEATED.finditer(source), key=lambda m: max(int(n) for n in m.groups() if n), default=None)
    return None if found is None else repr(source[max(0, found.start() - 20) : found.end()])
