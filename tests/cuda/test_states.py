"""Places of recurrent state on the device, without kernels: a "state" is the sum of the tokens fed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="the extra `cuda` is not installed")

from shoal.errors import RunnerError  # noqa: E402
from shoal.runners.cuda.states import States, StateStore  # noqa: E402
from shoal.runners.plan import ScheduledSequence, StepPlan, Want  # noqa: E402


class Device:
    """What the kernels do with the entries of a step, over a store of two checkpoints."""

    def __init__(self, places: int) -> None:
        self.store = StateStore.empty((1, 1, 1), (1, 1, 1, 1), places, 2, torch.device("cpu"))
        self.states = States(self.store)

    def step(self, plan: StepPlan, further: int = 0) -> None:
        """`plan.chain` passes and `further` ones, whose positions go on from theirs; each twice, as a capture does."""
        self.states.check(plan)
        self.states.begin(plan.sequences)
        for s in plan.sequences:
            place, flip = self.states.of(s.seq_id)
            for link in range(2 * (plan.chain + further)):
                at = s.start + link // 2
                side = (at + flip) % 2
                before = self.store.matrices[2 * place + side].item() if at else 0.0
                self.store.matrices[2 * place + 1 - side] = before + sum(s.tokens)
        self.states.end(plan)

    def value(self, seq_id: int) -> float:
        held = self.states._held[seq_id]
        return float(self.store.matrices[2 * held.place + (held.seen + held.flip) % 2].item())


def plan(*items: ScheduledSequence, chain: int = 1) -> StepPlan:
    return StepPlan(1, items, chain=chain)


def fed(seq_id: int, count: int, start: int, **more: Any) -> ScheduledSequence:
    return ScheduledSequence(seq_id, (1,) * count, start, (0,), Want.NOTHING, **more)


@pytest.mark.parametrize("seed", range(5))
def test_chunks_chains_repeats_and_steps_thrown_away_leave_the_state_of_the_tokens(seed: int) -> None:
    rng, device, at = random.Random(seed), Device(3), {1: 0, 2: 0, 3: 0}
    for _ in range(60):
        chosen = rng.sample(sorted(at), rng.randint(1, 3))
        chain = rng.choice((1, 1, 4))
        counts = {i: 1 if chain > 1 else rng.choice((1, 1, 2, 3, 8)) for i in chosen}
        lone = all(count == 1 for count in counts.values())
        device.step(plan(*(fed(i, counts[i], at[i]) for i in chosen), chain=chain), further=rng.randint(0, 1) * lone)
        for i in chosen:
            at[i] += counts[i] + chain - 1
        assert {i: device.value(i) for i in chosen} == {i: at[i] for i in chosen}


def test_a_checkpoint_is_loaded_before_another_is_saved_in_its_place() -> None:
    device = Device(3)
    device.step(plan(fed(1, 5, 0, save=0)))
    device.step(plan(fed(2, 3, 0, save=0), fed(3, 1, 5, load=0)))
    assert device.value(3) == 6
    device.step(plan(fed(1, 1, 3, load=0)))  # its own state is that of five tokens: the one it asks for counts
    assert device.value(1) == 4
    data = device.states.read(0)
    device.states.write(1, 3, data)
    device.step(plan(fed(2, 2, 3, load=1)))
    assert device.value(2) == 5


def test_what_goes_on_without_its_state_is_refused_and_a_full_device_gives_up_the_oldest() -> None:
    device = Device(2)
    device.step(plan(fed(1, 4, 0)))
    device.step(plan(fed(2, 4, 0)))
    device.step(plan(fed(3, 4, 0)))
    with pytest.raises(RunnerError, match="sequence 1 goes on at 4 without its recurrent state"):
        device.states.check(plan(fed(1, 1, 4)))
    device.states.check(plan(fed(2, 1, 4)))
    device.states.release([2, 99])
    with pytest.raises(RunnerError, match="sequence 2 goes on"):
        device.states.check(plan(fed(2, 1, 4)))
    with pytest.raises(RunnerError, match="checkpoint 2 is out of range"):
        device.states.check(plan(fed(3, 1, 4, load=2)))
    with pytest.raises(RunnerError, match="nothing was saved to checkpoint 1"):
        device.states.read(1)
    with pytest.raises(RunnerError, match="a checkpoint is"):
        device.states.write(1, 4, np.zeros(3, np.uint8))
    with pytest.raises(RunnerError, match="keeps no state"):
        device.states.check(plan(fed(3, 1, 4, save=1)._replace(want=Want.ARGMAX)))
    with pytest.raises(RunnerError, match="3 sequences in a step"):
        device.states.check(plan(*(fed(10 + i, 1, 0) for i in range(3))))
