"""A cluster in one process without a model: the real router and real schedulers, on a clock that costs no time.

Each replica is a `Scheduler` as an engine has it; a step takes as long as `Machine` says. What comes out is what
placing requests is worth: throughput, times to the first token, prompt tokens that were not computed again.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from shoal.cluster.policies import make_policy
from shoal.cluster.traffic import Arrival, Traffic
from shoal.config import EngineConfig
from shoal.core.commands import Add, Commit, JudgedTokens, Schedule
from shoal.core.journal import BlockJournal
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Sequence as Seq
from shoal.engine.feed import BlockBatch
from shoal.runners.plan import ModelSpec, StepPlan, Want
from shoal.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a replica is: how long its steps take, and how much KV it has.

    A step takes `step_ms`, and more for each prompt token, each row that writes, and each 1,000 tokens of context of
    such rows. The defaults are about a 30B model on a pair of large GPUs.
    """

    step_ms: float = 8.0
    prompt_ms: float = 0.1
    row_ms: float = 0.05
    context_ms: float = 0.02
    kv_tokens: int = 400_000
    block_size: int = 64
    max_batch: int = 32
    max_step_tokens: int = 2048
    max_stall_ms: float = 150.0

    def ms(self, plan: StepPlan) -> float:
        """How long a step takes."""
        total = self.step_ms
        for item in plan.sequences:
            if len(item.tokens) == 1:
                total += self.row_ms + self.context_ms * item.start / 1000
            else:
                total += self.prompt_ms * len(item.tokens)
        return total


