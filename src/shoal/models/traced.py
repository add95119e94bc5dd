"""Text that knows which of its characters came from outside.

What a template writes itself may spell control tokens; what users, tools and their descriptions contributed may not,
whatever it says. Both end up in one rendered text, so each string that goes into a template is `Traced`: a `str` with
one byte a character beside it, 1 for content and 0 for the template's own. It behaves as the plain string in every
comparison, test and method, and what methods and operators make of it is traced too.

Where a result cannot be opaque letter by letter (padding, title case), all of it counts as content if any of what it
was made of did: the mistake can then only be that something of the template stays plain text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, SupportsIndex

from markupsafe import Markup

_CONTENT, _TEMPLATE = b"\1", b"\0"
_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Traced(str):
    """A string with `_content`: as many bytes as characters, 1 where a character is content.

    The underscore keeps the sandbox from showing it to templates, for which this is a string like any other.
    """

    __slots__ = ("_content",)
    _content: bytes

    def __new__(cls, text: str, content: bytes | None = None) -> Traced:
        """`content`: a byte for each character of `text`; without it, all of it is the template's own."""
        self = super().__new__(cls, text)
        self._content = _TEMPLATE * len(text) if content is None else content
        return self

    def __str__(self) -> str:
        return self

    def __getnewargs__(self) -> tuple[str, bytes]:  # type: ignore[override]
        return plain(self), self._content

    def __add__(self, other: str) -> Traced:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(plain(self) * times, self._content * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        if isinstance(key, slice):
            return Traced(plain(self)[key], self._content[key])
        index = operator.index(key)
        return Traced(plain(self)[index], self._content[index : index + 1 or None])

    def __iter__(self) -> Iterator[Traced]:
        return (self[i] for i in range(len(self)))

    def join(self, parts: Iterable[str]) -> Traced:
        """The parts with this string between them."""
        pieces: list[str] = []
        for part in parts:
            pieces += [self, part] if pieces else [part]
        return joined(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Traced:
        """Every `old` by `new`."""
        if not old:
            return whole(plain(self).replace(old, new, count), self, new)
        return joined([new]).join(self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        """The words, or what lies between the `sep`."""
        return self._located(plain(self).split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        """As `split`, counting from the end."""
        return self._located(plain(self).rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        """The lines."""
        lines = self._located(plain(self).splitlines(keepends=True), "")
        return lines if keepends else [line[: len(plain(line).splitlines()[0])] for line in lines]

    def partition(self, sep: str) -> tuple[Traced, Traced, Traced]:
        """What is before the first `sep`, it, and what is after."""
        return self._three(plain(self).partition(sep))

    def rpartition(self, sep: str) -> tuple[Traced, Traced, Traced]:
        """What is before the last `sep`, it, and what is after."""
        return self._three(plain(self).rpartition(sep))

    def strip(self, chars: str | None = None) -> Traced:
        """Without `chars` (white space) at both ends."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Traced:
        """Without `chars` (white space) at the beginning."""
        return self[len(self) - len(plain(self).lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> Traced:
        """Without `chars` (white space) at the end."""
        return self[: len(plain(self).rstrip(chars))]

    def removeprefix(self, prefix: str) -> Traced:
        """Without `prefix`."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> Traced:
        """Without `suffix`."""
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def lower(self) -> Traced:
        """In small letters."""
        return self._same_length(plain(self).lower())

    def upper(self) -> Traced:
        """In capital letters."""
        return self._same_length(plain(self).upper())

    def capitalize(self) -> Traced:
        """With a capital letter first."""
        return self._same_length(plain(self).capitalize())

    def _same_length(self, text: str) -> Traced:
        return Traced(text, self._content) if len(text) == len(self) else whole(text, self)

    def _located(self, pieces: list[str], sep: str | None) -> list[Traced]:
        """`pieces` of this string, in order and `sep` apart (None: any white space), as traced."""
        found, position = [], 0
        for piece in pieces:
            start = plain(self).find(piece, position) if sep is None else position
            found.append(self[start : start + len(piece)])
            position = start + len(piece) + len(sep or "")
        return found

    def _three(self, pieces: tuple[str, str, str]) -> tuple[Traced, Traced, Traced]:
        first, middle, last = self._located(list(pieces), "")
        return first, middle, last


class ContentMarkup(Markup):
    """Escaped text with content in it: all of it counts as content."""


def plain(text: str) -> str:
    """`text` as an ordinary string."""
    return str.__str__(text)


def content_of(text: str) -> bytes:
    """One byte for each character of `text`: 1 for content."""
    if isinstance(text, Traced):
        return text._content
    return (_CONTENT if isinstance(text, ContentMarkup) else _TEMPLATE) * len(text)


def joined(parts: Iterable[str]) -> Traced:
    """The parts as one text."""
    parts = list(parts)
    return Traced("".join(parts), b"".join(map(content_of, parts)))


def holds_content(value: object) -> bool:
    """Whether any string in `value`, also inside of lists and objects, has a character of content."""
    if isinstance(value, str):
        return _CONTENT in content_of(value)
    if isinstance(value, Mapping):
        return any(holds_content(key) or holds_content(item) for key, item in value.items())
    return isinstance(value, _COLLECTIONS) and any(map(holds_content, value))


def shown(value: object) -> str:
    """`value` as it is written into a text; of anything but strings and plain values, all counts as content."""
    if isinstance(value, str):
        return value
    text = str(value)
    plain_value = value is None or isinstance(value, int | float) or not text
    return text if plain_value else Traced(text, _CONTENT * len(text))


def whole(text: str, *sources: object) -> Traced:
    """`text`, all of it content if anything of `sources`, of which it was made, is."""
    return Traced(text, _CONTENT * len(text) if any(map(holds_content, sources)) else None)


def as_content(value: Any) -> Any:
    """A copy of JSON-like data whose strings, keys included, are content."""
    if isinstance(value, str):
        text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _lone(value) else plain(value)
        return Traced(text, _CONTENT * len(text))
    if isinstance(value, Mapping):
        return {as_content(key): as_content(item) for key, item in value.items()}
    return [as_content(item) for item in value] if isinstance(value, list | tuple) else value


def _lone(text: str) -> bool:
    """Whether half a surrogate pair is in `text`, as JSON can smuggle in: it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def derived(result: Any, sources: Iterable[object]) -> Any:
    """The result of a function that knows nothing of tracing: strings it made out of content are content.

    A string that was handed through untouched keeps what it is.
    """
    if isinstance(result, Traced) or not isinstance(result, str | list | tuple):
        return result
    sources = list(sources)
    if not any(map(holds_content, sources)):
        return result
    handed = {id(item) for source in sources for item in (source if isinstance(source, list | tuple) else [source])}
    if isinstance(result, str):
        return result if id(result) in handed else _derive(result)
    items = [_derive(item) if isinstance(item, str) and id(item) not in handed else item for item in result]
    return items if isinstance(result, list) else tuple(items)


def _derive(text: str) -> str:
    if isinstance(text, Traced):
        return text
    return ContentMarkup(text) if isinstance(text, Markup) else Traced(text, _CONTENT * len(text))


def formatted(form: Callable[..., str], pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What `form(*args, **kwargs)` makes of `pattern`, traced: each argument is set between two marks and found again.

    A form that cuts or pads its arguments moves the marks: then all is content.
    """
    text = form(*args, **kwargs)
    values = [*args, *kwargs.values()]
    if not holds_content([pattern, *values]):
        return text
    mark = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)

    def marked(value: Any) -> Any:
        return f"{mark}{plain(value)}{mark}" if isinstance(value, str) and holds_content(value) else value

    pieces = form(*map(marked, args), **{key: marked(value) for key, value in kwargs.items()}).split(mark)
    opaque = holds_content(pattern) or any(holds_content(value) and not isinstance(value, str) for value in values)
    if opaque or "".join(pieces) != text or len(pieces) % 2 == 0:
        return whole(text, pattern, values)
    return joined(Traced(piece, _CONTENT * len(piece)) if i % 2 else piece for i, piece in enumerate(pieces))
