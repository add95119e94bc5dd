"""The step loop: schedule, execute, choose tokens, commit; and what each step means to the requests in it.

Synchronous and on one thread. `Engine` gives it a thread and a mailbox; tests drive it step by step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import EngineConfig
from shoal.core.commands import (
    Abort,
    Add,
    Commit,
    Defer,
    Fail,
    PreemptAll,
    Schedule,
    SetMaxRunning,
    Share,
    Unpin,
)
from shoal.core.draft import why_not
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Status
from shoal.core.stop import StopChecker
from shoal.engine.choosing import LocalState, TokenChooser, judged
from shoal.engine.inflight import NOTHING, InFlight, Output, RequestState, Sink, sink_raised
from shoal.engine.inputs import InputProcessor, PreparedRequest
from shoal.engine.kv.opening import open_tiers
from shoal.engine.kv.tiering import Tiering
from shoal.engine.record import Recorder
from shoal.engine.storm import StormWatch
from shoal.errors import RunnerError, ShoalError
from shoal.runners.base import Runner
from shoal.runners.plan import SeqId, StepPlan
from shoal.types import EngineStats, FinishReason, Namespace, StepRecord

if TYPE_CHECKING:
    from shoal.engine.pressure import MemoryWatch, Relief
    from shoal.power.governor import Governor

log = logging.getLogger("shoal.engine")


class StepLoop(InFlight[LocalState]):
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
        memory: MemoryWatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.runner = runner
        self.inputs = inputs
        self.config = config
        self.governor = governor
        self.rest_s = 0.0  # between the last step and the next: the governor wants it, or KV is on its way
        self.clock = clock
        self._recorder = None if config.record is None else Recorder(Path(config.record), runner.spec, config)
        self.scheduler = Scheduler(runner.spec, config, self._recorder)
        self.wake: Callable[[], None] = _do_nothing  # called on any thread when there may be something to do again
        self.relief = None if memory is None else _relief(memory, self.scheduler, runner)
        self.tiering = open_tiers(runner, self.scheduler, config, lambda: self.wake())
        self._storm = StormWatch(runner.spec, config)
        self._chooser = TokenChooser(self._states, runner.spec.vocab_size, inputs.grammars)
        reason = why_not(runner.spec) if config.speculation else "the settings say so"
        if reason is not None:
            log.info("speculation is off: %s", reason)
        self.failures = 0
        self.steps = 0
        self.on_step: list[Callable[[StepRecord], None]] = []
        self.prefixes: dict[SeqId, tuple[tuple[int, ...], Namespace]] = {}  # pinned ones
        self._cached_tokens = self._computed_tokens = self._prompt_fed = 0

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return self.scheduler.idle

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prepared: PreparedRequest,
        sink: Sink,
        *,
        before: Output = NOTHING,
        arrival: float | None = None,
    ) -> LocalState:
        """Take a request in. It goes on after what it wrote `before` as if never stopped, or ends where that did."""
        codec, eos_ids = self.inputs.codec, self.inputs.eos_ids
        checker = StopChecker(prepared.spec.sampling, eos_ids, codec.token_bytes if codec is not None else _no_text)
        sampler = prepared.sampler(self.runner.spec, eos_ids)
        text: list[str] = []
        outcome = judged(before.tokens, checker, text)
        written = before.tokens[: outcome.kept]
        for token in written:
            sampler.accept(token)
        self._next_id += 1
        seq_id, scores = self._next_id, list(before.prompt_logprobs)
        arrival = self.clock() if arrival is None else arrival
        self.scheduler.apply(Add(seq_id, prepared.spec, arrival, written, len(scores)))
        seq = self.scheduler.sequence(seq_id)
        if self.tiering is not None:
            self.tiering.arrived(seq)
        state = LocalState(
            request_id=request_id,
            prepared=prepared,
            seq=seq,
            sink=sink,
            sampler=sampler,
            checker=checker,
            fed=len(seq.tokens),
            text=text,
            logprobs=list(before.logprobs[: len(written)]),
            prompt_logprobs=scores,
            told=bool(scores) and not seq.scoring,
        )
        self._states[seq_id] = state
        if outcome.finish is not None:
            self.scheduler.apply(Abort(seq_id, outcome.finish))
            self._deliver()
        return state

    def share(self, state: RequestState) -> Output:
        """Put all KV a request has so far within reach of others (for a fork); gives its output so far."""
        self.scheduler.apply(Share(state.seq.seq_id))
        return state.output()

    def abort(
        self, state: RequestState, reason: FinishReason = FinishReason.ABORTED, error: ShoalError | None = None
    ) -> None:
        """End a request at this token boundary. One that has ended stays as it is; a prefill lets go of its pin."""
        self.scheduler.apply(Abort(state.seq.seq_id, reason, error))
        if state.seq.spec.prefill_only:
            self.unpin(state.seq.seq_id)
        self._deliver()

    def abort_all(self, error: ShoalError | None = None) -> None:
        """End every request, with `error` or as aborted."""
        reason = FinishReason.ERROR if error is not None else FinishReason.ABORTED
        for state in self.states:
            self.scheduler.apply(Abort(state.seq.seq_id, reason, error))
        self._deliver()

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Plan and run one step and tell the requests; None when there was nothing to compute."""
        tiering = self.tiering
        if self.relief is not None:
            self.relief.look(tiering)
        if self.governor is not None or self.relief is not None:
            self._apply_limits(self.governor)
        if tiering is not None:
            tiering.bring_back()
        record = self._step()
        if record is not None and tiering is not None:  # as much as the step made
            tiering.copy_out((record.prefill_tokens + record.decode_tokens) // self.runner.spec.block_size + 1)
        self.rest_s = self._rest_after(record)
        return record

    def _apply_limits(self, governor: Governor | None) -> None:
        """Let class low wait, and the batch be narrow, while the governor or the memory of the machine asks for it."""
        deferring = (governor is not None and governor.deferring) or (self.relief is not None and self.relief.deferring)
        if deferring != self.scheduler.queue.deferring:
            self.scheduler.apply(Defer(deferring))
        rows = governor.most_running(self.config.max_batch) if governor is not None else self.config.max_batch
        if rows != self.scheduler.max_running:
            self.scheduler.apply(SetMaxRunning(rows))

    def _rest_after(self, record: StepRecord | None) -> float:
        """Seconds until the next step: the governor's pause, or with nothing to compute, until KV may have come."""
        governor = self.governor
        if record is not None:
            return governor.pause_s(record.ms / 1e3) if governor is not None else 0.0
        if self.kv_on_its_way and self.tiering is not None:
            return self.tiering.left_s
        # When all that is left is deferred, look again when the governor may have changed its mind.
        return governor.policy.sample_s if governor is not None and self._only_waits else 0.0

    @property
    def _only_waits(self) -> bool:
        return not self.idle and not self.scheduler.running

    @property
    def kv_on_its_way(self) -> bool:
        """True while all that is to be computed waits for KV from a further tier, none of which has come yet."""
        tiering = self.tiering
        if tiering is None or self.scheduler.running or not tiering.holding or tiering.ready:
            return False
        return tiering.held == len(self.scheduler.queue)

    def copy_out(self) -> bool:
        """With nothing to compute: copy KV out to the further tiers, a slice; False when there is nothing to do."""
        return self.tiering is not None and self.tiering.copy_out()

    def _step(self) -> StepRecord | None:
        begin = self.clock()
        plan = self.scheduler.apply(Schedule(begin))
        self._release()
        if plan is None:
            self._end_stuck()
            self._deliver()
            self.start_step()
            return None
        filled = self._chooser.begin_masks(plan)
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
        decoded, drafts = self._count_new(plan)
        outcomes, ending = self._chooser.choose(plan, output, drafts)
        for command in ending:
            self.scheduler.apply(command)
        end, accepted = self.clock(), self.scheduler.accepted
        self.scheduler.apply(Commit(plan, outcomes, end, (end - begin) * 1e3, output.once))
        self.failures = 0
        self.steps += 1
        ms = (self.clock() - begin) * 1e3
        drafted, accepted = sum(map(len, drafts.values())), self.scheduler.accepted - accepted
        prefill, execute_ms = plan.num_tokens - decoded - drafted, (executed - started) * 1e3
        self._prompt_fed += prefill
        self._storm.look(end, self.scheduler.kv.tree.recomputed, self._prompt_fed, prefill)
        written = decoded * plan.chain + accepted
        record = StepRecord(plan.step, len(plan.sequences), prefill, written, ms, execute_ms, drafted, accepted)
        self._tell_listeners(record)
        self._deliver(outcomes)  # last: whoever hears of an end has the records of all its steps
        return record

    def _tell_listeners(self, record: StepRecord) -> None:
        for listener in tuple(self.on_step):
            try:
                listener(record)
            except Exception:
                log.exception("a listener of steps raised and is told no more")
                with contextlib.suppress(ValueError):
                    self.on_step.remove(listener)

    def _count_new(self, plan: StepPlan) -> tuple[int, dict[SeqId, tuple[int, ...]]]:
        """Output tokens that a pass fed for the first time, and those it fed as drafts, by sequence.

        The rest are prompt, or computed again.
        """
        new, chained = 0, plan.chain - 1
        states, drafts = self._states, {}
        for item in plan.sequences:
            state, start = states[item.seq_id], item.start
            fed, end = state.fed, start + len(item.tokens)
            drafted = end - len(state.seq.tokens)
            if drafted > 0:
                drafts[item.seq_id] = item.tokens[-drafted:]
                end -= drafted
            if end > fed:
                new += end - (fed if fed > start else start)
            if end + chained > fed:
                state.fed = end + chained
        return new, drafts

    def _fail(self, plan: StepPlan, cause: Exception) -> None:
        self.failures += 1
        error = cause if isinstance(cause, ShoalError) else RunnerError(f"the forward pass failed: {cause}")
        if error is not cause:
            error.__cause__ = cause
        log.error("step %d failed, with %d requests in it", plan.step, len(plan.sequences), exc_info=cause)
        self.scheduler.apply(Fail(tuple(item.seq_id for item in plan.sequences), error))
        self._release()
        self._deliver()

    def _end_stuck(self) -> None:
        """With nothing to compute nothing may run: what does would be looked at for ever, so it ends with an error."""
        stuck = tuple(seq.seq_id for seq in self.scheduler.running)
        if stuck:
            message = "a request that has not ended has nothing to compute"
            log.error("%s: the engine's books are wrong, and %d requests end", message, len(stuck))
            self.scheduler.apply(Fail(stuck, RunnerError(message, value=len(stuck), hint="report this; try again")))

    def _release(self) -> None:
        released = self.scheduler.take_released()
        if released:
            self.runner.release(released)

    def _deliver(self, moved: Iterable[SeqId] = ()) -> None:
        """Tell the requests that got tokens, and those that ended."""
        now = self.clock()
        for seq_id in moved:
            state = self._states[seq_id]
            if state.seq.status is Status.FINISHED:  # its last event tells both
                continue
            try:
                state.sink(state.event(now))
            except Exception as error:  # noqa: BLE001 - a caller's own fault: only its own request is to pay for it
                broken = sink_raised(state.request_id, error)
                self.scheduler.apply(Abort(seq_id, FinishReason.ERROR, broken))
        while ended := self.scheduler.take_ended():  # telling may end a request, whose end is told next
            for seq, reason, cause in ended:
                state = self._states.pop(seq.seq_id)
                state.new_text += state.checker.flush()
                self._count(state)
                self._ends.append(now)
                try:
                    state.sink(state.event(now, reason, cause))
                except Exception:
                    log.exception("the sink of request %r raised at its end", state.request_id)
        self._release()

    def _count(self, state: LocalState) -> None:
        seq = state.seq
        self._finished += 1
        self._cached_tokens += seq.cached_tokens
        self._computed_tokens += seq.computed_tokens
        if self.tiering is not None:
            self.tiering.ended(seq)
        if seq.seq_id in self.scheduler.pinned:
            self.prefixes[seq.seq_id] = (seq.spec.prompt, seq.spec.namespace)

    def leave_tiers(self) -> Tiering | None:
        """Bring nothing back and copy nothing out, until what this gives is put back by `join_tiers`."""
        left, self.tiering = self.tiering, None
        return left

    def join_tiers(self, left: Tiering | None) -> None:
        """Use tiers again. What came into the tree meanwhile is not copied out."""
        self.tiering = left
        if left is not None:
            left.skip()

    def drop_kv(self) -> None:
        """Give up all KV in memory that is not pinned; what runs goes back to the queue."""
        self.scheduler.apply(PreemptAll(drop_cached=True))
        if self.tiering is not None and self.tiering.host is not None:
            self.tiering.host.shrink(0)

    def unpin(self, seq_id: SeqId) -> None:
        """Let a pinned prefix go."""
        self.prefixes.pop(seq_id, None)
        self.scheduler.apply(Unpin(seq_id))

    def close(self) -> None:
        """Let KV be written that is to outlive the engine, and end the record, if there is one. Nothing follows."""
        if self.tiering is not None:
            self.tiering.close()
        if self._recorder is not None:
            self._recorder.close()

    def load(self) -> tuple[int, int]:
        """Prompt tokens that are still to be computed, and the contexts of running requests."""
        scheduler = self.scheduler
        queued = sum(seq.behind for seq in scheduler.queue)
        queued += sum(seq.behind for seq in scheduler.running if not seq.decoding)
        return queued, sum(len(seq.tokens) for seq in scheduler.running)

    def stats(self) -> EngineStats:
        """What is held and was done so far."""
        scheduler, spec = self.scheduler, self.runner.spec
        pool, tree, windows = scheduler.kv.pool, scheduler.kv.tree, scheduler.kv.windows
        return EngineStats(
            waiting=len(scheduler.queue),
            running=len(scheduler.running),
            finished=self._finished,
            steps=self.steps,
            cached_tokens=self._cached_tokens,
            computed_tokens=self._computed_tokens,
            preemptions=scheduler.preemptions,
            evictions=tree.evictions,
            kv_bytes=spec.kv_bytes,
            kv_held_bytes=pool.num_held * spec.block_bytes + (windows.num_needed if windows else 0) * spec.window_bytes,
            kv_cached_bytes=pool.num_cached * spec.block_bytes
            + (windows.num_spare if windows else 0) * spec.window_bytes,
            weight_bytes=spec.weight_bytes,
            step_bytes=spec.step_bytes,
            checkpoint_bytes=spec.num_checkpoints * spec.checkpoint_bytes,
            peak_bytes=self.runner.peak_bytes,
            tiers=None if self.tiering is None else self.tiering.stats(),
            drafted_tokens=scheduler.drafted,
            accepted_tokens=scheduler.accepted,
        )


def _relief(memory: MemoryWatch, scheduler: Scheduler, runner: Runner) -> Relief:
    from shoal.engine.pressure import Relief  # here: most engines watch nothing

    return Relief(memory, scheduler, runner)


def _do_nothing() -> None:
    """Nobody waits."""


def _no_text(token: int) -> bytes:  # noqa: ARG001 - the engine has no tokenizer
    return b""
