"""Drafts over recorded texts on a simulated clock: what our lengths give, what none do, and what the best could.

The scheduler is the real one, with its drafter and its pacing. In place of a model stand texts that one wrote, in place
of time a table of what passes cost by their rows. So the same record gives the same figures on any machine, and what a
change of the rule is worth shows as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.hindsight import PassCost, WrittenText, best_lengths_ms, foresight_ms, proposals
from shoal.config import EngineConfig
from shoal.core.commands import Add, Commit, JudgedTokens, Schedule
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.runners.plan import ModelSpec, StepPlan
from shoal.types import FinishReason, Namespace, SamplingParams

_BLOCK = 16
_PROMPT_MS = 0.5  # a prompt token; steps with prompts are not counted
_JITTER = 0.08  # of measured steps, relative

Cost = Callable[[int], float]


@dataclass(slots=True)
class SimulatedSteps:
    """What the steps that only decode came to."""

    ms: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: SimulatedSteps) -> None:
        """Add another run's."""
        self.ms += other.ms
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted


class DraftSimulation:
    """One scheduler that serves recorded texts, one group after another, as an engine would that runs on.

    `cost` tells the ms of a pass by its rows, and may be replaced between two groups. The scheduler is told times that
    spread around that, so that what it learns is as uncertain as in life; a `SimulatedSteps` has what `cost` says.
    """

    def __init__(self, cost: Cost, *, speculation: bool = True, max_rows: int = 64) -> None:
        self.cost = cost
        self._rng = random.Random(0)
        spec = ModelSpec(
            name="texts", architecture="none", runner="simulation", precision="none", vocab_size=1 << 20,
            context_length=1 << 20, block_size=_BLOCK, num_blocks=1 << 14, kv_bytes_per_token=1, weight_bytes=0,
            max_rows=max_rows, exact=True,
        )  # fmt: skip
        # Prompts are computed in one step, so that all streams begin together.
        config = EngineConfig(max_batch=64, max_step_tokens=1 << 16, prefix_sharing=False, speculation=speculation)
        self.scheduler = Scheduler(spec, config)
        self._now = 0.0
        self._ids = 0

    def run(self, texts: Sequence[WrittenText], namespace: str = "", *, temperature: float = 0.0) -> SimulatedSteps:
        """Write these texts side by side, each of one token or more."""
        whole = {}
        for text in texts:
            self._ids += 1
            sampling = SamplingParams(max_tokens=len(text.output), temperature=temperature, ignore_eos=True)
            request = RequestSpec(prompt=text.prompt, sampling=sampling, namespace=Namespace(namespace))
            whole[self._ids] = (*text.prompt, *text.output)
            self.scheduler.apply(Add(self._ids, request, self._now))
        drafted, accepted = self.scheduler.drafted, self.scheduler.accepted
        outcome = SimulatedSteps()
        while not self.scheduler.idle:
            plan = self.scheduler.apply(Schedule(self._now))
            assert plan is not None
            self._step(plan, whole, outcome)
        self.scheduler.take_ended()
        self.scheduler.take_released()
        outcome.drafted = self.scheduler.drafted - drafted
        outcome.accepted = self.scheduler.accepted - accepted
        return outcome

    def _step(self, plan: StepPlan, whole: Mapping[int, tuple[int, ...]], outcome: SimulatedSteps) -> None:
        outcomes, decodes = {}, True
        for item in plan.sequences:
            seq = self.scheduler.sequence(item.seq_id)
            decodes = decodes and seq.decoding
            if item.start + len(item.tokens) < len(seq.tokens):
                continue
            text, at = whole[item.seq_id], len(seq.tokens)
            written = [text[at]]
            for token in item.tokens[1:] if seq.decoding else ():
                if token != written[-1]:
                    break
                written.append(text[at + len(written)])
            done = at + len(written) == len(text)
            outcomes[item.seq_id] = JudgedTokens(tuple(written), len(written), FinishReason.LENGTH if done else None)
        ms = self.cost(plan.num_tokens) if decodes else _PROMPT_MS * plan.num_tokens
        if decodes:
            outcome.ms += ms
            outcome.steps += 1
        ms *= self._rng.lognormvariate(0.0, _JITTER)
        self._now += ms / 1e3
        self.scheduler.apply(Commit(plan, outcomes, self._now, ms))


def calculated(
    simulation: DraftSimulation,
    groups: Sequence[Sequence[WrittenText]],
    cost: PassCost,
    name: str,
    temperature: float = 0.0,
) -> dict[str, float]:
    """Times plain of one level, whose rounds are `groups`: with our lengths, the best ones, and foresight.

    `simulation` may have served other levels, as an engine has. All with the same cost of passes.
    """
    groups = [texts for group in groups if (texts := [text for text in group if text.output])]
    simulation.cost, ours = cost, SimulatedSteps()
    for number, group in enumerate(groups):
        outcome = simulation.run(group, f"{name} {number}", temperature=temperature)
        ours.add(outcome)
    found = [proposals(group) for group in groups]
    plain = sum(DraftSimulation(cost, speculation=False).run(group).ms for group in groups)
    fixed, best = best_lengths_ms(found, cost)
    foresight = sum(foresight_ms(each, cost) for each in found)
    times = {"ours": ours.ms, "best_fixed": fixed, "best_lengths": best, "foresight": foresight}
    return {key: plain / ms if ms else 1.0 for key, ms in times.items()}


def replayed(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The levels of a result of `shoal bench --scenario speculation`, calculated from its texts and costs of passes.

    One simulation serves the levels of a model in their order, as the measured engine did.
    """
    simulations: dict[str, DraftSimulation] = {}
    rows = []
    for level in document["levels"]:
        cost = PassCost(document["costs_ms"][level["model"]], level["streams"])
        if level["model"] not in simulations:
            simulations[level["model"]] = DraftSimulation(cost)
        groups = [[WrittenText(tuple(prompt), tuple(output)) for prompt, output in group] for group in level["texts"]]
        figures = calculated(simulations[level["model"]], groups, cost, level["level"], level["temperature"])
        rows.append({"level": level["level"], **figures})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures for people."""
    lines = [
        "calculated from recorded texts and costs of passes, times plain:",
        f"{'workload, streams':28}{'our lengths':>13}{'best fixed':>12}{'best lengths':>14}{'share of it':>13}"
        f"{'foresight':>11}",
    ]
    for row in rows:
        lines.append(
            f"{row['level']:28}{row['ours']:13.2f}{row['best_fixed']:12.2f}{row['best_lengths']:14.2f}"
            f"{row['ours'] / row['best_lengths']:13.2f}{row['foresight']:11.2f}"
        )
    return "\n".join(lines)
