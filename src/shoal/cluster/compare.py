"""The simulation held against real replicas on this machine: prompt tokens computed, for the same calls one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.cluster.local import LocalCluster
from shoal.cluster.simulate import Machine, Simulation
from shoal.cluster.traffic import TenantCalls
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
    with LocalCluster(model, replicas, {"max_batch": 4, "threads": 1}) as cluster:
        spec = cluster.spec
        real, prompt = _real(cluster, calls)
    machine = Machine(block_size=spec.block_size, kv_tokens=spec.kv_capacity, max_batch=4, max_step_tokens=512)
    simulated = Simulation(machine, replicas, "precise", 0.0).run(calls_of(calls, spec.block_size))
    return ComparedTokens(replicas, prompt, real, simulated.computed)


def _real(cluster: LocalCluster, calls: int) -> tuple[int, int]:
    sampling = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
    arrivals = calls_of(calls, cluster.spec.block_size).arrivals()
    requests = [Request(prompt_tokens=call.prompt, sampling=sampling) for _, call in arrivals]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = list(pool.map(cluster.door.complete, requests))
    for result in results:
        if result.error is not None:
            raise result.error
    prompt = sum(result.prompt_tokens for result in results)
    return prompt - sum(result.cached_tokens for result in results), prompt
