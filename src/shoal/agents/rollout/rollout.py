"""A second configuration on trial: a share of the tasks goes to it, and none any more once it is worse.

    plan.json: {"share": 0.1, "candidate": {"model": "smollm2-135m", "precision": "bf16", "max_batch": 4}}

    async with Rollout(AsyncEngine.load("smollm2-135m"), "plan.json", trace=trace) as engine:
        await graph.run(engine, question=...)       # unchanged

The plan, a file or an http URL, is read again while it runs. Who may write it decides which models are loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.agents.rollout.compare import Judge, TrialComparison, similarity
from shoal.agents.rollout.plan import RolloutPlan, read_plan
from shoal.agents.rollout.trial import OpenableEngine, Ride, Trial
from shoal.agents.run.engines import AgentEngine, LocalEngine
from shoal.agents.trace.trace import Trace
from shoal.engine.aio import AsyncEngine
from shoal.engine.batch import Prompt
from shoal.engine.handles import Expectation
from shoal.engine.remote import RemoteEngine
from shoal.errors import EngineClosedError, InvalidRequestError, ShoalError
from shoal.runners.plan import ModelSpec
from shoal.types import Event, FinishReason, Namespace, Priority, Request, Result

_TASKS = 10_000  # tasks whose side is remembered
_PROBE = "Read 1,234 words; naïve 漢字 <|im_start|>"  # texts that vocabularies split each in its own way
_SHADOWS = 4  # answers compared at a time; more are not compared


class Rollout:
    """The face of `AsyncEngine` over a stable engine and a candidate. Usable with `async with`, which opens both.

    A task goes to one side for all its requests, chosen by a hash of its name (`Request.group`, which is a graph's
    `task_id`; else the namespace's task, else the request's id). A higher share keeps the tasks that were there. After
    a roll-back all go to the stable side until the plan changes. Every decision is a record of `trace`.
    """

    def __init__(
        self,
        stable: OpenableEngine,
        source: str | Path,
        *,
        trace: Trace | None = None,
        every_s: float = 5.0,
        judge: Judge = similarity,
        load: Callable[[Mapping[str, Any]], OpenableEngine] | None = None,
    ) -> None:
        """`source` holds the plan, read every `every_s` seconds. `load` makes an engine of its `candidate` settings."""
        self.stable = stable
        self.trace = trace or Trace()
        self._source = source
        self._every_s = every_s
        self._judge = judge
        self._load = load or self._load_candidate
        self._plan: RolloutPlan | None = None
        self._trial: Trial | None = None
        self._told_unreadable: str | None = None
        self._problem: str | None = None  # why nothing is on trial though the plan says so
        self._sides: OrderedDict[str, bool] = OrderedDict()
        self._unnamed = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._shadows = 0
        self._watching: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        plan = await asyncio.to_thread(read_plan, self._source)
        await self.stable.__aenter__()
        try:
            await self._apply(plan)
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def spec(self) -> ModelSpec:
        """Facts about the stable engine's model."""
        return self.stable.spec

    def describe(self) -> dict[str, Any]:
        """Where the rollout stands, ready for JSON."""
        trial = self._trial
        share = self._plan.share if self._plan is not None and trial is not None else 0.0
        numbers = trial.comparison.describe() if trial is not None else {}
        told = {"share": share, "settings": None if trial is None else trial.settings, "problem": self._problem}
        return {**told, **numbers}

    # -- the face of an engine ----------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request from its task's side; the last has the result. Raises as that engine does."""
        ride = self.take(self._task_of(request))
        began, over = time.perf_counter(), False
        try:
            async with aclosing(ride.engine.generate(_fit(request, ride.engine))) as events:  # type: ignore[type-var]
                async for event in events:
                    if event.result is not None:
                        over = True
                        ride.ended(request, event.result, time.perf_counter() - began)
                    yield event
        except ShoalError as error:
            ride.failed(error, time.perf_counter() - began)
            raise
        except (asyncio.CancelledError, GeneratorExit):  # the caller gave up: a failure once it is too late
            if not over and request.deadline_s is not None and time.perf_counter() - began >= request.deadline_s:
                ride.failed(None, time.perf_counter() - began)
            raise
        finally:
            ride.leave()

    def take(self, task: str) -> Ride:
        """The side of a task for one call, on the event loop: for callers that submit to the engine themselves.

        They tell the ride how their requests ended, and leave it when the call is over.
        """
        current = self._trial
        trial = current if self._on_trial(task) else None
        engine = self.stable if trial is None else trial.engine
        comparison = None if current is None else current.comparison
        tally = None if comparison is None else comparison.stable if trial is None else comparison.candidate
        return Ride(engine, trial, tally, self._ended, self._failed)

    async def complete(self, request: Request) -> Result:
        """Run one request to its end."""
        async with aclosing(self.generate(request)) as events:  # it is over when this returns, not when it is collected
            async for event in events:
                if event.result is not None:
                    return event.result
        raise AssertionError("a request ended without a result")

    async def expect(
        self,
        prompts: Sequence[Prompt],
        *,
        steps: int = 0,
        compute: bool = False,
        namespace: Namespace | None = None,
        group: str = "",
    ) -> Expectation | None:
        """As `AsyncEngine.expect`, on the side of the task `group`. None where its engine takes no hints."""
        trial = self._trial if group and self._on_trial(group) else None
        engine: AgentEngine = self.stable if trial is None else trial.engine
        if not isinstance(engine, LocalEngine):
            return None
        return await engine.expect(prompts, steps=steps, compute=compute, namespace=namespace, group=group)

    async def close(self) -> None:
        """End what is in flight and close both engines. Idempotent."""
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()
            self._tasks.add(watching)
            if self._applying is not None:
                await asyncio.wait([self._applying])
            self._decide("end", **self.describe())
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        trial, self._trial = self._trial, None
        if trial is not None:
            await trial.engine.__aexit__(None, None, None)
        await self.stable.__aexit__(None, None, None)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # such as a trace that cannot be written
                raise outcome

    # -- who goes where -----------------------------------------------------------------------------------------

    def _task_of(self, request: Request) -> str:
        return request.group or request.namespace.task or request.id or f"request-{next(self._unnamed)}"

    def _on_trial(self, task: str) -> bool:
        """Whether the task belongs to the candidate; the answer stays while this trial lasts."""
        if self._trial is None or self._plan is None:
            return False
        side = self._sides.get(task)
        if side is None:
            side = fraction(task) < self._plan.share
            self._sides[task] = side
            if len(self._sides) > _TASKS:
                self._sides.popitem(last=False)
            name = "candidate" if side else "stable"
            self._decide("assign", task_id=task, side=name, share=self._plan.share)
        return side

    def _decide(self, what: str, **facts: Any) -> None:
        self.trace.write({"kind": "decision", "decision": "rollout", "action": what, **facts})

    # -- how they do --------------------------------------------------------------------------------------------

    def _ended(self, ride: Ride, request: Request, result: Result, seconds: float) -> None:
        if result.finish_reason is FinishReason.ABORTED:  # the caller's doing
            return
        trial = ride.trial
        ok = result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._count(ride, ok, seconds)
        if ok and trial is not None and trial is self._trial:
            plan = trial.comparison.plan
            if self._shadows < _SHADOWS and fraction(f"{result.id}/{result.seed}") < plan.compare:
                self._shadows += 1
                self._spawn(self._compare(trial, request, result))

    def _failed(self, ride: Ride, error: ShoalError | None, seconds: float) -> None:
        self._count(ride, False, seconds)
        if ride.trial is self._trial is not None and isinstance(error, EngineClosedError):
            self._roll_back(f"the candidate has failed: {error}")

    def _count(self, ride: Ride, ok: bool, seconds: float) -> None:
        if ride.tally is None:
            return
        ride.tally.add(ok, seconds)
        self._judge_trial(ride.trial)

    def _judge_trial(self, trial: Trial | None) -> None:
        """Roll back when the candidate is worse by more than its margin."""
        current = self._trial
        if current is None or (trial is not None and trial is not current):
            return
        cause = current.comparison.worse()
        if cause is not None:
            self._roll_back(cause)

    def _roll_back(self, cause: str) -> None:
        assert self._trial is not None
        numbers = self._trial.comparison.describe()
        numbers["candidate"] |= {"settings": self._trial.settings}
        self._problem = f"rolled back: {cause}"
        self._decide("rollback", cause=cause, **numbers)
        self._retire()

    async def _compare(self, trial: Trial, request: Request, result: Result) -> None:
        """Let the stable engine answer the same, in the background, and see how far the two agree."""
        sampling = dataclasses.replace(request.sampling, seed=result.seed)
        changes: dict[str, Any] = {"id": None, "priority": Priority.LOW, "deadline_s": None, "timeout_s": None}
        again = dataclasses.replace(request, sampling=sampling, **changes)
        try:
            if request.prompt_tokens is not None and not _read_alike(self.stable, trial.engine):
                raise InvalidRequestError("the two models have different vocabularies", param="prompt_tokens")
            async with aclosing(self.stable.generate(again)) as events:  # type: ignore[type-var]
                ends = [event.result async for event in events if event.result is not None]
        except ShoalError as error:
            self._decide("not_compared", request_id=result.id, cause=str(error))
            return
        finally:
            self._shadows -= 1
        if ends and ends[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            agreement = self._judge(ends[0], result)
            trial.comparison.agreements.append(agreement)
            self._decide("compare", request_id=result.id, agreement=round(agreement, 4))
            self._judge_trial(trial)

    # -- plans --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                plan = await asyncio.to_thread(read_plan, self._source)
            except ShoalError as error:  # the plan in force stays in force
                if str(error) != self._told_unreadable:
                    self._told_unreadable = str(error)
                    self._decide("unreadable", cause=str(error))
                continue
            self._told_unreadable = None
            if plan != self._plan:
                self._applying = asyncio.ensure_future(self._apply(plan))
                await asyncio.shield(self._applying)  # an engine that is half loaded cannot be closed: see `close`

    async def _apply(self, plan: RolloutPlan) -> None:
        """Begin a trial by a new plan; the candidate that is loaded is kept if it is the same."""
        before, self._plan = self._trial, plan
        self._sides.clear()
        self._problem = None
        if plan.share == 0:
            self._decide("stop", cause="the plan's share is 0")
            self._retire()
            return
        if before is not None and before.settings == dict(plan.candidate):
            before.comparison = TrialComparison(plan)
            self._decide("share", share=plan.share, candidate=before.settings)
            return
        self._retire()
        try:
            engine = self._load(plan.candidate)
            await engine.__aenter__()
        except ShoalError as error:
            self._problem = str(error)
            self._decide("not_loaded", candidate=dict(plan.candidate), cause=str(error))
            return
        self._trial = Trial(engine, plan)
        self._decide("begin", share=plan.share, candidate=dict(plan.candidate))

    def _retire(self) -> None:
        """Send all tasks to the stable engine; the candidate is closed when what runs on it has ended."""
        trial, self._trial = self._trial, None
        self._sides.clear()
        if trial is not None:
            self._spawn(trial.close_when_quiet())

    def _load_candidate(self, settings: Mapping[str, Any]) -> OpenableEngine:
        if "base_url" in settings:
            return RemoteEngine(**settings)
        # One machine, one governor: what slows the stable engine slows the candidate too.
        governor = self.stable.engine.governor if isinstance(self.stable, AsyncEngine) else None
        return AsyncEngine.load(**settings, governor=governor)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read_alike(stable: OpenableEngine, candidate: OpenableEngine) -> bool:
    """Whether token ids mean the same text to both."""
    if not (isinstance(stable, AsyncEngine) and isinstance(candidate, AsyncEngine)):
        return False
    ours, theirs = stable.engine.codec, candidate.engine.codec
    if ours is None or theirs is None:
        return ours is theirs and stable.spec.vocab_size == candidate.spec.vocab_size
    same = ours.encode(_PROBE, add_special=True) == theirs.encode(_PROBE, add_special=True)
    return same and ours.eos_ids == theirs.eos_ids


def _fit(request: Request, engine: AgentEngine) -> Request:
    """The request as the engine can take it: one that is not in this process knows deadlines only."""
    if request.timeout_s is None or isinstance(engine, LocalEngine):
        return request
    deadline = min(request.timeout_s, request.deadline_s or request.timeout_s)
    return dataclasses.replace(request, timeout_s=None, deadline_s=deadline)


def fraction(name: str) -> float:
    """Where a name falls between 0 and 1: the same in every process, evenly spread."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2.0**64
