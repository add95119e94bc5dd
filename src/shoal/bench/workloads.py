"""What is measured: scenarios as data, and the prompts they stand for.

Prompts are spans of a fixed English text in random order, as token ids, so that every system gets the very same ones.
Each round of a measurement has prompts of its own: no cache, ours or a peer's, can know them from the round before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.bench.beside import BESIDE
from shoal.errors import BenchmarkError

TEXT = Path(__file__).with_name("text.txt")
"""The text that prompts are cut from, and that fidelity is measured on."""
_SPAN = (8, 24)  # tokens of text that stay together in a prompt
_JOINS_AFTER_S = 0.3
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "claims": {"type": "array", "items": {"type": "string", "maxLength": 50}, "minItems": 1, "maxItems": 2},
        "confidence": {"enum": ["low", "medium", "high"]},
    },
    "required": ["title", "year", "claims", "confidence"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a measurement. `counted` is False for one whose own waiting is not the point."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    counted: bool = True
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One level of a scenario. Lengths in tokens.

    `requests` prompts of `prompt` (shortest, longest) tokens, `output` written by each, end tokens ignored; at most
    `batch` run together. They share a beginning of `trunk` tokens, arrive at once or at `rate` a second (Poisson),
    and `joining` > 0 adds a prompt of that length 0.3 s later. With `dependent` some wait for others' output.
    `beside` names what else computes meanwhile (`bench/beside.py`). `variants` are the ways in which systems run it, ""
    being the default one; each system takes those it knows.
    `fresh`: each run is the first one of a process of its own, loading included. `seconds` > 0: such bursts one after
    another for so long. Peers take part when `peers` is set. A system stops after two runs when it has used `budget_s`.
    """

    scenario: str
    level: str
    requests: int
    prompt: tuple[int, int]
    output: int
    batch: int
    trunk: int = 0
    rate: float = 0.0
    dependent: bool = False
    joining: int = 0
    schema: bool = False
    beside: str = ""
    fresh: bool = False
    seconds: float = 0.0
    peers: bool = True
    variants: tuple[str, ...] = ("",)
    budget_s: float = 20.0

    @property
    def length(self) -> int:
        """The most tokens one sequence comes to."""
        return max(self.trunk + self.prompt[1] + self.output, self.joining + 1)

    @property
    def tokens(self) -> int:
        """The most tokens that are held together."""
        return self.batch * self.length if not self.joining else (self.batch - 1) * self.prompt[1] + self.length

    def to_json(self) -> dict[str, Any]:
        """As it is stored beside its results."""
        return asdict(self)


def _scaling() -> list[Workload]:
    levels = [
        Workload("scaling", str(n), n, (40, 40), 64, n, peers=n != 16, budget_s=8.0) for n in (1, 2, 4, 8, 16, 32)
    ]
    return [*levels, Workload("scaling", "prefill", 4, (512, 512), 1, 4, budget_s=8.0)]


def _fanout() -> list[Workload]:
    return [
        Workload("fanout", str(trunk), 8, (20, 20), 32, 8, trunk=trunk, peers=trunk == 1000,
                 variants=("", "unshared", "copied"), budget_s=10.0)
        for trunk in (256, 1000, 4000)
    ]  # fmt: skip


