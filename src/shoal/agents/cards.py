"""What is shown of a swarm: a card for each agent, and the whole in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from shoal.types import Event, FinishReason, Result

if TYPE_CHECKING:
    from shoal.engine.handles import Handle


@dataclass(frozen=True, slots=True)
class Specialist:
    """One point of view: the name on its card, and the line that asks for it at the end of the prompt."""

    name: str
    task: str


class CardState(StrEnum):
    """Where an agent stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"  # its node was not needed, or its dependants go on without it
    ABORTED = "aborted"


_ENDS = {
    FinishReason.STOP: CardState.DONE,
    FinishReason.LENGTH: CardState.DONE,
    FinishReason.ABORTED: CardState.ABORTED,
}


@dataclass(slots=True, eq=False)
class Card:
    """What one agent has written so far and where it stands. Changed by its swarm only, on the thread that pumps.

    `text` is the joined text of the events taken so far, `result` is set with the last one. Where its agent begins
    anew, or something else stands in for what it wrote, `version` is counted up. `cause` is why it ended no better.
    """

    specialist: Specialist
    text: str = ""
    version: int = 0
    cause: str | None = None
    tokens: int = 0
    state: CardState = CardState.QUEUED
    first_token_at: float | None = None
    result: Result | None = None
    handle: Handle | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The specialist's name."""
        return self.specialist.name

    @property
    def finished(self) -> bool:
        """True when nothing more will come."""
        return self.state in (CardState.DONE, CardState.FAILED, CardState.SKIPPED, CardState.ABORTED)

    def tokens_per_s(self, now: float) -> float:
        """Tokens per second since the first one; 0 while there are fewer than two."""
        if self.tokens < 2 or self.first_token_at is None:
            return 0.0
        result = self.result
        exact = result is not None and result.ttft_s is not None
        span = result.latency_s - result.ttft_s if exact else now - self.first_token_at  # type: ignore[union-attr,operator]
        return (self.tokens - 1) / span if span > 0 else 0.0

    def begin(self, handle: Handle) -> None:
        """A request begins for it: what an earlier attempt wrote is gone."""
        self.handle = handle
        self.rewrite("")
        self.tokens, self.first_token_at, self.result = 0, None, None

    def rewrite(self, text: str) -> None:
        """Let it show `text`, whatever it shows now."""
        self.version += not text.startswith(self.text)
        self.text = text

    def take(self, event: Event, now: float) -> None:
        """Add what an event brings."""
        if event.tokens and self.first_token_at is None:
            self.first_token_at = now
        self.text += event.text
        self.tokens += len(event.tokens)
        if event.result is not None:
            self.result = event.result
            self.state = _ENDS.get(event.result.finish_reason, CardState.FAILED)

    def look(self) -> None:
        """Ask the engine where the request stands. It may have moved on by the time this returns."""
        if self.handle is not None and not self.finished and self.handle.state != "finished":
            self.state = CardState(self.handle.state)


@dataclass(frozen=True, slots=True)
class Summary:
    """A swarm in numbers. `prefix_tokens`: tokens with which all prompts begin; `prompt_tokens` those of all prompts
    together, `cached_tokens` the ones of them that were taken from the prefix tree instead of computed; both count
    agents that have ended."""

    tokens: int
    wall_s: float
    prefix_tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all agents over the wall time, prefill included."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0
