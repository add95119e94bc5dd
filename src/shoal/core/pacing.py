"""How many prompt tokens a step may take: from measured step times to the stall bound."""

from __future__ import annotations

_START = 32  # prompt tokens beside decodes while nothing is known of this machine
_LEAST = 8  # a step always moves prompts on by this much, or a bound too small for the machine would stop them


class Pacer:
    """Predicts the time of a mixed step as the time of its decodes plus a price per prompt token.

    Both are running means of measured steps; the price follows rises at once and falls slowly, since a step that
    comes out too long breaks a promise and one that is too short only costs a little throughput.
    """

    def __init__(self, max_stall_ms: float) -> None:
        self.max_stall_ms = max_stall_ms
        self.decode_ms: float | None = None
        self.token_ms: float | None = None

    def prompt_budget(self, limit: int) -> int:
        """The most prompt tokens beside running decodes so that the step stays within the stall bound."""
        if self.token_ms is None:
            return min(limit, _START)
        room = 0.85 * self.max_stall_ms - (self.decode_ms or 0.0)
        return max(min(limit, _LEAST), min(limit, int(room / self.token_ms)))

    def observe(self, decodes: int, prompt_tokens: int, ms: float) -> None:
        """Learn from one step."""
        if prompt_tokens == 0:
            self.decode_ms = ms if self.decode_ms is None else 0.8 * self.decode_ms + 0.2 * ms
            return
        if prompt_tokens < _LEAST:
            return
        base = (self.decode_ms or 0.0) if decodes else 0.0
        price = max(ms - base, 0.1 * ms) / prompt_tokens
        if self.token_ms is None:
            self.token_ms = price
        else:
            weight = 0.5 if price > self.token_ms else 0.1
            self.token_ms += weight * (price - self.token_ms)
