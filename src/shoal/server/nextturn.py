"""The next turn of a chat, prepared while its caller thinks.

Many templates show an answer of the history otherwise than it was generated: without what was thought, with
another space in a tool call, with a line more. What comes back then parts from what is cached where the answer
begins. So when an answer has ended and nothing else is to do, the prompt of the turn to come is computed as far
as it is certain: in the lowest class, given up as soon as a call comes. After a tool call its prefix is also
kept for a while: the result will come back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.engine.engine import Engine
from shoal.engine.handles import Handle, PrefixCache, pinned_by
from shoal.errors import ShoalError
from shoal.server.openai.prompts import Chat, chat_tokens
from shoal.server.openai.schemas import ChatMessage
from shoal.types import Event, Namespace, Priority, Request, SamplingParams

if TYPE_CHECKING:
    from shoal.server.generation import Api
    from shoal.server.hub import Served

TOOL_PAUSE_S = 300.0
"""How long the KV of a chat that waits for the result of a tool is evicted late."""


class NextTurns:
    """What is being prepared. All of it belongs to the event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._running: set[Handle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0  # so far: a task that was begun before the last one gives up

    def make_way(self) -> None:
        """A call comes: what is being prepared is given up; what of it is computed stays cached."""
        self._calls += 1
        for handle in self._running:
            handle.abort()

    def answered(self, served: Served, namespace: Namespace, chat: Chat, answer: ChatMessage) -> None:
        """A chat has this answer."""
        hub = self._api.hub
        if not hub.stopping and served.of is None:
            work = self._prepare(served, namespace, chat, answer, self._calls)
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prepare(self, served: Served, namespace: Namespace, chat: Chat, answer: ChatMessage, calls: int) -> None:
        engine = served.engine
        if (served.leases and not answer.tool_calls) or engine.closed:
            return
        with suppress(ShoalError):
            tokens = await asyncio.to_thread(next_turn, engine, chat, answer)
            if not tokens:
                return
            if answer.tool_calls:
                engine.keep(tokens, TOOL_PAUSE_S, namespace=namespace)
            if calls == self._calls and not served.leases:
                await self._prefill(engine, tokens, namespace)

    async def _prefill(self, engine: Engine, tokens: tuple[int, ...], namespace: Namespace) -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        outbox = self._api.outbox
        engine.on_step_start(outbox.wake)
        request = Request(
            prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=1),
            priority=Priority.LOW,
            namespace=namespace,
        )
        handle = engine.prefill(request, sink=outbox.sink(events.put_nowait))
        self._running.add(handle)
        try:
            result = (await events.get()).result
        finally:
            self._running.discard(handle)
        assert result is not None
        pinned_by(engine, handle, result).release()

    async def close(self) -> None:
        """Wait until what was being prepared has ended."""
        self.make_way()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)


def next_turn(engine: Engine, chat: Chat, answer: ChatMessage) -> tuple[int, ...]:
    """The tokens with which the next turn's prompt begins, whatever is asked in it, or comes back from the tools."""
    codec = engine.codec
    if codec is None:
        return ()
    prompts = []
    for text in ("A", "7"):
        more = [ChatMessage(role="tool", tool_call_id=call.id, content=text) for call in answer.tool_calls or ()] or [
            ChatMessage(role="user", content=text)
        ]
        messages = [*chat.messages, answer, *more]
        prompts.append(chat_tokens(codec, Chat(messages, chat.tools, chat.variables, chat.effort)))
    return PrefixCache.longest_common_prefix(prompts)
