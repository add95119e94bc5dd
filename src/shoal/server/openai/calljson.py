"""One JSON object that may be a tool call, read character by character, its arguments passed on as they are written."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

_WHITE = " \r\n\t"
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("name", "function", "type", "id", "index", *_ARGUMENTS)  # what may stand in a call without arguments
_NOTHING = ("", "null")  # what no arguments look like
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of a tool call: the first brings `name` and `id`, each more of the `arguments` (JSON text), the last `done`.

    A call without a last one was cut off.
    """

    arguments: str = ""
    name: str | None = None
    id: str | None = None
    done: bool = False


class CallVerdict(Enum):
    """What an object is taken for."""

    OPEN = "open"  # not known yet
    CALL = "call"
    REFUSED = "refused"  # no call: its text is text


class _At(Enum):
    """Where in the object the next character stands."""

    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    STRING = "string"  # in a key, or a value on the way to the arguments
    SCALAR = "scalar"
    SKIPPED = "skipped"  # in a value nobody needs
    COMMA = "comma"
    ARGUMENTS = "arguments"
    QUOTED = "quoted"  # in arguments that are a string with JSON in it
    TAIL = "tail"  # behind the arguments
    END = "end"


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}` in its spellings, from its first bracket on, however it is cut.

    Arguments that are absent, null or a blank string are `{}`. The verdict falls where the arguments begin (where there
    are none: at the end of the object); with `names`, only for a name among them. From there on it is a call
    whatever follows: arguments that turn out malformed are passed on as they stand, for the caller to judge. What
    never stands in JSON outside strings, `<`, ends the object: a closing tag is not swallowed.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.verdict = CallVerdict.OPEN
        self._names = names
        self._at = _At.END
        self._level = 0  # 2 inside {"function": {...}}
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._raw: list[str] = []  # of the string, of early arguments, or of what may turn out to be no arguments
        self._strange = False  # a key that calls do not have
        self._is_key = True
        self._nesting = _Nesting()
        self._quoted = _Unescape()
        self._broken = False  # a line break in a string with arguments in it: it should have been closed
        self._fragment: list[str] = []
        self._deltas: list[CallDelta] = []
        self._done = self._told_done = False
        self._follows = False  # behind the arguments, a comma came: more keys

    @property
    def refused(self) -> bool:
        """True when it is no call."""
        return self.verdict is CallVerdict.REFUSED

    @property
    def done(self) -> bool:
        """True when the arguments are complete."""
        return self._done

    @property
    def closed(self) -> bool:
        """True when the object has ended, or what was to be one has."""
        return self._at is _At.END and self._level < 0

    def read(self, text: str, start: int) -> int:
        """Read on from `text[start:]`; gives the index behind the last character taken."""
        at = start
        while at < len(text) and not self.refused and not self.closed:
            if not self._take(text[at]) or (self.refused and text[at] == "<"):
                break
            at += 1
        ended = self._done and not self._told_done
        if self._fragment or ended:
            self._deltas.append(CallDelta("".join(self._fragment), done=ended))
            self._fragment, self._told_done = [], self._done
        return at

    def take(self) -> list[CallDelta]:
        """What came since the last call."""
        taken, self._deltas = self._deltas, []
        return taken

    def _take(self, c: str) -> bool:
        """Take one character; False for one that belongs to what follows."""
        if self._at is _At.ARGUMENTS:
            return self._argument(c)
        if self._at is _At.QUOTED:
            return self._quote(c)
        if self._at is _At.TAIL:
            return self._tail(c)
        if self._at is _At.STRING:
            self._string(c)
        elif self._at is _At.SKIPPED:
            self._skip(c)
        elif self._at is _At.SCALAR:
            self._scalar(c)
        elif c not in _WHITE:
            self._structure(c)
        return True

    # -- on the way to the arguments ----------------------------------------------------------------------------

    def _structure(self, c: str) -> None:
        at = self._at
        if at is _At.END and c == "{":  # the first of all
            self._level, self._at = 1, _At.KEY
        elif at is _At.KEY and c == '"':
            self._begin_string(is_key=True)
        elif at is _At.COLON and c == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE:
            self._value(c)
        elif at is _At.COMMA and c == ",":
            self._at = _At.KEY
        elif at in (_At.COMMA, _At.KEY) and c == "}":
            self._close()
        else:
            self.verdict = CallVerdict.REFUSED

    def _begin_string(self, *, is_key: bool) -> None:
        self._raw, self._is_key, self._at = ['"'], is_key, _At.STRING
        self._nesting = _Nesting(in_string=True)

    def _string(self, c: str) -> None:
        self._raw.append(c)
        self._nesting.push(c)
        if self._nesting.in_string:
            return
        try:
            # Half of a surrogate pair has no UTF-8, and no answer could carry it.
            value = json.loads("".join(self._raw)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except ValueError:
            self.verdict = CallVerdict.REFUSED
            return
        if self._is_key:
            self._key, self._at = value, _At.COLON
            self._strange = self._strange or value not in _BESIDE
            return
        self._at = _At.COMMA
        if self._key == "name" or (self._key == "function" and self._level == 1):
            self._name = self._name or value
        elif self._key in _ARGUMENTS and value.strip(_WHITE) not in _NOTHING:
            self._early = value
            self.verdict = self.verdict if value.lstrip(_WHITE).startswith("{") else CallVerdict.REFUSED

    def _value(self, c: str) -> None:
        if self._key in _ARGUMENTS and self._early is None:
            self._begin_arguments(c)
        elif c == '"':
            self._begin_string(is_key=False)
        elif c == "{" and self._key == "function" and self._level == 1:
            self._level, self._at = 2, _At.KEY
        elif c in "{[":
            self._begin_skip(c)
        else:
            self._raw, self._at = [], _At.SCALAR
            self._scalar(c)

    def _scalar(self, c: str) -> None:
        """A character of a number or a word, or the one behind it; as arguments only `null` will do."""
        nothing = self._key in _ARGUMENTS and self._early is None
        if c in ",}" + _WHITE:
            self._at = _At.COMMA
            if nothing and "".join(self._raw) != "null":
                self.verdict = CallVerdict.REFUSED
            elif c not in _WHITE:
                self._structure(c)
            return
        self._raw.append(c)
        ok = "null".startswith("".join(self._raw)) if nothing else c.isalnum() or c in "+-."
        self.verdict = self.verdict if ok else CallVerdict.REFUSED

    def _begin_skip(self, c: str) -> None:
        self._nesting, self._raw, self._at = _Nesting(), [], _At.SKIPPED
        self._skip(c)

    def _skip(self, c: str) -> None:
        self._raw.append(c)
        self._nesting.push(c)
        if self._nesting.depth == 0:
            self._at = _At.COMMA
            if self._key in _ARGUMENTS and self._early is None:
                self._early = "".join(self._raw)
        elif c == "<" and self._nesting.torn:
            self.verdict = CallVerdict.REFUSED

    def _close(self) -> None:
        """A bracket closes the object, or the one inside it."""
        self._level -= 1
        self._at = _At.COMMA
        if self._level == 0:
            self._level, self._at = -1, _At.END
            if (self._early is None and self._strange) or not self._commit():
                self.verdict = CallVerdict.REFUSED
                return
            self._fragment.append("{}" if self._early is None else self._early)
            self._done = True

    # -- the arguments ------------------------------------------------------------------------------------------

    def _begin_arguments(self, c: str) -> None:
        if c not in '{"':
            self._raw, self._at = [], _At.SCALAR
            self._scalar(c)
        elif self._name is None:  # they stand before the name
            if c == "{":
                self._begin_skip(c)
            else:
                self._begin_string(is_key=False)
        elif c == '"':
            self._raw, self._at = [], _At.QUOTED
        elif self._commit():
            self._nesting, self._at = _Nesting(), _At.ARGUMENTS
            self._argument(c)

    def _commit(self) -> bool:
        """It is a call, if its name may be one."""
        name = self._name
        if not name or (self._names is not None and name not in self._names):
            self.verdict = CallVerdict.REFUSED
            return False
        self.verdict = CallVerdict.CALL
        self._deltas.append(CallDelta(name=name, id=f"call_{secrets.token_hex(12)}"))
        return True

    def _argument(self, c: str) -> bool:
        if c == "<" and self._nesting.torn:
            return self._abandon()
        self._fragment.append(c)
        self._nesting.push(c)
        if self._nesting.depth == 0:
            self._end_arguments()
        return True

    def _quote(self, c: str) -> bool:
        if c == '"' and not self._quoted.pending:
            self._close_quote()
            return True
        self._broken = self._broken or c == "\n"
        if c == "<" and self._broken:
            return self._abandon()
        text = self._quoted.push(c)
        if self.verdict is CallVerdict.CALL or (text == "{" and self._commit()):
            self._fragment.append(text)
        elif text and text not in _WHITE:
            self._raw.append(text)
            self.verdict = self.verdict if "null".startswith("".join(self._raw)) else CallVerdict.REFUSED
        return True

    def _close_quote(self) -> None:
        """A string of arguments ends; one in which nothing stood, or null, is a call without any."""
        if self.verdict is CallVerdict.OPEN:
            if "".join(self._raw) not in _NOTHING or not self._commit():
                self.verdict = CallVerdict.REFUSED
                return
            self._fragment.append("{}")
        self._end_arguments()

    def _end_arguments(self) -> None:
        self._done, self._at = True, _At.TAIL
        self._nesting = _Nesting(depth=self._level)

    def _tail(self, c: str) -> bool:
        if not self._follows and c not in ",}" + _WHITE:
            return self._abandon()
        if c == "<" and self._nesting.torn:
            return self._abandon()
        self._follows = self._follows or c == ","
        self._nesting.push(c)
        if self._nesting.depth == 0:
            self._level, self._at = -1, _At.END
        return True

    def _abandon(self) -> bool:
        """The object ends without its bracket; arguments that are malformed by that are all there will be."""
        self._done, self._level, self._at = True, -1, _At.END
        return False


class _Nesting:
    """How deep in brackets, and whether in a string."""

    def __init__(self, depth: int = 0, *, in_string: bool = False) -> None:
        self.depth = depth
        self.in_string = in_string
        self._escaped = False
        self._broken = False  # a line break in a string, which JSON does not have: it was not closed

    @property
    def torn(self) -> bool:
        """True outside strings, and in one that should have been closed."""
        return not self.in_string or self._broken

    def push(self, c: str) -> None:
        """Move on by a character."""
        if not self.in_string:
            self.depth += (c in "{[") - (c in "}]")
            self.in_string = c == '"'
        elif self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self.in_string = self._broken = False
        elif c == "\n":
            self._broken = True


class _Unescape:
    """The characters that the inside of a JSON string stands for."""

    def __init__(self) -> None:
        self.pending = ""  # an escape that is not complete
        self._high = 0  # first half of a surrogate pair

    def push(self, c: str) -> str:
        """Take a character in; gives what it completes."""
        if not self.pending:
            if c == "\\":
                self.pending = c
                return ""
            return self._alone() + c
        self.pending += c
        if self.pending[1] != "u":
            self.pending = ""
            return self._alone() + _ESCAPES.get(c, c)
        if len(self.pending) < 6:
            return ""
        digits, self.pending = self.pending[2:], ""
        try:
            code = int(digits, 16)
        except ValueError:
            return self._alone() + "\ufffd"
        if self._high and 0xDC00 <= code < 0xE000:
            code, self._high = 0x10000 + ((self._high - 0xD800) << 10) + (code - 0xDC00), 0
            return chr(code)
        before = self._alone()
        if 0xD800 <= code < 0xDC00:
            self._high = code
            return before
        return before + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _alone(self) -> str:
        """What a half of a pair without its other half stands for."""
        high, self._high = self._high, 0
        return "\ufffd" if high else ""
