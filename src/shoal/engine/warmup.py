"""Passes of representative shapes before the first request: pages touched, kernels chosen, step times known."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.types import Namespace, Request, SamplingParams

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_SHORT = 8  # tokens of the prompts of a batch
_OUTPUT = 3
_SPACE = Namespace(task="warm-up")


def warm_up(engine: Engine) -> float:
    """Run a prompt as long as a step takes, then batches of 1, 2, 4, ... rows up to `max_batch`; the seconds it took.

    Half of the rows are greedy, half sampled. Nothing of it is left in the prefix tree; `stats` counts its steps.
    """
    begin = time.perf_counter()
    loop = engine._loop
    tiering = engine.call(loop.leave_tiers)  # what comes from a tier is not computed, and nobody wants this KV again
    for count, length in _shapes(engine):
        engine.run([_request(engine, row, length) for row in range(count)])
    engine.call(loop.drop_kv)
    engine.call(lambda: loop.join_tiers(tiering))
    return time.perf_counter() - begin


def _shapes(engine: Engine) -> Iterator[tuple[int, int]]:
    """Rows and the length of their prompts, as far as context and KV memory go."""
    spec, config = engine.spec, engine.config
    most = min(spec.context_length, spec.kv_capacity) - 2 * spec.block_size
    yield 1, max(1, min(config.max_step_tokens, most))
    rows = 1
    while True:
        rows = min(rows, config.max_batch)
        if rows * (_SHORT + _OUTPUT + spec.block_size) > spec.kv_capacity:
            return
        yield rows, _SHORT
        if rows == config.max_batch:
            return
        rows *= 2


def _request(engine: Engine, row: int, length: int) -> Request:
    """One row; its token ids differ from the others' from the first one on, so that rows share nothing."""
    prompt = [(row + 1 + 7 * at) % engine.spec.vocab_size for at in range(length)]
    sampling = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
    if row % 2:
        sampling = dataclasses.replace(sampling, temperature=1.0, top_k=40, seed=row)
    return Request(prompt_tokens=prompt, sampling=sampling, namespace=_SPACE)
