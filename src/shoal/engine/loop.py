"""The step loop: schedule, execute, sample, commit; and what each step means to the requests in it.

Synchronous and on one thread. `Engine` gives it a thread and a mailbox; tests drive it step by step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shoal.config import EngineConfig
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import RANKS, Progress, Sequence
from shoal.core.stop import StopChecker
from shoal.engine.inputs import InputProcessor, PreparedRequest
from shoal.engine.record import RecordingScheduler
from shoal.errors import CallbackError, RunnerError, ShoalError
from shoal.runners.base import Runner
from shoal.runners.plan import ScheduledSequence, SeqId, StepOutput, StepPlan, Want
from shoal.sampling.sampler import INVALID_TOKEN, SamplerState, sample, sample_top, score
from shoal.types import EngineStats, Event, FinishReason, Namespace, Result, StepRecord, TokenLogprob

if TYPE_CHECKING:
    from shoal.power.governor import Governor

log = logging.getLogger("shoal.engine")

Sink = Callable[[Event], None]
"""Where a request's events go. Called on the loop's thread; must not block. One that raises ends its request."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a request had written before it went on here: as a branch of another, or restored from disk."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's second token on, where they are wanted


NOTHING = Output()


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the loop: its sequence, how it samples, what it has written, and who listens."""

    request_id: str
    prepared: PreparedRequest
    seq: Sequence
    sampler: SamplerState
    sink: Sink
    arrival: float
    fed: int  # tokens that need not be fed for the first time: the prompt, output of before, what passes have had
    first_token_at: float | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    told: bool = False  # an event went out

    def output(self) -> Output:
        """What it has written so far."""
        written = tuple(self.seq.tokens[self.seq.prompt_len :])
        return Output(written, tuple(self.logprobs), tuple(self.prompt_logprobs))

    def result(self, now: float, reason: FinishReason, error: ShoalError | None) -> Result:
        """The terminal result."""
        seq = self.seq
        return Result(
            id=self.request_id,
            tokens=tuple(seq.tokens[seq.prompt_len :]),
            text="".join(self.text),
            finish_reason=reason,
            prompt_tokens=seq.prompt_len,
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.arrival,
            latency_s=now - self.arrival,
            seed=self.prepared.seed,
            receipt=seq.receipt,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            error=error,
            queue_s=None if seq.admitted_at is None else max(seq.admitted_at - self.arrival, 0.0),
        )


class StepLoop:
    """Runs requests on one runner.

    Invariant: every state's sink gets exactly one event with a result, and nothing after it. A failed pass ends the
    requests that were in it and leaves the loop usable; `failures` counts such passes in a row.
    """

    def __init__(
        self,
        runner: Runner,
        inputs: InputProcessor,
        config: EngineConfig,
        governor: Governor | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.inputs = inputs
        self.config = config
        self.governor = governor
        self.rest_s = 0.0  # what the governor wants between the last step and the next
        self.clock = clock
        make = Scheduler if config.record is None else RecordingScheduler
        self.scheduler = make(runner.spec, config)
        self.failures = 0
        self.steps = 0
        self.on_step: list[Callable[[StepRecord], None]] = []
        self.step_starters: list[Callable[[], bool]] = []  # see `start_step`
        self.prefixes: dict[SeqId, tuple[tuple[int, ...], Namespace]] = {}  # pinned ones
        self._states: dict[SeqId, RequestState] = {}
        self._finished = self._cached_tokens = self._computed_tokens = 0
        self._ends: deque[float] = deque(maxlen=32)
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return self.scheduler.idle

    @property
    def states(self) -> list[RequestState]:
        """Requests in flight, in the order they came."""
        return list(self._states.values())

    @property
    def finished_per_s(self) -> float:
        """How many requests ended per second lately; 0 while too few have."""
        span = self._ends[-1] - self._ends[0] if len(self._ends) > 1 else 0.0
        return (len(self._ends) - 1) / span if span > 0 else 0.0

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prepared: PreparedRequest,
        sink: Sink,
        *,
        before: Output = NOTHING,
        arrival: float | None = None,
        prefill_only: bool = False,
    ) -> RequestState:
        """Take a request in. It goes on after what it wrote `before` as if never stopped, or ends where that did."""
        request, spec = prepared.request, self.runner.spec
        arrival = self.clock() if arrival is None else arrival
        codec = self.inputs.codec
        token_bytes = codec.token_bytes if codec is not None else _no_text
        checker = StopChecker(prepared.sampling, self.inputs.eos_ids, token_bytes)
        sampler = prepared.sampler(spec, self.inputs.eos_ids)
        written, text, reason = _taken_up(before.tokens, checker, sampler)
        self._next_id += 1
        seq = Sequence(
            self._next_id,
            [*prepared.tokens, *written],
            prompt_len=len(prepared.tokens),
            max_tokens=prepared.sampling.max_tokens,
            checker=checker,
            greedy=prepared.sampling.greedy,
            top=prepared.sampling.top,
            arrival=arrival,
            rank=RANKS[request.priority],
            group=request.group,
            namespace=request.namespace,
            deadline=float("inf") if request.deadline_s is None else arrival + request.deadline_s,
            timeout=float("inf") if request.timeout_s is None else request.timeout_s,
            prefill_only=prefill_only,
            path=request.critical_path,
            score=prepared.sampling.prompt_logprobs is not None,
        )
        state = RequestState(request_id, prepared, seq, sampler, sink, arrival, len(seq.tokens), text=text)
        state.logprobs += before.logprobs[: len(written)]
        if seq.scoring and before.prompt_logprobs:
            state.prompt_logprobs += before.prompt_logprobs
            seq.scored = len(before.prompt_logprobs)
            state.told = not seq.scoring
        self._states[seq.seq_id] = state
        self.scheduler.add(seq)
        if reason is not None:
            self.scheduler.abort(seq.seq_id, reason)
            self._deliver()
        return state

    def share(self, state: RequestState) -> Output:
        """Put all KV a request has so far within reach of others (for a fork); gives its output so far."""
        self.scheduler.share(state.seq)
        return state.output()

    def abort(
        self, state: RequestState, reason: FinishReason = FinishReason.ABORTED, error: ShoalError | None = None
    ) -> None:
        """End a request at this token boundary. One that has ended stays as it is; a prefill lets go of its pin."""
        self.scheduler.abort(state.seq.seq_id, reason, error)
        if state.seq.prefill_only:
            self.unpin(state.seq.seq_id)
        self._deliver()

    def abort_all(self, error: ShoalError | None = None) -> None:
        """End every request, with `error` or as aborted."""
        reason = FinishReason.ERROR if error is not None else FinishReason.ABORTED
        for state in self.states:
            self.scheduler.abort(state.seq.seq_id, reason, error)
        self._deliver()

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Plan and run one step and tell the requests; None when there was nothing to compute."""
        governor = self.governor
        if governor is None:
            return self._step()
        if governor.deferring != self.scheduler.queue.deferring:
            self.scheduler.defer(governor.deferring)
        record = self._step()
        if record is not None:
            self.rest_s = governor.pause_s(record.ms / 1e3)
        else:  # when all that is left is deferred, look again when the governor may have changed its mind
            self.rest_s = governor.policy.sample_s if not self.idle and not self.scheduler.running else 0.0
        return record

    def _step(self) -> StepRecord | None:
        begin = self.clock()
        plan = self.scheduler.schedule(begin)
        self._release()
        if plan is None:
            self._deliver()
            self.start_step()
            return None
        filled = self._begin_masks(plan)
        self.start_step()
        try:
            started = self.clock()
            output = self.runner.execute(plan)
            executed = self.clock()
        except Exception as error:  # noqa: BLE001 - the first loop boundary: whatever a backend raises ends these requests
            self._fail(plan, error)
            return None
        if filled is not None:
            filled.result()
        decoded = self._count_new(plan)
        sampled = self._sample(plan, output)
        end = self.clock()
        self.scheduler.commit(plan, sampled, end, (end - begin) * 1e3)
        self.failures = 0
        self.steps += 1
        ms = (self.clock() - begin) * 1e3
        prefill, execute_ms = plan.num_tokens - decoded, (executed - started) * 1e3
        record = StepRecord(plan.step, len(plan.sequences), prefill, decoded * plan.chain, ms, execute_ms)
        self._tell_listeners(record)
        self._deliver()  # last: whoever hears of an end has the records of all its steps
        return record

    def _tell_listeners(self, record: StepRecord) -> None:
        for listener in tuple(self.on_step):
            try:
                listener(record)
            except Exception:
                log.exception("a listener of steps raised and is told no more")
                with contextlib.suppress(ValueError):
                    self.on_step.remove(listener)

    def start_step(self) -> None:
        """Let those who handle events do so: all are out, the device is about to compute.

        A callback that gives False is called no more, and so is one that raises.
        """
        for call in tuple(self.step_starters):
            try:
                wanted = call()
            except Exception:
                log.exception("a callback at the start of a step raised and is called no more")
                wanted = False
            if not wanted:
                with contextlib.suppress(ValueError):  # the end of an engine is told from another thread
                    self.step_starters.remove(call)

    def _count_new(self, plan: StepPlan) -> int:
        """Output tokens that a pass fed for the first time; the rest are prompt, or computed again."""
        new = 0
        for item in plan.sequences:
            state, end = self._states[item.seq_id], item.start + len(item.tokens)
            new += max(0, end - max(state.fed, item.start))
            state.fed = max(state.fed, end + plan.chain - 1)
        return new

    def _begin_masks(self, plan: StepPlan) -> Future[None] | None:
        """Let the masks of the rows this pass gives be filled while the device computes."""
        samplers = [state.sampler for item in plan.sequences if (state := self._chooses(item)) is not None]
        constraints = [sampler.constraint for sampler in samplers if sampler.constraint is not None]
        grammars = self.inputs.grammars
        return grammars.begin_fill(constraints) if constraints and grammars is not None else None

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        self.failures += 1
        error = cause if isinstance(cause, ShoalError) else RunnerError(f"the forward pass failed: {cause}")
        if error is not cause:
            error.__cause__ = cause
        log.error("step %d failed, with %d requests in it", plan.step, len(plan.sequences), exc_info=cause)
        self.scheduler.fail(plan, error)
        self._release()
        self._deliver()

    def _release(self) -> None:
        released = self.scheduler.take_released()
        if released:
            self.runner.release(released)

    def _sample(self, plan: StepPlan, output: StepOutput) -> dict[SeqId, tuple[int, ...]]:
        """Next tokens of all rows; a row that is not finite ends its request alone."""
        sampled = dict(output.argmax)
        for seq_id, tokens in output.argmax.items():
            if INVALID_TOKEN in tokens:
                self._fail_row(sampled, seq_id)
        for seq_id, (ids, logits) in output.top.items():
            state = self._states[seq_id]
            token = sample_top(ids, logits, state.sampler)
            if token == INVALID_TOKEN:
                self._reject(state)
                continue
            state.sampler.accept(token)
            sampled[seq_id] = (token,)
        if output.logits is None:
            return sampled
        last, rows = self._score(plan, output.logits)
        logits = output.logits if len(last) == len(output.logits) else output.logits[last]
        chosen, logprobs = sample(logits, [state.sampler for state in rows])
        for state, token, logprob in zip(rows, chosen.tolist(), logprobs, strict=True):
            seq_id = state.seq.seq_id
            if token == INVALID_TOKEN:
                self._reject(state)
                continue
            state.sampler.accept(token)
            sampled[seq_id] = (token, *state.sampler.take_forced())
            if logprob is not None:
                state.pending_logprobs.append(logprob)
        return sampled

    def _chooses(self, item: ScheduledSequence) -> RequestState | None:
        """The request whose next token the last row of a sequence gives, if it gives one: a scored prompt goes on."""
        state = self._states[item.seq_id]
        seq = state.seq
        whole = item.start + len(item.tokens) == len(seq.tokens) and seq.max_tokens > 0
        return state if item.want is Want.LOGITS and whole else None

    def _score(self, plan: StepPlan, logits: NDArray[np.float32]) -> tuple[list[int], list[RequestState]]:
        """Take the log-probabilities of prompts; gives the rows that choose a token, and for whom."""
        last, states, at = [], [], 0
        for item in plan.sequences:
            if item.want is not Want.LOGITS:
                continue
            state = self._states[item.seq_id]
            rows, at = logits[at : at + item.rows], at + item.rows
            if state.seq.scoring and not _take_scores(state, item, rows):
                self._reject(state)
            elif self._chooses(item) is not None:
                last.append(at - 1)
                states.append(state)
        return last, states

    def _reject(self, state: RequestState) -> None:
        """End a request whose row left no token to choose, alone."""
        seq_id, constraint = state.seq.seq_id, state.sampler.constraint
        if constraint is not None and constraint.error is not None:
            error = RunnerError(f"the grammar gave up: {constraint.error}", hint="make the schema or grammar simpler")
            self.scheduler.abort(seq_id, FinishReason.ERROR, error)
        else:
            self.scheduler.fail_sequence(seq_id, _not_finite())

    def _fail_row(self, sampled: dict[SeqId, tuple[int, ...]], seq_id: SeqId) -> None:
        del sampled[seq_id]
        self.scheduler.fail_sequence(seq_id, _not_finite())

    def _deliver(self) -> None:
        while progress := self.scheduler.take_progress():  # telling may end a request, whose end is told next
            now = self.clock()
            for item in progress:
                self._tell(item, now)
        self._release()

    def _tell(self, item: Progress, now: float) -> None:
        state = self._states[item.seq.seq_id]
        if item.tokens and state.first_token_at is None:
            state.first_token_at = now
        if item.text:
            state.text.append(item.text)
        logprobs: tuple[TokenLogprob, ...] = ()
        if state.pending_logprobs:
            logprobs = tuple(state.pending_logprobs[: len(item.tokens)])  # a stop token's is not part of the output
            state.logprobs += logprobs
            state.pending_logprobs.clear()
        result, scored = None, () if state.told else tuple(state.prompt_logprobs)
        state.told = True
        if item.finish is not None:
            del self._states[item.seq.seq_id]
            self._count(state)
            self._ends.append(now)
            result = state.result(now, item.finish, item.error)
        try:
            state.sink(Event(state.request_id, item.tokens, item.text, logprobs, result, scored))
        except Exception as error:  # noqa: BLE001 - a caller's own fault: only its own request is to pay for it
            self._end_broken(state, error)

    def _end_broken(self, state: RequestState, cause: Exception) -> None:
        """A request's sink raised: end that request, if it has not ended."""
        log.error("the sink of request %r raised", state.request_id, exc_info=cause)
        error = CallbackError(f"the sink of request {state.request_id!r} raised {cause!r}", hint="mend the sink")
        error.__cause__ = cause
        self.scheduler.abort(state.seq.seq_id, FinishReason.ERROR, error)

    def _count(self, state: RequestState) -> None:
        seq = state.seq
        self._finished += 1
        self._cached_tokens += seq.cached_tokens
        self._computed_tokens += seq.computed_tokens
        if seq.seq_id in self.scheduler.pinned:
            self.prefixes[seq.seq_id] = (state.prepared.tokens, seq.namespace)

    def unpin(self, seq_id: SeqId) -> None:
        """Let a pinned prefix go."""
        self.prefixes.pop(seq_id, None)
        self.scheduler.unpin(seq_id)

    def stats(self) -> EngineStats:
        """What is held and was done so far."""
        scheduler, spec = self.scheduler, self.runner.spec
        pool, tree = scheduler.kv.pool, scheduler.kv.tree
        return EngineStats(
            waiting=len(scheduler.queue),
            running=len(scheduler.running),
            finished=self._finished,
            steps=self.steps,
            cached_tokens=self._cached_tokens,
            computed_tokens=self._computed_tokens,
            preemptions=scheduler.preemptions,
            evictions=tree.evictions,
            kv_bytes=pool.total * spec.block_bytes,
            kv_held_bytes=pool.num_held * spec.block_bytes,
            kv_cached_bytes=pool.num_cached * spec.block_bytes,
            weight_bytes=spec.weight_bytes,
            step_bytes=spec.step_bytes,
            checkpoint_bytes=spec.num_checkpoints * spec.checkpoint_bytes,
            peak_bytes=self.runner.peak_bytes,
        )


