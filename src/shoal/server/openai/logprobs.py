"""Log-probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.stop import IncrementalDecoder
from shoal.engine.inputs import Codec
from shoal.types import TokenLogprob

LOWEST = -9999.0  # what the API gives for a token that cannot be; JSON has no infinity


def chat_logprobs(entries: Sequence[TokenLogprob], codec: Codec) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat completions."""
    return [
        {
            **_token(entry.token, entry.logprob, codec),
            "top_logprobs": [_token(token, logprob, codec) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _token(token: int, logprob: float, codec: Codec) -> dict[str, Any]:
    data = codec.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


class TextLogprobs:
    """`choices[].logprobs` of one text completion, in as many pieces as come.

    `text_offset` counts characters of the whole text before the token, also of such as are held back for a stop string.
    A character of several tokens begins at the first of them, and counts behind the last.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._offset = 0
        self._decoder = IncrementalDecoder()

    def take(self, entries: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """The next tokens, behind `first`, a prompt's first token, which has no log-probability."""
        tokens, offsets, tops = [], [], []
        begin = [] if first is None else [TokenLogprob(first, 0.0)]
        for entry in [*begin, *entries]:
            data = self._codec.token_bytes(entry.token)
            tokens.append(_spelt(data))
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(data))
            others = {_spelt(self._codec.token_bytes(token)): max(value, LOWEST) for token, value in entry.top}
            tops.append(others or None)
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in begin), *(max(entry.logprob, LOWEST) for entry in entries)],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def prompt_logprobs(entries: Sequence[TokenLogprob], codec: Codec, count: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: by token id, of each prompt token but the first and the `count` likeliest."""
    told: list[dict[str, Any] | None] = [None]
    for entry in entries:
        known = dict([*entry.top[:count], (entry.token, entry.logprob)])
        told.append(
            {
                str(token): {"logprob": max(logprob, LOWEST), "decoded_token": _spelt(codec.token_bytes(token))}
                for token, logprob in known.items()
            }
        )
    return told


def _spelt(data: bytes) -> str:
    """A token's text; one that is not whole characters as the API spells it, so that two such are not one key."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
