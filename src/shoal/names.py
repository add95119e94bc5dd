"""What to tell somebody who gave a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is nearest, or None where none is near; `cutoff` is how alike they must be, up to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the known name that is nearest, or all of them where none is near."""
    listed = list(known)
    near = nearest(name, listed)
    return f"did you mean {near}?" if near is not None else f"known are {', '.join(listed) or 'none'}"
