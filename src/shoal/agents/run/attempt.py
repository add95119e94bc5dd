"""One agent's work on one node: attempts within their time, then what the policy says."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.agents.build.agent import Agent
from shoal.agents.build.node import Node
from shoal.agents.build.policy import Default, FailRun, Fallback, Last, Retry, Skip, attempts_of
from shoal.agents.run.cache import key_of
from shoal.agents.run.engines import leaving
from shoal.agents.run.events import EventKind, GraphEvent, Outcome, State
from shoal.agents.run.prompts import MissingInputError, PendingInputError, layout_of
from shoal.agents.trace.trace import Attempt
from shoal.errors import (
    CheckpointError,
    EngineClosedError,
    GraphError,
    MemoryPressureError,
    PowerLimitError,
    QueueFullError,
    RunnerError,
    ShoalError,
)
from shoal.processes import kv_mb, process_mb
from shoal.sampling.sampler import derive_seed
from shoal.types import FinishReason, Message, Priority, Request, Result, SamplingParams

if TYPE_CHECKING:
    from shoal.agents.run.run import Run

_GRACE_S = 0.1  # the engine ends a request that is out of time at its next token; this long it is waited for


@dataclass(frozen=True, slots=True)
class Tried:
    """How one attempt went: `outcome` as in the trace, `cause` None if well.

    `again` says whether another attempt may go better, not before `pause_s`.
    """

    value: Any = None
    text: str = ""
    cause: str | None = None
    outcome: str = "ok"
    again: bool = False
    pause_s: float = 0.0


async def pursue(run: Run, node: Node, agent: Agent, limit: float) -> Outcome:
    """Let `agent` write for `node` until it succeeds or its policy or its time is used up.

    `limit` is on the clock of `time.perf_counter`. Of the time until then, what a fallback needs is kept back.
    """
    allowed, last = attempts_of(agent.on_failure)
    own_limit = limit - _reserve(last, limit)
    try:
        messages = _messages(run, node, agent)
    except MissingInputError as error:
        return Outcome(State.SKIPPED, cause=str(error))
    except GraphError as error:
        return await settle(run, node, last, str(error), limit)
    run.chats[node] = messages
    cause = ""
    for number in range(allowed):
        tried = await _attempt(run, node, agent, messages, own_limit)
        if tried.cause is None:
            return Outcome(State.DONE, tried.value, tried.text)
        cause = tried.cause
        if not tried.again or number + 1 == allowed:
            break
        policy = agent.on_failure
        assert isinstance(policy, Retry)
        pause = max(policy.backoff_s * policy.factor**number, tried.pause_s)
        if time.perf_counter() + pause >= own_limit:
            cause = f"{cause}; no time is left to try again"
            break
        await asyncio.sleep(pause)
    return await settle(run, node, last, cause, limit)


async def settle(run: Run, node: Node, last: Last, cause: str, limit: float) -> Outcome:
    """What becomes of a node that has failed for `cause`."""
    if isinstance(last, Skip):
        return Outcome(State.SKIPPED, cause=cause)
    if isinstance(last, Default):
        return Outcome(State.DEFAULTED, last.value, cause=cause)
    if isinstance(last, FailRun):
        return Outcome(State.FAILED, cause=cause)
    run.decide("fallback", node, {"to": last.agent.name, "cause": cause})
    outcome = await pursue(run, node, last.agent, limit)
    if outcome.state is State.DONE:
        return dataclasses.replace(outcome, state=State.DEFAULTED, cause=cause)
    return dataclasses.replace(outcome, cause=f"{cause}; then {last.agent.name}: {outcome.cause}")


def _reserve(last: Last, limit: float) -> float:
    if not isinstance(last, Fallback) or limit == math.inf:
        return 0.0
    left = max(limit - time.perf_counter(), 0.0)
    return min(last.reserve_s or last.agent.timeout_s or left / 4, left)


def _messages(run: Run, node: Node, agent: Agent) -> list[Message]:
    return layout_of(run, node, agent, history_of(run, node)).messages()


def history_of(run: Run, node: Node) -> tuple[Message, ...]:
    """The conversation that a node goes on with, if any. `PendingInputError` while that has not ended."""
    before = node.continues
    if before is None:
        return ()
    outcome = run.outcome(before)
    if outcome is None:
        raise PendingInputError(f"{node.id} goes on with {before.id}, which has not ended", value=before.id)
    if outcome.state not in (State.DONE, State.DEFAULTED) or before not in run.chats:
        return ()
    return (*run.chats[before], {"role": "assistant", "content": outcome.shown})


async def _attempt(run: Run, node: Node, agent: Agent, messages: list[Message], limit: float) -> Tried:
    """One attempt, and its record."""
    left = limit - time.perf_counter()
    if left <= 0:
        return Tried(cause="its time was up before it began", outcome="timeout")
    log = _Log(run, node, agent)
    patience = left if run.local else min(left, agent.timeout_s or math.inf)
    request = Request(
        messages=messages,
        sampling=_sampling(run, node, agent, log.number),
        id=log.request_id,
        priority=Priority(agent.priority),
        deadline_s=None if patience == math.inf else patience,
        timeout_s=agent.timeout_s if run.local else None,
        group=run.task_id,
        namespace=agent.namespace(run.graph.namespace, run.task_id),
        critical_path=run.critical_path(node),
    )
    key = key_of(request)
    ending: ShoalError | None = None
    try:
        async with asyncio.timeout(None if patience == math.inf else patience + _GRACE_S):
            same = await run.memo.known(key)
            if same is None:
                async with leaving(run.memo.generate(run.engine, request, key)) as events:
                    async for event in events:
                        log.take(event.text, len(event.tokens), event.result)
            else:
                log.repeat(same)
        ending = None if log.result is None else log.result.error
        tried = _judge(agent, log.result, limit)
    except TimeoutError:
        tried = _late(agent, limit)
    except (MemoryPressureError, PowerLimitError, QueueFullError) as error:
        tried = Tried(cause=str(error), outcome="failed", again=True, pause_s=error.retry_after_s)
    except CheckpointError:
        raise
    except ShoalError as error:
        ending = error
        tried = Tried(cause=str(error), outcome="failed", again=isinstance(error, RunnerError))
    except asyncio.CancelledError:
        log.end("cancelled", "the node was cancelled")
        raise
    if isinstance(ending, EngineClosedError):
        run.checkpoint.close()  # the nodes do not fail by themselves: what follows is left to a resume
    log.end(tried.outcome, tried.cause)
    return tried


def _sampling(run: Run, node: Node, agent: Agent, number: int) -> SamplingParams:
    """The agent's sampling with its schema, and a seed that each node and each attempt has for itself."""
    sampling = agent.sampling
    seed = derive_seed(run.seed if sampling.seed is None else sampling.seed, zlib.crc32(node.id.encode()))
    schema = sampling.json_schema if agent.output is None else agent.output.json_schema
    return dataclasses.replace(sampling, seed=derive_seed(seed, number), json_schema=schema)


