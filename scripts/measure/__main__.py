"""`python -m scripts.measure NAME [--runs N]`: one figure of the engine against its peer or its own ceiling.

Order within a run is interleaved, medians are quoted with the spread. Never run two at once. `peer` and `burst` need
llama-cpp-python (compiled with CMAKE_ARGS="-DGGML_NATIVE=ON").
"""

from __future__ import annotations

import argparse
import json

from scripts.measure import common, engine, peer, sharing

FIGURES = {
    "peer": peer.peer,
    "burst": peer.burst,
    "batch": engine.batch,
    "overhead": engine.overhead,
    "scheduler": engine.scheduler_time,
    "sampling": engine.sampling,
    "fanout": sharing.fanout,
    "second": sharing.second,
    "stall": sharing.stall,
    "distinct": sharing.distinct,
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
