"""The one way in which the package's dataclasses become JSON and come back: records, saved states, remote engines.

A frozen dataclass becomes an object of its fields, an enum its value, a tuple a list, an error its message. What comes
back is checked field by field, by its types and then by the class itself. msgspec is imported when first needed, so
that importing the package stays quick.
"""

from __future__ import annotations

from typing import Any, TypeVar

from shoal.errors import ShoalError

T = TypeVar("T")


def to_json(value: object) -> Any:
    """What `json.dumps` takes, for a dataclass of this package."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True, enc_hook=_told)


def from_json(data: object, kind: type[T]) -> T:
    """A `kind` from what `to_json` gave, or JSON made of it.

    ValueError names the field that is missing or of another type; what the class itself raises passes through.
    """
    import msgspec

    try:
        made: T = msgspec.convert(data, kind, str_keys=True, dec_hook=_heard)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return made


def _told(value: object) -> object:
    if isinstance(value, ShoalError):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _heard(kind: type, value: object) -> object:
    if issubclass(kind, ShoalError):
        return kind(str(value))
    raise TypeError(f"{kind.__name__} has no form in JSON")
