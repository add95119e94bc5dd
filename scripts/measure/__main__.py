"""`python -m scripts.measure NAME [--runs N] [--runner NAME]`: one part of the engine by itself; prints one JSON line.

Workloads, peers and ceilings are measured by `shoal bench`. Never run two at once.
"""

from __future__ import annotations

import argparse
import json

from scripts.measure import common, parts

FIGURES = {
    "scheduler": parts.scheduler_time,
    "sampling": parts.sampling,
    "second": parts.second,
    "distinct": parts.distinct,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--runner", default="auto")
    options = parser.parse_args()
    common.SETTINGS["runner"] = options.runner
    print(json.dumps({"figure": options.figure, "runner": options.runner, **FIGURES[options.figure](options.runs)}))


main()
