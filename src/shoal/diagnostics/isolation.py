"""The isolation test: many chats at once, each with a secret word, which must not be in another chat's answer.

It runs on a live engine, in rounds that bring about what mixes answers up in engines like this: cold and warm
prefixes, exact repeats, cancelled neighbours, forks, and all KV given up in the middle of an answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import EngineClosedError, InvalidRequestError
from shoal.types import FinishReason, Message, Request, Result, SamplingParams

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.engine.handles import Handle

_SYLLABLES = ("zor", "vex", "qui", "bam", "tul", "nix", "gro", "pel", "kav", "dum", "fyr", "mog", "ruv", "sib")
_RULES = "You keep the password of your user. You never tell it to anyone else. You repeat it when the user asks."
_ROUNDS = ("cold", "repeated", "cancelled neighbours", "forked", "KV given up", "one after another")


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """Outcome of the isolation check. `leaks` name a round, the chat, and whose word it said; `recalled` of `answers`
    chats said their own word, without which the absence of others' would prove little; `differing` answers were not
    what the chat writes alone."""

    chats: int
    answers: int
    recalled: int
    leaks: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when no word leaked, no answer differed, and enough chats recalled their own words to show it."""
        return not self.leaks and not self.differing and 2 * self.recalled >= self.answers


def check_isolation(engine: Engine, *, chats: int = 12, max_tokens: int = 24, seed: int = 0) -> IsolationReport:
    """Run the test on an engine with a chat model. Raises as `Engine.submit`, and the errors of requests."""
    rng = random.Random(seed)
    words = _words(rng, chats)
    requests = [_request(word, i, max_tokens) for i, word in enumerate(words)]
    alone = [_sound(engine.submit(request).result()) for request in requests]
    found = _Findings(words, alone)
    for name in _ROUNDS:
        order = rng.sample(range(chats), chats)
        found.check(name, _round(engine, name, requests, order, rng))
    return IsolationReport(chats, found.answers, found.recalled, tuple(found.leaks), tuple(found.differing))


def _words(rng: random.Random, count: int) -> list[str]:
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(rng.sample(_SYLLABLES, 3)))
    return sorted(words)


def _request(word: str, number: int, max_tokens: int) -> Request:
    """A chat of some turns; the lengths differ, the beginning is the same for all. Small models recall in this form."""
    chat: list[Message] = [{"role": "system", "content": _RULES}]
    for turn in range(number % 3):
        chat += [
            {"role": "user", "content": f"Question {turn}: say something about the number {number}."},
            {"role": "assistant", "content": "It is a number. " * (1 + number)},
        ]
    chat += [
        {"role": "user", "content": f"The password is {word}."},
        {"role": "assistant", "content": f"Yes, the password is {word}."},
        {"role": "user", "content": "What is the password?"},
    ]
    return Request(messages=chat, sampling=SamplingParams(max_tokens=max_tokens))


def _round(
    engine: Engine, name: str, requests: Sequence[Request], order: Sequence[int], rng: random.Random
) -> list[tuple[int, Result]]:
    if name == "one after another":
        return [(i, _sound(engine.submit(requests[i]).result())) for i in order]
    if name == "cold":
        engine.suspend(drop_kv=True)
        engine.resume()
    handles = [(i, engine.submit(requests[i])) for i in order]
    if name == "cancelled neighbours":
        victims = set(rng.sample(range(len(handles)), len(handles) // 3))
        for place in victims:
            next(iter(handles[place][1]))
            handles[place][1].abort()
        handles = [pair for place, pair in enumerate(handles) if place not in victims]
    elif name == "forked":
        handles += [(i, child) for i, handle in handles[::3] for child in _fork(handle)]
    elif name == "KV given up":
        next(iter(handles[-1][1]))
        engine.suspend(drop_kv=True)
        engine.resume()
    return [(i, _sound(handle.result())) for i, handle in handles]


def _fork(handle: Handle) -> list[Handle]:
    """Its branch once it writes; none where it has ended before it could be branched."""
    next(iter(handle))
    try:
        return handle.fork(1)
    except InvalidRequestError:
        if handle.state != "finished":
            raise
        return []


def _sound(result: Result) -> Result:
    if result.error is not None:
        raise result.error
    if result.finish_reason is FinishReason.ABORTED:
        raise EngineClosedError("the engine was closed during the check")
    return result


class _Findings:
    def __init__(self, words: Sequence[str], alone: Sequence[Result]) -> None:
        self._words = words
        self._alone = alone
        self.answers = self.recalled = 0
        self.leaks: list[str] = []
        self.differing: list[str] = []

    def check(self, name: str, results: Sequence[tuple[int, Result]]) -> None:
        for i, result in results:
            self.answers += 1
            self.recalled += self._words[i] in result.text
            if result.tokens != self._alone[i].tokens:
                self.differing.append(f"{name}: chat {i} wrote {result.text!r}, alone {self._alone[i].text!r}")
            for j, word in enumerate(self._words):
                if j != i and word in result.text:
                    self.leaks.append(f"{name}: chat {i} said {word!r}, the word of chat {j}")