def _taken_up(
    written: tuple[int, ...], checker: StopChecker, sampler: SamplerState
) -> tuple[tuple[int, ...], list[str], FinishReason | None]:
    """Bring `checker` and `sampler` to where they were after `written`.

    Gives the tokens that are output, the text of each, and why the request had ended with them (None: it goes on).
    """
    text: list[str] = []
    for count, token in enumerate(written):
        verdict = checker.push(token)
        text.append(verdict.text)
        if verdict.is_output:
            sampler.accept(token)
        if verdict.reason is not None:
            return written[: count + verdict.is_output], text, verdict.reason
    return written, text, None


def _take_scores(state: RequestState, item: ScheduledSequence, rows: NDArray[np.float32]) -> bool:
    """Note what `rows`, after the last tokens fed, say of the prompt tokens behind; False when they are not finite."""
    seq, end = state.seq, item.start + len(item.tokens)
    behind = seq.tokens[end - item.rows + 1 : min(end + 1, seq.prompt_len)]
    scores = score(rows[: len(behind)], behind, state.prepared.sampling.prompt_logprobs or 0)
    state.prompt_logprobs += scores
    return len(scores) == len(behind)


def _not_finite() -> RunnerError:
    message = "the model gave logits that are not finite numbers"
    return RunnerError(message, value=float("nan"), hint="its KV was dropped; try again")


def _no_text(token: int) -> bytes:  # noqa: ARG001 - the engine has no tokenizer
    return b""
