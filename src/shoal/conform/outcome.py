"""What a suite is asked of, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its name in the table, and the URL of its API, which ends in `/v1`."""

    name: str
    url: str
    model: str = "default"

    @classmethod
    def parse(cls, text: str) -> Target:
        """From `NAME=URL`, or `NAME=URL=MODEL`."""
        name, _, rest = text.partition("=")
        url, _, model = rest.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ConfigError(f"{text!r} names no server", value=text, hint="write NAME=http://HOST:PORT/v1")
        return cls(name, url.rstrip("/"), model or "default")


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """One case of a suite on one server. `why` says what went wrong, or why it was not run."""

    case: str
    status: Literal["pass", "fail", "skip"]
    why: str = ""


Suite: TypeAlias = Callable[[Target], Iterator[CaseOutcome]]


def attempt(case: str, check: Callable[[], object]) -> CaseOutcome:
    """The outcome of a check: it passes unless it raises."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what there is to tell
        return CaseOutcome(case, "fail", told(error))
    return CaseOutcome(case, "pass")


def told(error: object) -> str:
    """An error in one line of a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