def _judge(agent: Agent, result: Result | None, limit: float) -> Tried:
    """What an ended request is worth."""
    if result is None:
        return Tried(cause="the engine ended the request without a result", outcome="failed", again=True)
    if result.finish_reason is FinishReason.TIMEOUT:
        return _late(agent, limit)
    if result.finish_reason is FinishReason.ERROR:
        again = isinstance(result.error, RunnerError)
        return Tried(cause=str(result.error), outcome="failed", again=again)
    if result.finish_reason is FinishReason.ABORTED:
        return Tried(cause="the engine aborted the request", outcome="failed")
    if agent.output is None:
        return Tried(result.text, result.text)
    try:
        return Tried(agent.output.parse(result.text), result.text)
    except ValueError as error:
        why = " ".join(str(error).split())[:200]
        if result.finish_reason is FinishReason.LENGTH:
            why = f"it was cut at {len(result.tokens)} tokens"
        cause = f"the output does not fit the schema: {why}"
        return Tried(cause=cause, outcome="invalid", again=agent.sampling.temperature > 0)


def _late(agent: Agent, limit: float) -> Tried:
    """Out of time: of this attempt, after which another may follow, or of the whole node."""
    if agent.timeout_s is not None and time.perf_counter() < limit:
        return Tried(cause=f"the attempt took longer than {agent.timeout_s:g} s", outcome="timeout", again=True)
    return Tried(cause="the deadline has passed", outcome="timeout")


class _Log:
    """What one attempt has brought so far, and the record it becomes."""

    def __init__(self, run: Run, node: Node, agent: Agent) -> None:
        self._run, self._node, self._agent = run, node, agent
        self.number = run.next_attempt(node)
        self.request_id = f"{run.task_id}/{node.id}/{self.number}"
        self.result: Result | None = None
        self._began = run.now_ms
        self._first: float | None = None
        self._tokens = 0
        self._same: str | None = None

    def take(self, text: str, tokens: int, result: Result | None) -> None:
        """News from the engine."""
        if self._first is None and (text or tokens):
            self._first = self._run.now_ms
            self._run.keeper.joined(self._node)
        self._tokens += tokens
        self.result = result
        if text:
            self._run.tell(GraphEvent(EventKind.TEXT, self._node, text=text, attempt=self.number))

    def repeat(self, result: Result) -> None:
        """The same greedy call had this result."""
        self.result = result
        self._same = result.id
        self._run.tell(GraphEvent(EventKind.TEXT, self._node, text=result.text, attempt=self.number))

    def end(self, outcome: str, cause: str | None) -> None:
        """Write the record."""
        record = self._run.record(self._attempt(outcome, cause).record())
        self._run.spans.attempt(self._node.id, record)
        self._run.tell(GraphEvent(EventKind.ATTEMPT, self._node, attempt=self.number, record=record))

    def _attempt(self, outcome: str, cause: str | None) -> Attempt:
        run, result, now = self._run, self.result, self._run.now_ms
        queue_ms = ttft_ms = joined = None
        cached = prompt = 0
        if self._same is not None and result is not None:
            prompt = cached = result.prompt_tokens
            cause = cause or f"the same call as {self._same}"
        elif result is not None:
            queue_ms = None if result.queue_s is None else result.queue_s * 1e3
            ttft_ms = None if result.ttft_s is None else result.ttft_s * 1e3
            prompt, cached = result.prompt_tokens, result.receipt.cached_tokens
            joined = None if queue_ms is None else self._began + queue_ms
        elif self._first is not None:
            ttft_ms = self._first - self._began
        generated = self._tokens if self._same is None else 0
        kv = run.engine.spec.kv_bytes_per_token
        return Attempt(
            request_id=self.request_id,
            task_id=run.task_id,
            agent_id=self._node.id,
            attempt=self.number,
            cache_hit=cached > 0,
            prefix_tokens=cached,
            generated_tokens=generated,
            queue_ms=_ms(queue_ms),
            ttft_ms=_ms(ttft_ms),
            latency_ms=round(now - self._began, 3),
            kv_mb=kv_mb(kv, prompt + generated - cached) if kv and self._same is None else None,
            process_mb=process_mb() if run.local else None,
            outcome=outcome,
            cause=cause,
            agent=self._agent.name,
            prompt_tokens=prompt,
            seed=None if result is None else result.seed,
            priority=str(self._agent.priority),
            submitted_at_ms=round(self._began, 3),
            joined_at_ms=_ms(joined),
            left_at_ms=round(now, 3),
        )


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
