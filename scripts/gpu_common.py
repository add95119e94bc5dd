"""What the parts of `gpu.py` share: runners over decoders, plans, and decoding through `execute`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def runner_of(decoder: Any, *, blocks: int, slots: int, rows: int, eight: bool = False) -> Any:
    """A CUDA runner over a decoder: `blocks` of KV and more, `slots` sequences, `rows` rows of a step."""
    from shoal.runners.cuda.backend import MAX_CHECKPOINTS, load_decoder
    from shoal.runners.cuda.supports import kv_bytes_per_token, state_bytes

    kv_bytes = blocks * 32 * kv_bytes_per_token(decoder, eight=eight) + MAX_CHECKPOINTS * state_bytes(decoder)
    return load_decoder(
        decoder,
        "cuda:0",
        key=f"random {decoder.name}",
        kv_bytes=kv_bytes,
        memory_bytes=None,
        max_batch=slots,
        max_step_tokens=rows,
        eight=eight,
    )


def decoder_of(shape: str, format: str, folder: Any) -> Any:
    """A model of random weights in a real shape, through a GGUF file as `shoal bench --shape` writes it."""
    from shoal.bench.shapes import write_shape
    from shoal.models import families
    from shoal.models.gguf import read_gguf

    path = folder / f"{shape}-{format}.gguf"
    if not path.exists():
        write_shape(path, shape, format)
    return families.describe(read_gguf(path))


def plan_of(*sequences: Any, chain: int = 1) -> Any:
    from shoal.runners.plan import StepPlan

    return StepPlan(1, tuple(sequences), chain=chain)


def seq(seq_id: int, tokens: Any, start: int, table: Any, want: str = "logits") -> Any:
    from shoal.runners.plan import ScheduledSequence, Want

    return ScheduledSequence(seq_id, tuple(tokens), start, tuple(table), Want(want))


class Decoding:
    """Greedy decoding of some rows through `execute`, at a context, with blocks of a trunk that all rows share.

    KV of the context, and recurrent state, are what happens to be there: only the time counts.
    """

    def __init__(self, runner: Any, count: int, context: int, trunk: int) -> None:
        blocks, held = -(-(context + 64) // 32), trunk // 32
        own = blocks - held
        self.runner = runner
        shared = tuple(range(held))
        self.tables = [shared + tuple(range(held + i * own, held + (i + 1) * own)) for i in range(count)]
        self.rows = [[(7 * i) % 1000, context - 12] for i in range(count)]
        self.load = None
        if runner.spec.recurrent:
            runner.access.write_checkpoint(0, context - 12, np.zeros(runner.spec.checkpoint_bytes, np.uint8))
            self.load = 0  # for the first step

    def step(self) -> None:
        items = [seq(i, (t,), at, self.tables[i], "argmax") for i, (t, at) in enumerate(self.rows)]
        if self.load is not None:
            items, self.load = [item._replace(load=self.load) for item in items], None
        out = self.runner.execute(plan_of(*items))
        for i, row in enumerate(self.rows):
            row[0], row[1] = out.argmax[i][0], row[1] + 1

    def seconds(self, steps: int = 5) -> float:
        """Of one step. Rows go on from where they are: to go back would throw the step away that runs ahead."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps
