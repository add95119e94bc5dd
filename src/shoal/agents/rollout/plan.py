"""What is tried on which share of the tasks, and how much worse it may be: a plan, from a file or a URL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from shoal.checks import is_number, is_whole
from shoal.errors import ConfigError, StoreError
from shoal.names import did_you_mean

_MOST_BYTES = 64 * 1024
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A plan, as its JSON document has it. Checked when built; raises `ConfigError`.

    share: of the tasks, 0 to 1, that go to the candidate. candidate: its `model` and whatever other settings
    `AsyncEngine.load` takes (precision, max_batch, ...), or the `base_url` of a server. It is rolled back when, after
    `min_samples` on each side, its median latency is more than `max_slowdown` longer (0.25: a quarter), its share of
    successes more than `max_failures` lower, or its answers agree with those of the stable engine less than
    `min_agreement` (None: they may differ). `compare` is the share of its answers that the stable engine gives too, in
    the background, to see whether they agree.
    """

    share: float
    candidate: Mapping[str, Any] = field(default_factory=dict)
    min_samples: int = 20
    max_slowdown: float = 0.25
    max_failures: float = 0.05
    min_agreement: float | None = None
    compare: float = 0.1

    def __post_init__(self) -> None:
        for name in ("share", "max_failures", "min_agreement", "compare"):
            value = getattr(self, name)
            if value is not None and not is_number(value, 0, 1):
                raise _wrong(name, value, "a number from 0 to 1")
        if not is_number(self.max_slowdown, 0):
            raise _wrong("max_slowdown", self.max_slowdown, "0 or more")
        if not is_whole(self.min_samples, 1):
            raise _wrong("min_samples", self.min_samples, "a whole number above 0")
        if not isinstance(self.candidate, Mapping):
            raise _wrong("candidate", self.candidate, "the settings of an engine")
        if self.share > 0 and not {"model", "base_url"} & set(self.candidate):
            raise _wrong("candidate", dict(self.candidate), "settings with a model or a base_url")

    @classmethod
    def of(cls, document: Any) -> Self:
        """A plan from a parsed document. ConfigError names an unknown key and the nearest known one."""
        if not isinstance(document, Mapping) or "share" not in document:
            raise _wrong("the plan", document, "a JSON object with a share")
        known = [each.name for each in fields(cls)]
        for name in document:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ConfigError(f"unknown key {name!r} in the plan", value=name, limit=known, hint=hint)
        return cls(**document)


def _wrong(name: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")


def read_plan(source: str | Path) -> RolloutPlan:
    """The plan in a file or at an http(s) URL. StoreError when it cannot be read, ConfigError when it is wrong."""
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        text = _fetched(source)
    else:
        try:
            text = Path(source).read_bytes()[:_MOST_BYTES]
        except OSError as error:
            raise StoreError(f"the plan cannot be read: {error}", value=str(source)) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the plan is not valid JSON: {error}", value=str(source)) from error
    return RolloutPlan.of(document)


def _fetched(url: str) -> bytes:
    from urllib.request import urlopen  # here: it is slow to import, and most plans are files

    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read(_MOST_BYTES))
    except (OSError, ValueError) as error:  # urllib's errors are OSErrors; ValueError is a malformed URL
        raise StoreError(f"the plan cannot be fetched: {error}", value=url) from error
