"""The simulation held against real replicas on this machine: prompt tokens computed, for the same calls one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shoal.cluster.config import ClusterConfig
from shoal.cluster.door import open_door
from shoal.cluster.links import ReplicaLink
from shoal.cluster.processes import ReplicaProcess
from shoal.cluster.simulate import Machine, Simulation, policies
from shoal.cluster.traffic import TenantCalls
from shoal.runners.plan import ModelSpec
from shoal.types import Request, SamplingParams

_WITHIN = 0.05
_TENANTS, _PREFIX, _QUESTION, _OUTPUT = 6, 480, 60, 4
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ComparedTokens:
    """Prompt tokens computed by real replicas and by simulated ones."""

    replicas: int
    prompt: int
    real: int
    simulated: int

    @property
    def close(self) -> bool:
        """True within 5 %."""
        return abs(self.real - self.simulated) <= _WITHIN * self.simulated

    def __str__(self) -> str:
        told = f"{self.real} computed, {self.simulated} in the simulation ({self.real / self.simulated:.3f})"
        return f"{self.replicas} replicas: {self.prompt} tokens of prompts, {told}"


def calls_of(count: int, block_size: int) -> TenantCalls:
    """The calls of both; tokens that every vocabulary has."""
    return TenantCalls(
        count, 1.0, block_size, tenants=_TENANTS, prefix=_PREFIX, question=_QUESTION, output=_OUTPUT, vocabulary=8192
    )


def compare_tokens(model: str, replicas: int, calls: int) -> ComparedTokens:
    """Start real replicas, send the calls, and do the same in the simulation."""
    settings: dict[str, Any] = {"max_batch": 4, "threads": 1}
    processes = [ReplicaProcess(f"replica-{n}", model, settings) for n in range(replicas)]
    try:
        spec = asyncio.run(_card(processes[0].url))
        real, prompt = _real(model, spec, processes, calls)
    finally:
        for process in processes:
            process.stop()
    machine = Machine(block_size=spec.block_size, kv_tokens=spec.kv_capacity, max_batch=4, max_step_tokens=512)
    simulated = Simulation(machine, replicas, policies(machine)["precise"], 0.0).run(calls_of(calls, spec.block_size))
    return ComparedTokens(replicas, prompt, real, simulated.computed)


async def _card(url: str) -> ModelSpec:
    link = ReplicaLink("first", url, None)
    try:
        return await link.card()
    finally:
        await link.close()


def _real(model: str, spec: ModelSpec, processes: Sequence[ReplicaProcess], calls: int) -> tuple[int, int]:
    with open_door(ClusterConfig(model=model, engine={"max_batch": 4}, silence_s=30.0), spec) as door:
        door.connect({each.name: ReplicaLink(each.name, each.url, None) for each in processes})
        door.wait_until_well(len(processes), 60.0)
        sampling = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
        requests = [
            Request(prompt_tokens=call.prompt, sampling=sampling)
            for _, call in calls_of(calls, spec.block_size).arrivals()
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            results = list(pool.map(door.complete, requests))
    for result in results:
        if result.error is not None:
            raise result.error
    prompt = sum(result.prompt_tokens for result in results)
    return prompt - sum(result.cached_tokens for result in results), prompt
