"""What grammars cost a step: eight constrained rows, and seven plain rows beside a constrained one.

    python scripts/mask_cost.py [--rows 8] [--rounds 5]

Prints one JSON line. `serial_us` is what a step waits for: masks not ready yet, their use, moving on in the grammar.
`fill_us` is spent on another thread while the device computes. The mixed rounds take turns with plain ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shoal.engine.engine import Engine
from shoal.sampling.grammar import Constraint
from shoal.types import Report, Request, SamplingParams

TEXT = "(.|\n)*"  # any text: all rows decode all the time, and masks are as wide as they can be
SPENT: dict[str, float] = defaultdict(float)


def timed(owner: Any, name: str) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            SPENT[name] += time.perf_counter() - begin

    setattr(owner, name, wrapper)


def run(engine: Engine, constrained: int, plain: int, round_: int, tokens: int) -> Report:
    requests = []
    for row in range(constrained + plain):
        fields: dict[str, Any] = {"regex": TEXT} if row < constrained else {}
        sampling = SamplingParams(max_tokens=tokens, temperature=0.8, seed=row, logit_bias={0: -100, 2: -100}, **fields)
        requests.append(Request(prompt=f"Tell me about number {row + 100 * round_}:", sampling=sampling))
    return engine.run(requests)


def step_ms(report: Report, rows: int) -> float:
    return statistics.median(s.ms for s in report.steps if s.batch == rows and not s.prefill_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    rows = options.rows
    for owner, name in (
        (Constraint, "fill"),
        (Constraint, "mask"),
        (Constraint, "accept"),
        (Constraint, "take_forced"),
    ):
        timed(owner, name)
    timed(Future, "result")
    shares, serial, fill, ratios = [], [], [], []
    with Engine.load(max_batch=rows) as engine:
        run(engine, rows, 0, 99, 8)
        for round_ in range(options.rounds):
            SPENT.clear()
            report = run(engine, rows, 0, 2 * round_, options.tokens)
            steps = len(report.steps)
            waits = sum(SPENT[name] for name in ("mask", "accept", "take_forced", "result"))
            serial.append(1e6 * waits / steps)
            fill.append(1e6 * SPENT["fill"] / steps)
            shares.append(waits / steps / (step_ms(report, rows) / 1e3))
            plain = step_ms(run(engine, 0, rows, 2 * round_ + 1, options.tokens), rows)
            ratios.append(step_ms(run(engine, 1, rows - 1, 2 * round_ + 1, options.tokens), rows) / plain)
    told = {
        "rows": rows,
        "serial_us": round(statistics.median(serial)),
        "fill_us": round(statistics.median(fill)),
        "share_of_step": round(statistics.median(shares), 4),
        "step_beside_one_constrained": round(statistics.median(ratios), 3),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
