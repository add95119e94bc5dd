"""What becomes of requests when replicas fail: each fault many times under load, and every request accounted for.

A wave of requests is sent through a door to replicas that are processes started here; while they run one replica is
harmed. Then every request must have ended once: with the tokens that one engine alone writes, or with an error by
name, and one that had not begun must have been sent elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from shoal.cluster.door import load_replica
from shoal.cluster.links import ReplicaLink
from shoal.cluster.local import LocalCluster
from shoal.engine.feed import BlockBatch
from shoal.engine.handles import Handle
from shoal.errors import EngineClosedError, ReplicaLostError, RunnerError
from shoal.types import Event, Request, Result, SamplingParams

_WAVE = 12  # requests at a time
_SILENCE_S = 0.6
_END_S = 60.0  # a wave that takes longer is a fault of ours
_SETTINGS: Mapping[str, Any] = {"max_batch": 4, "step_s": 0.004}


@dataclass(slots=True)
class FaultTally:
    """What happened to the requests of one fault's waves."""

    fault: str
    times: int = 0
    requests: int = 0
    whole: int = 0  # ended with the tokens of one engine alone
    named: int = 0  # ended with an error by name after they had begun, or with their door
    resent: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Every request is accounted for."""
        return not self.wrong and self.whole + self.named == self.requests

    def __str__(self) -> str:
        end = "" if self.sound else f"; WRONG: {self.wrong[:3]}"
        return (
            f"{self.fault}: {self.times} times, {self.requests} requests, {self.whole} whole,"
            f" {self.named} ended by name, {self.resent} sent elsewhere{end}"
        )


class LossyLink(ReplicaLink):
    """A replica of whose events some never come, and the others late."""

    async def batches(self, after: int | None) -> AsyncGenerator[BlockBatch, None]:
        """With gaps."""
        async for batch in super().batches(after):
            if random.random() < 0.3:
                continue
            await asyncio.sleep(0.05)
            yield batch


class FaultBench(LocalCluster):
    """A cluster to be harmed, and what one engine alone would write."""

    def __init__(
        self, model: str, replicas: int, settings: Mapping[str, Any], link: type[ReplicaLink] = ReplicaLink
    ) -> None:
        settings = {**(_SETTINGS if model == "toy" else {"max_batch": 4}), **settings}
        super().__init__(model, replicas, settings, link=link, silence_s=_SILENCE_S, quiet=True)
        self.random = random.Random(7)
        alone = {name: value for name, value in settings.items() if name not in ("step_s", "fail_every")}
        self._alone = load_replica(model, alone)

    def send(self, seen: dict[str, list[Event]]) -> list[Handle]:
        """A wave of requests; their events are collected in `seen` by the requests' prompts."""
        handles = []
        for _ in range(_WAVE):
            prompt = f"{'tenant ' * 30}{self.random.randrange(4)} asks question {self.random.randrange(10**6)}"
            events = seen.setdefault(prompt, [])
            length = self.random.randrange(10, 60)
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.7, seed=1)
            handles.append(self.door.submit(Request(prompt=prompt, sampling=sampling), sink=events.append))
        return handles

    def settle(self, handles: list[Handle], seen: dict[str, list[Event]], tally: FaultTally) -> None:
        """Wait for a wave to end, and account for it."""
        end = time.monotonic() + _END_S
        while time.monotonic() < end and not all(told and told[-1].finished for told in seen.values()):
            time.sleep(0.01)
        for handle, (prompt, events) in zip(handles, seen.items(), strict=True):
            tally.requests += 1
            ends = [event.result for event in events if event.result is not None]
            if len(ends) != 1 or not events[-1].finished:
                tally.wrong.append(f"{len(ends)} ends of {prompt[-12:]!r}")
            else:
                self._judge(ends[0], handle, tally)

    def _judge(self, result: Result, handle: Handle, tally: FaultTally) -> None:
        spec = handle._prepared.spec
        expected = self._alone.complete(Request(prompt_tokens=spec.prompt, sampling=spec.sampling)).tokens
        if result.error is None:
            whole = result.tokens == expected and result.finish_reason in ("length", "stop")
            tally.whole += whole
            tally.named += not whole and result.finish_reason == "aborted"
        elif not isinstance(result.error, ReplicaLostError | RunnerError | EngineClosedError):
            tally.wrong.append(f"an error without a name: {result.error!r}")
        elif result.tokens != expected[: len(result.tokens)]:
            tally.wrong.append("other tokens before the error")
        elif not result.tokens and tally.fault in ("killed", "stopped"):
            tally.wrong.append(f"one that had not begun was not sent elsewhere: {result.error}")
        else:
            tally.named += 1

    def sent_elsewhere(self) -> int:
        """Requests that this door has sent a second time."""
        return sum(int(row["resent"]) for row in self.door.describe()["replicas"])

    def knows(self) -> bool:
        """Whether the router knows of blocks, where there are some."""
        there = any(stats["kv_cached_bytes"] for stats in self._stats())
        return not there or any(row["held_blocks"] for row in self.door.describe()["replicas"])

    def idle(self) -> bool:
        """Whether no replica has anything to do."""
        return all(stats["waiting"] == stats["running"] == 0 for stats in self._stats())

    def _stats(self) -> list[dict[str, Any]]:
        return [httpx.get(f"{each.url}/stats", timeout=10).json()["engine"] for each in self.processes.values()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alone.close()
        super().__exit__(kind, error, trace)


def _killed(bench: FaultBench) -> Callable[[], None]:
    name = bench.random.choice(list(bench.processes))
    bench.processes[name].kill()
    return lambda: bench.restart(name)


def _stopped(bench: FaultBench) -> Callable[[], None]:
    victim = bench.random.choice(list(bench.processes.values()))
    victim.signal(signal.SIGSTOP)
    again = threading.Timer(4 * _SILENCE_S, lambda: victim.signal(signal.SIGCONT))
    again.start()

    def mend() -> None:
        again.join()
        bench.wait()

    return mend


def _slow(bench: FaultBench) -> Callable[[], None]:
    victim = bench.random.choice(list(bench.processes.values()))
    for _ in range(4):
        victim.signal(signal.SIGSTOP)
        time.sleep(_SILENCE_S / 4)
        victim.signal(signal.SIGCONT)
        time.sleep(0.02)
    return lambda: None


def _nothing(bench: FaultBench) -> Callable[[], None]:
    del bench
    return lambda: None


def _router(bench: FaultBench) -> Callable[[], None]:
    bench.door.close()

    def mend() -> None:
        end = time.monotonic() + _END_S
        while not bench.idle() and time.monotonic() < end:  # what the old door had sent is ended there
            time.sleep(0.02)
        bench.door = bench.open()
        while not bench.knows() and time.monotonic() < end:
            time.sleep(0.02)
        assert bench.knows(), "the new door does not know what the replicas hold"

    return mend


@dataclass(frozen=True, slots=True)
class Fault:
    """How replicas are harmed, with what settings, and by which links they are reached."""

    harm: Callable[[FaultBench], Callable[[], None]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    link: type[ReplicaLink] = ReplicaLink


FAULTS = {
    "killed": Fault(_killed),
    "stopped": Fault(_stopped),
    "slow": Fault(_slow),
    "out of memory": Fault(_nothing, {"fail_every": 150}),
    "router restarted": Fault(_router),
    "events lost and late": Fault(_nothing, link=LossyLink),
}


def run_fault(name: str, times: int, *, model: str = "toy", replicas: int = 3) -> FaultTally:
    """One fault, so many times, each in the middle of a wave of requests."""
    fault, tally = FAULTS[name], FaultTally(name)
    with FaultBench(model, replicas, fault.settings, fault.link) as bench:
        for _ in range(times):
            seen: dict[str, list[Event]] = {}
            before = bench.sent_elsewhere()
            handles = bench.send(seen)
            time.sleep(bench.random.uniform(0.0, 0.15))
            mend = fault.harm(bench)
            bench.settle(handles, seen, tally)
            tally.resent += max(bench.sent_elsewhere() - before, 0)
            mend()
            tally.times += 1
    return tally