SCENARIOS: dict[str, list[Workload]] = {
    "scaling": _scaling(),
    "burst": [
        Workload("burst", "16", 16, (1000, 1075), 128, 16, budget_s=60.0),
        Workload("burst", "16 as JSON", 16, (1000, 1075), 128, 16, schema=True, peers=False, budget_s=25.0),
    ],
    "uneven": [Workload("uneven", str(n), n, (64, 95), 96, n, budget_s=10.0) for n in (2, 8, 32)],
    "staggered": [Workload("staggered", "16", 16, (200, 400), 64, 16, rate=4.0, peers=False)],
    "fanout": _fanout(),
    "mixed": [Workload("mixed", "8+1", 8, (40, 40), 200, 9, joining=4000, budget_s=10.0)],
    "agents": [
        Workload("agents", name, requests, (60, 60), 48, 8, trunk=600, dependent=True,
                 variants=("graph", "independent", "serial", "framework"), budget_s=20.0)
        for name, requests in (("report", 6), ("4 reports", 24))
    ],
    "overhead": [
        Workload("overhead", "8", 8, (40, 40), 256, 8, peers=False, variants=("", "static"), budget_s=60.0)
    ],
    "company": [
        Workload("company", f"{n} beside {kind}" if kind else str(n), n, (40, 40), 128, n, beside=kind, peers=False,
                 variants=("", "one"), budget_s=15.0)
        for kind in ("", *BESIDE)
        for n in (1, 8)
    ],
    "cold": [
        Workload("cold", "one of 40 + 16", 1, (40, 40), 16, 1, fresh=True, variants=("", "unpacked", "warmed")),
        Workload("cold", "burst of 8", 8, (500, 500), 32, 8, fresh=True, variants=("", "unpacked")),
        Workload("cold", "swarm of 8", 8, (20, 20), 64, 8, trunk=200, fresh=True, variants=("", "unpacked")),
    ],
    "sustained": [
        Workload("sustained", str(n), n, (200, 200), 128, n, seconds=120.0, variants=("",)) for n in (8, 1)
    ],
    "serve": [
        Workload("serve", "1", 1, (100, 100), 8, 1, peers=False, variants=("", "http"), budget_s=10.0),
        Workload("serve", "8", 8, (100, 100), 128, 8, peers=False, variants=("", "http"), budget_s=20.0),
    ],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Another size of a burst or of staggered arrivals: requests, how many run together, tokens in and out of each."""

    n: int | None = None
    batch: int | None = None
    prompt: int | None = None
    output: int | None = None
    seconds: float | None = None

    def of(self, workload: Workload) -> Workload:
        """The workload in these sizes, and a name that tells them."""
        if workload.seconds:
            return replace(workload, seconds=self.seconds or workload.seconds)
        n = self.n or workload.requests
        prompt = workload.prompt if self.prompt is None else (self.prompt, self.prompt)
        made = replace(workload, requests=n, batch=min(self.batch or n, n), prompt=prompt)
        made = replace(made, output=self.output or workload.output)
        low, high = prompt
        told = f"{n} of {low if low == high else f'{low} to {high}'} + {made.output}"
        return replace(made, level=told if made.batch == n else f"{told}, {made.batch} at a time")


_APART = ("cold", "sustained", "uneven")  # asked for by name: minutes for each system, or of interest for one backend
_SIZED = ("burst", "staggered")


def select(scenario: str, sizes: Sizes | None = None, *, quick: bool = False) -> list[Workload]:
    """The levels of a scenario, of `both` (scaling and burst) or of `all`. BenchmarkError names an unknown one.

    With `sizes` the scenario must be one that has some; its first level is measured in them.
    """
    groups = {"all": [name for name in SCENARIOS if name not in _APART], "both": ["scaling", "burst"]}
    names = groups.get(scenario, [scenario])
    if names[0] not in SCENARIOS:
        known = ["all", "both", *SCENARIOS, "speculation"]  # the last one is measured apart from these
        hint = f"known: {', '.join(known)}"
        raise BenchmarkError(f"no scenario {scenario!r}", value=scenario, limit=known, hint=hint)
    if sizes is not None and sizes != Sizes():
        lasting = sizes == Sizes(seconds=sizes.seconds)
        if scenario not in (("sustained",) if lasting else _SIZED):
            hint = f"--scenario {' or '.join(_SIZED)}; --seconds is for --scenario sustained"
            raise BenchmarkError(f"{scenario} takes no other sizes", value=scenario, limit=_SIZED, hint=hint)
        levels = [sizes.of(workload) for workload in SCENARIOS[scenario][: None if lasting else 1]]
        return [_smaller(workload) for workload in levels] if quick else levels
    levels = [workload for name in names for workload in SCENARIOS[name]]
    return [_smaller(workload) for workload in levels] if quick else levels


def _smaller(workload: Workload) -> Workload:
    """An eighth of the tokens, to try the whole path out; its figures say nothing."""
    low, high = workload.prompt
    return replace(
        workload,
        prompt=(max(low // 8, 8), max(high // 8, 8)),
        output=max(workload.output // 8, 2) if not workload.schema else workload.output,
        trunk=workload.trunk // 8,
        joining=workload.joining // 8,
        seconds=min(workload.seconds, 3.0),
        budget_s=2.0,
    )


def make_jobs(workload: Workload, text: Sequence[int], seed: int) -> list[Job]:
    """The requests of one round: the same for the same seed, with nothing in common with another's.

    `text` are the tokens of `TEXT` in the model's vocabulary.
    """
    rng = random.Random(f"{workload.scenario} {workload.level} {seed}")
    low, high = workload.prompt
    trunk = _prompt(rng, text, workload.trunk)
    arrival, jobs = 0.0, []
    for number in range(workload.requests):
        length = low + (high - low) * number // max(workload.requests - 1, 1)
        prompt = (*trunk, *_prompt(rng, text, length))
        jobs.append(Job(prompt, workload.output, arrival, schema=_SCHEMA if workload.schema else None))
        if workload.rate:
            arrival += rng.expovariate(workload.rate)
    if workload.joining:
        jobs.append(Job(_prompt(rng, text, workload.joining), 1, _JOINS_AFTER_S, counted=False))
    return jobs


def _prompt(rng: random.Random, text: Sequence[int], length: int) -> tuple[int, ...]:
    """`length` tokens; the first two are drawn from the whole vocabulary of the text, so that beginnings differ."""
    tokens = [rng.choice(text), rng.choice(text)][:length]
    while len(tokens) < length:
        span = rng.randint(*_SPAN)
        at = rng.randrange(len(text) - span)
        tokens += text[at : at + span]
    return tuple(tokens[:length])
