"""Which batch pays on this machine: a few decode steps at each size."""

from __future__ import annotations

from typing import Any

from shoal.engine.batch import SWEET_SHARE, smallest_batch
from shoal.engine.engine import Engine
from shoal.types import Request, SamplingParams

_TOKENS = 24  # a sequence: enough steps to tell sizes apart, some seconds in all
_TIMES = 3  # the best of so many: what else the machine does only makes a step slower


def batch_rates(engine: Engine) -> dict[str, Any]:
    """Tokens a second at 1, 2, 4, ... sequences up to `max_batch`, and the smallest batch that is worth its wait."""
    rates: dict[int, float] = {}
    size = 1
    while True:
        size = min(size, engine.config.max_batch)
        rates[size] = max(_rate(engine, size, number) for number in range(_TIMES))
        if size == engine.config.max_batch:
            break
        size *= 2
    return {"rates": rates, "smallest": smallest_batch(rates), "share": SWEET_SHARE}


def _rate(engine: Engine, size: int, number: int) -> float:
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    prompts = [[(7 * row + number + at) % engine.spec.vocab_size for at in range(8)] for row in range(size)]
    report = engine.run([Request(prompt_tokens=prompt, sampling=sampling) for prompt in prompts])
    full = [step for step in report.steps if step.batch == size and not step.prefill_tokens]
    seconds = sum(step.ms for step in full) / 1e3
    return sum(step.decode_tokens for step in full) / seconds if seconds else 0.0
