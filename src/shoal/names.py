"""What to tell somebody who gave a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the known name that is nearest, or all of them where none is near."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(listed) or 'none'}"
