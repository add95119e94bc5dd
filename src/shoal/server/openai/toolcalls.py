"""Tool calls in a model's text: found while it streams, or all at once by the same code, so that both agree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from shoal.server.openai.calljson import CallDelta, CallReader, CallVerdict

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")  # before bare JSON; most models hide them, as control tokens
_WHITE = " \r\n\t"

Piece = str | CallDelta


@dataclass(slots=True)
class WrittenCall:
    """A call as far as it is written; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""
    done: bool = False


def note_call(calls: list[WrittenCall], delta: CallDelta) -> WrittenCall:
    """Take a delta into the calls so far; gives the call it belongs to."""
    if delta.name is not None:
        calls.append(WrittenCall(delta.id or "", delta.name))
    calls[-1].arguments += delta.arguments
    calls[-1].done = delta.done
    return calls[-1]


class _State(Enum):
    START = "start"  # only white space so far: bare JSON may begin
    TEXT = "text"
    OPENED = "opened"  # in a block or a list, or before bare JSON: an object may begin
    OBJECT = "object"  # inside an object that may be a call
    BETWEEN = "between"  # after a call: white space and separators are nobody's text
    DISCARD = "discard"  # in a block after its calls: up to the closing tag nothing is of use


class ToolCallParser:
    """Splits text into what is said and what is called.

    Knows the formats of Hermes and Qwen (`<tool_call>{"name", "arguments"}</tool_call>`), Llama 3 (the whole answer is
    `{"name", "parameters"}`, several with `;` between them), Mistral (a list of such objects) and plain function JSON.
    Bare JSON counts as a call only if it names a tool in `names`; what looks like a call and is not comes out as text,
    unchanged. A call comes as deltas, from where its arguments begin (see `CallReader`). What the pieces add up to
    does not depend on how the text is cut.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        self.calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._state = _State.START
        self._held = ""
        self._at = 0  # how much of it the reader has seen
        self._reader = CallReader(None)
        self._in_block = self._in_list = False
        self._called = False  # in this block or list, or bare: there was a call
        self._prefix = ""  # what led to the object; text if it is no call
        self._pieces: list[Piece] = []

    @property
    def full(self) -> bool:
        """True when as many calls as allowed are complete; the rest of the text is dropped."""
        writing = self._state is _State.OBJECT and not self._reader.done
        return self._max_calls is not None and self.calls >= self._max_calls and not writing

    def push(self, text: str) -> list[Piece]:
        """Take more text; give what it completed."""
        self._held += text
        while not self.full and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """The text has ended: give what is left."""
        held, self._held = self._held, ""
        undecided = self._state is _State.OPENED and not self._called
        undecided = undecided or (self._state is _State.OBJECT and self._reader.verdict is CallVerdict.OPEN)
        if self.full:
            return []
        if undecided:
            self._say(self._prefix + held)
        elif self._state is _State.TEXT or (self._state in (_State.START, _State.BETWEEN) and held.strip(_WHITE + ";")):
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
        if self._state is _State.OPENED:
            return self._opened()
        return self._object() if self._state is _State.OBJECT else self._discard()

    def _begin(self) -> bool:
        between = self._state is _State.BETWEEN
        seen = self._held.lstrip(_WHITE + ";" if between else _WHITE)
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
            before = "" if between else self._held[: len(self._held) - len(seen)]
            self._open(before, seen, in_block=False)
        else:
            self._held = seen if between else self._held
            self._state = _State.TEXT
        return True

    def _open(self, prefix: str, rest: str, *, in_block: bool) -> None:
        self._prefix, self._held, self._in_block = prefix, rest, in_block
        self._state, self._in_list, self._called = _State.OPENED, False, False

    def _text(self) -> bool:
        before, found, after = self._held.partition(_OPEN)
        if found:
            self._say(before)
            self._open(_OPEN, after, in_block=True)
            return True
        keep = _overlap(before, _OPEN)
        self._say(before[: len(before) - keep])
        self._held = before[len(before) - keep :]
        return False

    def _opened(self) -> bool:
        seen = self._held.lstrip(_WHITE + ",;" if self._called else _WHITE)
        if not seen:
            return False
        white = self._held[: len(self._held) - len(seen)]
        if seen[0] == "{":
            self._prefix, self._held, self._at = self._prefix + white, seen, 0
            self._reader, self._state = CallReader(None if self._in_block else self._names), _State.OBJECT
        elif seen[0] == "[" and not (self._in_list or self._called):
            self._prefix, self._held, self._in_list = self._prefix + white + "[", seen[1:], True
        elif not self._called:
            self._refuse(self._held[: len(white)])
        elif seen[0] == "]" and self._in_list:
            self._held, self._in_list = seen[1:], False
            self._state = _State.DISCARD if self._in_block else _State.BETWEEN
        else:
            self._held = seen
            self._state = _State.DISCARD if self._in_block else _State.TEXT
        return True

    def _object(self) -> bool:
        reader = self._reader
        known = reader.verdict
        self._at = reader.read(self._held, self._at)
        self._pieces += reader.take()
        if reader.refused:
            self._refuse(self._held[: self._at])
            return True
        if reader.verdict is CallVerdict.CALL:
            self.calls += known is CallVerdict.OPEN
            self._held, self._at = self._held[self._at :], 0
        if not reader.closed:
            return False
        self._called, self._prefix = True, ""
        self._state = _State.OPENED if self._in_block or self._in_list else _State.BETWEEN
        return True

    def _refuse(self, seen: str) -> None:
        """No call: what led here and `seen`, the begin of the held text, are text, and so is what follows."""
        self._say(self._prefix + seen)
        self._held, self._at, self._prefix, self._state = self._held[len(seen) :], 0, "", _State.TEXT

    def _discard(self) -> bool:
        ends = [(at, tag) for tag in (_CLOSE, _OPEN) if (at := self._held.find(tag)) >= 0]
        if not ends:
            keep = max(_overlap(self._held, _CLOSE), _overlap(self._held, _OPEN))
            self._held = self._held[len(self._held) - keep :]
            return False
        at, tag = min(ends)
        if tag == _OPEN:
            self._open("", self._held[at + len(tag) :], in_block=True)
            self._prefix = _OPEN
        else:
            self._held, self._state = self._held[at + len(tag) :], _State.BETWEEN
        return True


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
