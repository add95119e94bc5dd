"""Answers of a cluster held against those of one engine, bit for bit: greedy, sampled, with a grammar, with figures.

The requests share beginnings and arrive together, so that they run in other batches, after other prefix hits and on
other replicas than alone. Each is also sent to every replica by itself: whichever answers, the answer is the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster.door import load_replica
from shoal.cluster.engine import ClusterEngine
from shoal.cluster.local import LocalCluster
from shoal.engine.engine import Engine
from shoal.types import Request, Result, SamplingParams

_SETTINGS: dict[str, Any] = {"max_batch": 4, "threads": 1}
_AT_ONCE = 8
_KINDS: tuple[dict[str, Any], ...] = (
    {"seed": 10, "logprobs": 3},
    {"temperature": 0.9, "seed": 11, "logprobs": 0},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 13, "regex": "[a-z]{3,9}( [a-z]{3,9}){2,6}", "logprobs": 1},
)
_HELD = ("tokens", "text", "finish_reason", "logprobs", "seed", "prompt_tokens", "error")


@dataclass(slots=True)
class EqualAnswers:
    """How many answers were looked at, where the door sent its requests, and which answers differ."""

    requests: int = 0
    answers: int = 0
    tokens: int = 0
    door: dict[str, int] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """All are the same, and every replica was asked through the door."""
        return not self.differ and self.answers > 0 and all(self.door.values())

    def __str__(self) -> str:
        told = f"{self.requests} requests, {self.answers} answers of {self.tokens} tokens in all"
        sent = ", ".join(f"{name} {count}" for name, count in self.door.items())
        return "; ".join([told, f"through the door: {sent}", f"{len(self.differ)} differ", *self.differ[:3]])


def requests_of(count: int) -> list[Request]:
    """Prompts with four beginnings, each of several kinds."""
    asked = []
    for number in range(count):
        task = f"You are agent {number % 4} of a team that plans a journey to the sea. " * 6
        sampling = SamplingParams(max_tokens=16 + number % 9, **_KINDS[number // 4 % len(_KINDS)])
        asked.append(
            Request(prompt=f"{task}\nQuestion {number}: where do we sleep on day {number}?", sampling=sampling)
        )
    return asked


def compare_answers(model: str, replicas: int, count: int) -> EqualAnswers:
    """Start replicas, and hold their answers against those of one engine here."""
    with load_replica(model, _SETTINGS) as alone, LocalCluster(model, replicas, _SETTINGS) as cluster:
        return hold_answers(cluster, alone, count)


def hold_answers(cluster: LocalCluster, alone: Engine, count: int) -> EqualAnswers:
    """Ask one engine, then the door, then each replica by itself."""
    asked = requests_of(count)
    told = EqualAnswers(requests=count)
    expected = [alone.complete(each) for each in asked]
    before = _sent(cluster.door)
    _hold(told, "the door", asked, expected, _ask(cluster.door, asked))
    told.door = {name: sent - before[name] for name, sent in _sent(cluster.door).items()}
    for name in cluster.processes:
        with cluster.open(name) as door:
            _hold(told, name, asked, expected, _ask(door, asked))
    return told


def _ask(door: ClusterEngine, asked: list[Request]) -> list[Result]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(door.complete, asked))


def _sent(door: ClusterEngine) -> dict[str, int]:
    return {row["name"]: row["sent"] for row in door.describe()["replicas"]}


def _hold(told: EqualAnswers, who: str, asked: list[Request], expected: list[Result], answers: list[Result]) -> None:
    for request, wanted, got in zip(asked, expected, answers, strict=True):
        told.answers += 1
        told.tokens += len(got.tokens)
        for name in _HELD:
            here, there = getattr(wanted, name), getattr(got, name)
            if here != there:
                told.differ.append(f"{name} of {who} at {str(request.prompt)[-40:]!r}: {there!r}, not {here!r}")
                break
