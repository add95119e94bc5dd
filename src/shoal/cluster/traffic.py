"""What the simulation sends: tenants with long prefixes of their own, and agents that go on turn by turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.core.journal import BlockHash, content_hashes
from shoal.types import Namespace


@dataclass(slots=True)
class Arrival:
    """One request. `hashes` are of its prompt's full blocks."""

    number: int
    prompt: tuple[int, ...]
    output: int
    hashes: list[BlockHash]
    session: str = ""
    turn: int = 0
    arrived: float = 0.0
    first: float = 0.0
    warming: bool = False  # only fills caches


class Traffic(ABC):
    """Calls that come by themselves, and calls that follow others."""

    @abstractmethod
    def arrivals(self) -> Iterator[tuple[float, Arrival]]:
        """When calls come, in order, in seconds."""

    def after(self, call: Arrival, tokens: Sequence[int]) -> tuple[float, Arrival] | None:
        """What follows a call that has ended with these tokens, and after how many seconds."""
        del call, tokens
        return None


class TenantCalls(Traffic):
    """`tenants` prefixes, all as popular; calls at `rate` a second, each a prefix with a question of its own.

    Before these each tenant calls once, slowly, so that caches are filled: `warm_rate` a second; 0: none does.
    """

    def __init__(
        self,
        calls: int,
        rate: float,
        block_size: int,
        *,
        tenants: int = 150,
        prefix: int = 6000,
        question: int = 1200,
        output: int = 100,
        vocabulary: int = 2**31,
        warm_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.calls = calls
        self.rate = rate
        self.question = question
        self.output = output
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.warm_rate = warm_rate
        self._random = random.Random(seed)
        self.prefixes = Prefixes(tenants, prefix, block_size)

    def arrivals(self) -> Iterator[tuple[float, Arrival]]:
        """As a Poisson process."""
        now, tenants = 0.0, len(self.prefixes)
        warming = tenants if self.warm_rate else 0
        for number in range(warming + self.calls):
            warm = number < warming
            now += 1 / self.warm_rate if warm else self._random.expovariate(self.rate)
            tenant = number if warm else self._random.randrange(tenants)
            question = [token % self.vocabulary for token in fresh(number, self.question)]
            prompt, hashes = self.prefixes.extend(tenant, question)
            yield now, Arrival(number, prompt, self.output, hashes, warming=warm)


class AgentTurns(Traffic):
    """`agents` conversations of `turns` turns over the tenants' prefixes; each turn's prompt is all that was before.

    They begin one after another within `spread_s`; between two turns a tool takes `pause_s` on the average.
    """

    def __init__(
        self,
        agents: int,
        spread_s: float,
        block_size: int,
        *,
        tenants: int = 150,
        prefix: int = 6000,
        turns: int = 40,
        result: int = 200,
        output: int = 60,
        pause_s: float = 2.0,
        seed: int = 0,
    ) -> None:
        self.agents = agents
        self.spread_s = spread_s
        self.turns = turns
        self.result = result
        self.output = output
        self.block_size = block_size
        self._random = random.Random(seed)
        # Drawn ahead, so that a turn's pause is the same whatever order turns end in: policies see the same agents.
        self._pauses = [self._random.expovariate(1 / pause_s) for _ in range(agents * turns)]
        self.prefixes = Prefixes(tenants, prefix, block_size)

    def arrivals(self) -> Iterator[tuple[float, Arrival]]:
        """The first turns."""
        for agent in range(self.agents):
            tenant = self._random.randrange(len(self.prefixes))
            prompt, hashes = self.prefixes.extend(tenant, fresh(agent * self.turns, self.result))
            yield (
                agent * self.spread_s / self.agents,
                Arrival(agent * self.turns, prompt, self.output, hashes, str(agent)),
            )

    def after(self, call: Arrival, tokens: Sequence[int]) -> tuple[float, Arrival] | None:
        """The next turn."""
        if call.turn + 1 == self.turns:
            return None
        prompt = (*tokens, *fresh(call.number + 1, self.result))
        hashes = content_hashes(prompt, Namespace(), self.block_size, call.hashes)
        return self._pauses[call.number], Arrival(
            call.number + 1, prompt, self.output, hashes, call.session, call.turn + 1
        )


class Prefixes:
    """The tenants' prefixes, and their hashes, made once."""

    def __init__(self, count: int, length: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = [tuple(range(tenant * length, (tenant + 1) * length)) for tenant in range(count)]
        self._hashes = [content_hashes(tokens, Namespace(), block_size) for tokens in self._tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tenant: int, more: Sequence[int]) -> tuple[tuple[int, ...], list[BlockHash]]:
        """A prompt that begins with a tenant's prefix, and its hashes."""
        prompt = (*self._tokens[tenant], *more)
        return prompt, content_hashes(prompt, Namespace(), self._block_size, self._hashes[tenant])


def fresh(number: int, length: int) -> range:
    """Tokens that no prefix and no other call has."""
    begin = 10_000_000 + number * 4096
    return range(begin, begin + length)
