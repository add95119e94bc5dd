"""When an output ends, and the text each of its tokens brings: stop ids, stop strings, limits, UTF-8 boundaries.

     token ids    bytes               text                       text
push ---------> token_bytes -> IncrementalDecoder -> stop strings ----> Verdict
                          keeps a split character   keep what may yet become one
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Collection
from typing import NamedTuple

from shoal.types import FinishReason, SamplingParams


class IncrementalDecoder:
    """Text of a byte stream that arrives in pieces cut anywhere, one piece per token.

    Invariant: the texts given so far are `bytes.decode("utf-8", "replace")` of all bytes so far, less the at most three
    kept bytes, which begin a character and do not end it. So valid text never shows U+FFFD and nothing is kept that
    already is a character or can no longer become one. Bytes still kept when the stream ends are an incomplete
    character; dropping them is the caller's, by not asking again.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending = b""
        """The kept bytes."""

    def push(self, data: bytes) -> str:
        """Take the next bytes; give the text they complete, which may be empty. Each invalid sequence gives U+FFFD."""
        if self.pending:
            data = self.pending + data
        text, used = utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        # CPython keeps the first two bytes of an encoded surrogate, though no third byte makes them valid.
        if len(self.pending) == 2 and self.pending[0] == 0xED and self.pending[1] >= 0xA0:
            text += utf_8_decode(self.pending, "replace", True)[0]
            self.pending = b""
        return text


class Verdict(NamedTuple):
    """What one token did: the text to emit now, why the request ended (None: it goes on), whether the token is output.

    `is_output` is False for a stop or end token only.
    """

    text: str
    reason: FinishReason | None
    is_output: bool


_GOES_ON = Verdict("", None, True)


class StopChecker:
    """Decides for one request, token by token, what is emitted and when the output ends.

    Invariant: the joined texts of all verdicts, and of `flush` where it is called, are the final text. What may yet
    become a stop string is in none of them: the longest end of the text that begins a stop string is held back, and
    given as soon as it cannot become one. The final text does not depend on how it is cut into tokens: of several stop
    strings the one that is complete first counts, and of those complete together the longest.

    A stop or end token is not part of the output. Where a stop string ends the request, the text is cut before the
    string, while the output tokens are kept up to and including the one that completed it (as in vLLM): a token cannot
    be cut, and the tokens are what was computed. Until `min_tokens` are output nothing but `max_tokens` ends the
    request: stop and end tokens are ordinary tokens (the sampler does not choose them then), and stop strings that an
    earlier token completes are ordinary text.
    """

    __slots__ = (
        "_decoder",
        "_end_ids",
        "_first_characters",
        "_held",
        "_longest",
        "_max_tokens",
        "_min_tokens",
        "_stops",
        "_token_bytes",
        "num_tokens",
    )

    def __init__(self, params: SamplingParams, eos_ids: Collection[int], token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` gives the bytes a token stands for, empty for one that is not shown (special tokens)."""
        self.num_tokens = 0
        """Output tokens so far."""
        self._end_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)
        self._token_bytes = token_bytes
        self._decoder = IncrementalDecoder()
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._stops = params.stop
        self._longest = max(map(len, params.stop), default=0)
        self._first_characters = frozenset(s[0] for s in params.stop)
        self._held = ""

    def push(self, token: int) -> Verdict:
        """Take the next token. Not to be called again after a verdict with a reason, or after `flush`."""
        if token in self._end_ids and self.num_tokens >= self._min_tokens:
            return Verdict(self.flush(), FinishReason.STOP, False)
        self.num_tokens += 1
        data = self._token_bytes(token)
        decoder = self._decoder
        text = decoder.push(data) if decoder.pending or not data.isascii() else data.decode()
        if self._stops:
            text, stopped = self._check_text(text)
            if stopped:
                return Verdict(text, FinishReason.STOP, True)
        if self.num_tokens >= self._max_tokens:
            return Verdict(text + self.flush(), FinishReason.LENGTH, True)
        return Verdict(text, None, True) if text else _GOES_ON

    def flush(self) -> str:
        """Give the text held back, because the request ends for another reason: context full, aborted, timed out.

        Bytes of an incomplete character are dropped. Empty when nothing is held, so a second call does no harm.
        """
        held, self._held = self._held, ""
        return held

    def _check_text(self, new: str) -> tuple[str, bool]:
        """Text to emit once `new` came, and whether a stop string is complete; updates the text held back."""
        if not new:
            return "", False
        before = len(self._held)
        text = self._held + new
        if self.num_tokens >= self._min_tokens:
            start = self._find_stop(text, before)
            if start is not None:
                self._held = ""
                return text[:start], True
        keep = self._begin_of_stop(text)
        self._held = text[keep:]
        return text[:keep], False

    def _find_stop(self, text: str, before: int) -> int | None:
        """Start of the stop string that is complete first in `text`, and ends beyond its first `before` characters.

        One that ends inside them was seen when they came, and passed over because that was before `min_tokens`.
        """
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _begin_of_stop(self, text: str) -> int:
        """Start of the longest end of `text` that begins a stop string and is not all of it; len(text) if none does."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(s.startswith(end) and len(s) > len(end) for s in self._stops):
                    return start
        return len(text)
