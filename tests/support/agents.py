"""Engines for tests of graphs: the toy model, a scripted one, and one that misbehaves at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.agents import AgentEngine
from shoal.core.audit import check_integrity
from shoal.engine.aio import AsyncEngine
from shoal.errors import RunnerError, ShoalError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import ModelSpec
from shoal.types import Event, FinishReason, Request, Result, SamplingParams
from tests.support.engines import toy_engine

T = TypeVar("T")
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
Answer = str | ShoalError | float
"""What a scripted engine does: write a text, fail, or hang for some seconds."""


def go(work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
    return asyncio.run(asyncio.wait_for(work, timeout_s))


@asynccontextmanager
async def toy(runner: FakeRunner | None = None, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """An engine on the toy model, whose books must balance and hold nothing in the end."""
    async with AsyncEngine(toy_engine(runner, **settings)) as engine:
        yield engine
        await asyncio.to_thread(nothing_held, engine)


def nothing_held(engine: AsyncEngine) -> None:
    """The books balance, nothing runs, no KV is held, nothing is announced any more."""

    def audit() -> None:
        scheduler = engine.engine._loop.scheduler
        check_integrity(scheduler)
        assert scheduler.idle, "requests are left over"
        assert scheduler.kv.pool.num_held == 0, "KV is held"
        assert not scheduler.kv.tree.eviction._announced, "announcements are left over"

    for _ in range(200):  # the abort of a request that was left takes effect at the next token
        if engine.engine.call(lambda: engine.engine._loop.idle):
            break
    engine.engine.call(audit)


class ScriptedEngine:
    """Has the face of an engine and no more: answers come from a function of the request, or from a list per agent."""

    def __init__(self, answer: Callable[[Request], Answer] | Mapping[str, list[Answer]] | None = None) -> None:
        self.requests: list[Request] = []
        self.left: list[str] = []  # requests whose reader went away
        self._answer = answer

    @property
    def spec(self) -> ModelSpec:
        return FakeRunner().spec

    def prompts(self, agent: str) -> list[str]:
        """The last message of each request of an agent."""
        return [str((r.messages or [{}])[-1]["content"]) for r in self.requests if agent_of(r) == agent]

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        answer: Answer = f"<{agent_of(request)}>"
        if callable(self._answer):
            answer = self._answer(request)
        elif self._answer is not None and self._answer.get(agent_of(request)):
            answer = self._answer[agent_of(request)].pop(0)
        name = request.id or "?"
        done = False
        try:
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = "late"
            await asyncio.sleep(0)
            if isinstance(answer, ShoalError):
                if not isinstance(answer, RunnerError):
                    raise answer
                yield Event(name, result=result(name, "", FinishReason.ERROR, answer))
            else:
                yield Event(name, (1,), answer)
                yield Event(name, result=result(name, answer))
            done = True
        finally:
            if not done:
                self.left.append(name)


def agent_of(request: Request) -> str:
    """The node that a request is of."""
    return (request.id or "").split("/")[1]


def result(name: str, text: str, reason: FinishReason = FinishReason.STOP, error: ShoalError | None = None) -> Result:
    return Result(name, (1,), text, reason, 10, 0.001, 0.002, 0, error=error)


class FlakyEngine:
    """Passes requests to a real engine; some hang or fail on the way, by the request's id and a seed."""

    def __init__(self, engine: AsyncEngine, seed: int, *, failing: float = 0.15, hanging: float = 0.05) -> None:
        self._engine = engine
        self._seed = seed
        self._failing = failing
        self._hanging = hanging

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    async def expect(self, prompts: Any, **settings: Any) -> Any:
        return await self._engine.expect(prompts, **settings)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        luck = random.Random(f"{self._seed}{request.id}").random()
        if luck < self._failing:
            raise RunnerError("bad luck")
        if luck < self._failing + self._hanging:
            await asyncio.sleep(3600)
        events = self._engine.generate(request)
        try:
            async for event in events:
                if luck > 0.95 and event.tokens and not event.finished:
                    return  # the engine loses the request
                yield event
        finally:
            await events.aclose()


def _face(engine: ScriptedEngine | FlakyEngine | AsyncEngine) -> AgentEngine:
    return engine  # all three have the face of an engine, says the type checker
