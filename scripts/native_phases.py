"""Phases of the native runner's steps on one file: `scripts/native_phases.py MODEL.gguf [--cases rows,trunk,prefill]`.

rows: steps of 1, 4, 8, 16, 32 rows over 32 tokens, and the step of eight in steps of one. trunk: eight rows over one
trunk, over eight copies of it, one row over it, and attention over the trunk in attention over the copies. prefill: 512
tokens, and the next 512. Medians in ms; the least of a step beside them. `SHOAL_ISA` chooses the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.models.files import local_files
from shoal.runners.native import pack
from shoal.runners.native.core import load_core
from shoal.runners.native.runner import BLOCK_SIZE, NativeRunner, packed_path, write_packed
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.runners.registry import LocalModel

CHUNK = 512
ROWS = (1, 4, 8, 16, 32)
EACH = 4  # blocks of a row
APART = 8  # rows over a trunk, and over copies of it
OWN = 2  # blocks of each of them behind the trunk
PROMPT = 40  # blocks of a prefill


def kv_bytes(model: LocalModel, cache: Path, kv_precision: str, blocks: int) -> int:
    """The budget in which a runner has so many blocks, and leaves room for the recurrent state of what has some."""
    path = packed_path(model.files, cache)
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_packed(model, path)
    facts = {**pack.read_header(path).facts, "kv_bits": 8 if kv_precision == "u8" else 16}
    block, window, _, state = load_core().sizes(facts)
    needed = blocks * (block + window)  # layers with windows have theirs in the blocks here
    return int(needed + (needed // 2 + 4 * state if state else 0))


class Bench:
    """A loaded runner, and `rounds` steps of each case."""

    def __init__(self, runner: NativeRunner, rounds: int) -> None:
        self.runner, self.rounds, self.size = runner, rounds, runner.spec.block_size

    def timed(self, plan: StepPlan) -> dict[str, float]:
        """Milliseconds of one step and of its phases."""
        before, begin = self.runner.profile(), time.perf_counter()
        self.runner.execute(plan)
        took, after = time.perf_counter() - begin, self.runner.profile()
        phases = {name: 1e3 * (after[name] - before[name]) for name in after if name != "steps"}
        return {"step": 1e3 * took, **phases}

    def fill(self, table: Sequence[int], length: int, seq_id: int = 0) -> None:
        """Prefill positions 0 .. length - 1 of a block table; recurrent state is the sequence's."""
        for at in range(0, length, CHUNK):
            tokens = tuple((7 * p) % 1000 + 100 for p in range(at, min(at + CHUNK, length)))
            self.runner.execute(StepPlan(0, (ScheduledSequence(seq_id, tokens, at, tuple(table), Want.NOTHING),)))

    def show(self, name: str, steps: Sequence[dict[str, float]]) -> dict[str, float]:
        """Print and give the medians."""
        medians = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        told = ", ".join(f"{key} {value:.2f}" for key, value in medians.items() if key != "step" and value >= 0.005)
        print(f"{name}: {medians['step']:.2f} (least {min(step['step'] for step in steps):.2f}): {told}", flush=True)
        return medians

    def decode(self, name: str, tables: Sequence[Sequence[int]], at: int) -> dict[str, float]:
        """Steps of one token for each table, from position `at`; the first is not counted."""
        steps = []
        for i in range(self.rounds + 1):
            rows = [
                ScheduledSequence(s, (100 + s,), at + i, tuple(table), Want.ARGMAX) for s, table in enumerate(tables)
            ]
            steps.append(self.timed(StepPlan(0, tuple(rows))))
        return self.show(name, steps[1:])

    def rows(self) -> None:
        """Few rows and many."""
        took = {}
        for count in ROWS:
            tables = [range(i * EACH, (i + 1) * EACH) for i in range(count)]
            for seq_id, table in enumerate(tables):
                self.fill(table, 32, seq_id)
            took[count] = self.decode(f"rows {count}", tables, 32)["step"]
        print(f"8 rows in 1 row: {took[8] / took[1]:.2f}")

    def trunk(self, length: int) -> None:
        """Eight rows over `length` tokens that they share, and over copies."""
        blocks = length // self.size
        length = blocks * self.size
        trunk, own = range(blocks), [range(blocks + OWN * i, blocks + OWN * (i + 1)) for i in range(APART)]
        shared = [(*trunk, *own[i]) for i in range(APART)]
        copies = [range(blocks * i + OWN * APART, blocks * (i + 1) + OWN * APART) for i in range(1, APART)]
        self.fill(trunk, length)
        moves = tuple((block, copy[block]) for copy in copies for block in trunk)
        row = ScheduledSequence(0, (5,), length, shared[0], Want.ARGMAX)
        self.runner.execute(StepPlan(0, (row,), copies=moves))
        together = self.decode(f"8 over a trunk of {length}", shared, length)["attention"]
        apart = self.decode("8 apart", [(*table, *own[i]) for i, table in enumerate([trunk, *copies])], length)
        self.decode("1 row", shared[:1], length)
        print(f"attention over the trunk in attention apart: {together / apart['attention']:.2f}")

    def prefill(self) -> None:
        """A chunk of 512 tokens, at the start and behind another."""
        tokens = tuple((7 * p) % 1000 + 100 for p in range(CHUNK))
        for name, start in (("prefill 512", 0), ("the next 512", CHUNK)):
            self.fill(range(PROMPT), start)
            plan = StepPlan(0, (ScheduledSequence(0, tokens, start, tuple(range(PROMPT)), Want.ARGMAX),))
            took = self.show(name, [self.timed(plan) for _ in range(5)])["step"]
            print(f"{name}: {1e3 * CHUNK / took:.0f} tokens/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", default="rows,trunk,prefill")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trunk", type=int, default=4000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-precision", choices=("auto", "bf16", "u8"), default="auto")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/shoal-native-bench"))
    options = parser.parse_args()
    cases, source = options.cases.split(","), LocalModel.read(local_files("bench", options.model))
    needed = {
        "rows": EACH * max(ROWS),
        "trunk": APART * (options.trunk // BLOCK_SIZE + OWN),
        "prefill": PROMPT,
    }
    most = max(needed[case] for case in cases)
    loaded = NativeRunner.load(
        source,
        kv_bytes=kv_bytes(source, options.cache, options.kv_precision, most),
        cache_dir=options.cache,
        threads=options.threads,
        kv_precision=options.kv_precision,
    )
    bench = Bench(loaded, options.rounds)
    for case in cases:
        {"rows": bench.rows, "trunk": lambda: bench.trunk(options.trunk), "prefill": bench.prefill}[case]()
