"""The bound on a model's thinking: when its budget is used up, the end of the thinking is written for it."""

from __future__ import annotations

from collections.abc import Callable

from shoal.types import Thinking


class ThinkingLimit:
    """Follows one output and says which token must come next, if one must.

    Invariant: a function of the accepted tokens, so that one made anew and given the same tokens goes on as the old
    one would. It looks no further once the thinking has ended, or has not begun where it could have.
    """

    def __init__(self, bound: Thinking, end_ids: tuple[int, ...], token_bytes: Callable[[int], bytes]) -> None:
        """`end_ids` are the tokens that write the end of the thinking."""
        self._bound = bound
        self._end_ids = end_ids
        self._token_bytes = token_bytes
        self._begin, self._end = bound.begin.encode(), bound.end.encode()
        self._thinks = not self._begin  # known to think
        self._seen = b""  # what decides whether it begins, then the latest bytes, as many as the end has
        self._count = 0
        self._forced = 0
        self.over = False

    @property
    def forced(self) -> int | None:
        """The token that is to come next; None when the model chooses.

        A grammar goes before it: where that does not allow the token, as in the middle of a character, another comes.
        """
        if self.over or not self._thinks or self._count < self._bound.budget:
            return None
        return self._end_ids[self._forced]

    def accept(self, token: int) -> None:
        """A token was appended to the output."""
        if self.over:
            return
        self._forced = self._forced + 1 if token == self.forced else 0
        if self._forced == len(self._end_ids):
            self.over = True
            return
        self._count += 1
        self._seen += self._token_bytes(token)
        if not self._thinks:
            self._decide()
        if self._thinks:
            self.over = self._end in self._seen
            self._seen = self._seen[-len(self._end) :]

    def _decide(self) -> None:
        seen = self._seen.lstrip()
        if seen.startswith(self._begin):
            self._thinks, self._seen = True, seen[len(self._begin) :]
        elif not self._begin.startswith(seen):
            self.over = True
