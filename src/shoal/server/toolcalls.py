"""Tool calls in a model's text: found while it streams, or all at once by the same code, so that both agree."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")  # before bare JSON; most models hide them, as control tokens


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A whole call; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


Piece = str | ToolCallPiece


class _State(Enum):
    START = "start"  # only white space so far: bare JSON may begin
    TEXT = "text"
    BLOCK = "block"  # inside <tool_call>
    JSON = "json"  # inside bare JSON that may be a call
    BETWEEN = "between"  # after a call: white space and separators are nobody's text


class ToolCallParser:
    """Splits text into what is said and what is called.

    Knows the formats of Hermes and Qwen (`<tool_call>{"name", "arguments"}</tool_call>`), Llama 3 (the whole answer is
    `{"name", "parameters"}`, several with `;` between them), Mistral (a list of such objects) and plain function JSON.
    Bare JSON counts as a call only if it names a tool in `names`; what looks like a call and is not comes out as text,
    unchanged. Pieces do not depend on how the text is cut: a call comes when it is complete.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        self.calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._state = _State.START
        self._held = ""
        self._span = _JsonSpan()
        self._pieces: list[Piece] = []

    @property
    def full(self) -> bool:
        """True when as many calls as allowed have come; the rest of the text is dropped."""
        return self._max_calls is not None and self.calls >= self._max_calls

    def push(self, text: str) -> list[Piece]:
        """Take more text; give what it completed."""
        self._held += text
        while not self.full and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """The text has ended: give what is left."""
        held, self._held = self._held, ""
        if self.full:
            return []
        if self._state is _State.BLOCK:
            # Models sometimes stop without closing the block.
            if not self._call(held, marked=True):
                self._say(_OPEN + held)
        elif self._state is _State.JSON or self._state is _State.TEXT or held.strip(" \r\n\t;"):
            self._say(held)
        return self._take()

    def _take(self) -> list[Piece]:
        """What came, texts beside each other joined."""
        merged: list[Piece] = []
        for piece in self._pieces:
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            else:
                merged.append(piece)
        self._pieces = []
        return merged

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _step(self) -> bool:
        """One move over the held text; False when more of it is needed."""
        if self._state in (_State.START, _State.BETWEEN):
            return self._begin()
        if self._state is _State.TEXT:
            return self._text()
        return self._block() if self._state is _State.BLOCK else self._json()

    def _begin(self) -> bool:
        ignored = " \r\n\t;" if self._state is _State.BETWEEN else " \r\n\t"
        seen = self._held.lstrip(ignored)
        if not seen:
            return False
        for marker in (*_MARKERS, _OPEN):
            if seen.startswith(marker):
                self._held = seen[len(marker) :] if marker != _OPEN else seen
                self._state = _State.TEXT if marker == _OPEN else self._state
                return True
            if marker.startswith(seen):
                return False
        if seen[0] in "{[":
            self._held, self._state, self._span = seen, _State.JSON, _JsonSpan()
        else:
            self._held = seen if self._state is _State.BETWEEN else self._held
            self._state = _State.TEXT
        return True

    def _text(self) -> bool:
        before, found, after = self._held.partition(_OPEN)
        if found:
            self._say(before)
            self._held, self._state = after, _State.BLOCK
            return True
        keep = _overlap(before, _OPEN)
        self._say(before[: len(before) - keep])
        self._held = before[len(before) - keep :]
        return False

    def _block(self) -> bool:
        body, found, after = self._held.partition(_CLOSE)
        if not found:
            return False
        self._held, self._state = after, _State.BETWEEN
        if not self._call(body, marked=True):
            self._say(_OPEN + body + _CLOSE)
            self._state = _State.TEXT
        return True

    def _json(self) -> bool:
        end = self._span.end(self._held)
        if end is None:
            return False
        body, self._held = self._held[:end], self._held[end:]
        self._state = _State.BETWEEN
        if not self._call(body, marked=False):
            self._say(body)
            self._state = _State.TEXT
        return True

    def _call(self, body: str, *, marked: bool) -> bool:
        """Take `body` for one call or a list of them; False when it is none."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return False
        found = [_as_call(item) for item in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None and (marked or call.name in self._names)]
        if not calls or len(calls) < len(found):
            return False
        room = len(calls) if self._max_calls is None else self._max_calls - self.calls
        self.calls += len(calls[:room])
        self._pieces += calls[:room]
        return True


class _JsonSpan:
    """Finds the end of a JSON object or list in a text that grows."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Just behind the last bracket, or None as long as that has not come. `text` begins as in the last call."""
        for at in range(self._at, len(text)):
            character = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None


def _as_call(value: Any) -> ToolCallPiece | None:
    """A call in any of the spellings, or None."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", inner)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCallPiece(name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