class Replica:
    """One scheduler and its clock. A step is planned when it begins and takes effect when it ends."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        blocks = machine.kv_tokens // machine.block_size
        model = ModelSpec(
            name="simulated",
            architecture="none",
            runner="none",
            precision="none",
            vocab_size=2**31,
            context_length=machine.kv_tokens,
            block_size=machine.block_size,
            num_blocks=blocks,
            kv_bytes_per_token=1,
            weight_bytes=0,
        )
        config = EngineConfig(
            max_batch=machine.max_batch,
            max_step_tokens=machine.max_step_tokens,
            max_stall_ms=machine.max_stall_ms,
            kv_memory=machine.kv_tokens,
        )
        self.scheduler = Scheduler(model, config)
        self.journal = BlockJournal(self.scheduler.kv.tree)
        self.plan: StepPlan | None = None
        self.computed = 0  # prompt tokens
        self._began = 0.0
        self._seq = 0
        self._ids = itertools.count(1)

    def add(self, prompt: Sequence[int], output: int, now: float) -> int:
        """A request comes; gives its number here."""
        seq_id = next(self._ids)
        spec = RequestSpec(prompt=tuple(prompt), sampling=SamplingParams(max_tokens=output))
        self.scheduler.apply(Add(seq_id, spec, now))
        return seq_id

    def begin(self, now: float) -> float | None:
        """Plan a step; when it will end, or None when there is nothing to do."""
        self.plan = self.scheduler.apply(Schedule(now))
        self._began = now
        return None if self.plan is None else now + self.machine.ms(self.plan) / 1e3

    def end(self, now: float) -> list[tuple[Seq, bool]]:
        """The step ends: the sequences that wrote a token in it, and whether that was their last."""
        plan, self.plan = self.plan, None
        assert plan is not None
        outcomes, wrote = {}, []
        for item in plan.sequences:
            seq = self.scheduler.sequence(item.seq_id)
            self.computed += len(item.tokens) - item.generated
            if item.want is Want.NOTHING:
                continue
            last = seq.remaining == 1
            token = written_token(seq.tokens)
            outcomes[item.seq_id] = JudgedTokens((token,), 1, FinishReason.LENGTH if last else None)
            wrote.append((seq, last))
        self.scheduler.apply(Commit(plan, outcomes, now, (now - self._began) * 1e3))
        self.scheduler.take_ended()
        self.scheduler.take_released()
        return wrote

    def news(self, now: float) -> BlockBatch | None:
        """What changed in the prefix tree since the last call."""
        changes = self.journal.take()
        if not changes:
            return None
        self._seq += 1
        return BlockBatch(self._seq, now, tuple(changes), 0, 0)


def written_token(tokens: Sequence[int]) -> int:
    """What the toy model writes after some tokens: the same wherever that is asked."""
    return (tokens[-1] * 31 + len(tokens)) % 1_000_003


class Done(NamedTuple):
    """One call, as it went. Times in seconds of the simulated clock."""

    arrived: float
    first: float
    end: float
    prompt: int
    cached: int
    output: int
    warming: bool


@dataclass(slots=True)
class SimulatedRun:
    """What a run came to. The warm-up, and the first third of the calls' time behind it, is left out of the figures.

    `computed` counts all prompt tokens of the run.
    """

    done: list[Done] = field(default_factory=list)
    computed: int = 0
    route_us: float = 0.0

    def summary(self) -> dict[str, float]:
        """The figures of a page."""
        counted = [call for call in self.done if not call.warming]
        begin, until = (pick(call.arrived for call in counted) for pick in (min, max))
        since = begin + (until - begin) / 3
        ended = [call for call in self.done if since < call.end <= until]
        came = [call for call in self.done if call.arrived > since]
        half, most = np.percentile([call.first - call.arrived for call in came], (50, 90))
        return {
            "calls": len(self.done),
            "calls_per_s": len(ended) / (until - since),
            "output_per_s": sum(call.output for call in ended) / (until - since),
            "ttft_p50_s": float(half),
            "ttft_p90_s": float(most),
            "hit_rate": sum(call.cached for call in came) / sum(call.prompt for call in came),
            "computed": self.computed,
            "route_us": self.route_us,
        }


class Simulation:
    """Runs a workload over replicas under a policy, events arriving `delay_s` late."""

    def __init__(self, machine: Machine, replicas: int, policy: str, delay_s: float) -> None:
        self.replicas = {f"replica-{n}": Replica(f"replica-{n}", machine) for n in range(replicas)}
        blocks = machine.kv_tokens // machine.block_size
        self.policy = make_policy(policy, list(self.replicas), blocks, machine.block_size)
        self.delay_s = delay_s
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._tie = itertools.count()
        self._calls: dict[tuple[str, int], Arrival] = {}
        self._clock = _Stopwatch()

    def at(self, time_s: float, do: Callable[[float], None]) -> None:
        """Put something on the agenda."""
        heapq.heappush(self._agenda, (time_s, next(self._tie), do))

    def run(self, workload: Traffic) -> SimulatedRun:
        """All calls to their ends."""
        gc.collect()
        gc.disable()  # a collection looks at every block of every replica, and frees next to nothing
        try:
            return self._run(workload)
        finally:
            gc.enable()

    def _run(self, workload: Traffic) -> SimulatedRun:
        run, now = SimulatedRun(), 0.0
        arrivals = workload.arrivals()
        self._arrive_next(arrivals, workload, run)
        while self._agenda:
            now, _, do = heapq.heappop(self._agenda)
            do(now)
        run.computed = sum(replica.computed for replica in self.replicas.values())
        run.route_us = self._clock.mean_us
        return run

    def _arrive_next(self, arrivals: Iterator[tuple[float, Arrival]], workload: Traffic, run: SimulatedRun) -> None:
        following = next(arrivals, None)
        if following is None:
            return
        time_s, call = following

        def arrive(now: float) -> None:
            self._arrive_next(arrivals, workload, run)
            self._take(call, workload, run, now)

        self.at(time_s, arrive)

    def _take(self, call: Arrival, workload: Traffic, run: SimulatedRun, now: float) -> None:
        with self._clock:
            name = self.policy.choose(call, now)
        replica = self.replicas[name]
        call.arrived = now
        self._calls[name, replica.add(call.prompt, call.output, now)] = call
        if replica.plan is None:
            self._begin(replica, workload, run, now)

    def _begin(self, replica: Replica, workload: Traffic, run: SimulatedRun, now: float) -> None:
        ends = replica.begin(now)
        self._publish(replica, now)
        if ends is not None:
            self.at(ends, lambda now: self._end(replica, workload, run, now))

    def _end(self, replica: Replica, workload: Traffic, run: SimulatedRun, now: float) -> None:
        for seq, last in replica.end(now):
            call = self._calls[replica.name, seq.seq_id]
            if len(seq.tokens) == seq.prompt_len + 1:
                call.first = now
                self.policy.started(call)
            if last:
                del self._calls[replica.name, seq.seq_id]
                self.policy.ended(call)
                cached = seq.cached_tokens
                run.done.append(Done(call.arrived, call.first, now, seq.prompt_len, cached, call.output, call.warming))
                following = workload.after(call, seq.tokens)
                if following is not None:
                    pause_s, call = following
                    self.at(now + pause_s, partial(self._take, call, workload, run))
        self._publish(replica, now)
        self._begin(replica, workload, run, now)

    def _publish(self, replica: Replica, now: float) -> None:
        batch = replica.news(now)
        if batch is None:
            return
        if self.delay_s:
            self.at(now + self.delay_s, lambda now: self.policy.hear(replica.name, batch))  # noqa: ARG005
        else:
            self.policy.hear(replica.name, batch)


class _Stopwatch:
    """Processor time of this thread spent inside, per use."""

    def __init__(self) -> None:
        self._spent = 0
        self._uses = 0
        self._begun = 0

    def __enter__(self) -> None:
        self._begun = time.thread_time_ns()

    def __exit__(self, *error: object) -> None:
        self._spent += time.thread_time_ns() - self._begun
        self._uses += 1

    @property
    def mean_us(self) -> float:
        return self._spent / max(self._uses, 1) / 1e3
