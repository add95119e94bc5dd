"""Requests with random JSON schemas: every finished output must parse and validate.

    python scripts/schema_sweep.py [--count 1000] [--toy]

Prints one JSON line. The toy model writes noise, which is the harder test of the grammar; the default model writes
what a model writes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jsonschema
from tests.server.schemas import random_schema
from tests.support.live import toy

from shoal.engine.engine import Engine
from shoal.runners.fake import FakeRunner
from shoal.types import FinishReason, Request, SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--toy", action="store_true", help="the toy model instead of the default one")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    schemas = [random_schema(rng) for _ in range(options.count)]
    requests = [
        Request(
            prompt=f"Record number {number} as JSON:",
            sampling=SamplingParams(json_schema=schema, max_tokens=options.max_tokens, temperature=1.0, seed=number),
        )
        for number, schema in enumerate(schemas)
    ]
    settings = {"max_batch": 8, "max_queue": options.count}
    engine = toy(runner=FakeRunner(num_blocks=2048), **settings) if options.toy else Engine.load(**settings)
    with engine:
        report = engine.run(requests)
    ends: Counter[str] = Counter()
    for schema, result in zip(schemas, report.results, strict=True):
        ends[str(result.finish_reason)] += 1
        if result.finish_reason is FinishReason.STOP:
            try:
                jsonschema.validate(json.loads(result.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                ends["invalid"] += 1
                print(json.dumps({"schema": schema, "text": result.text, "error": str(error)}), file=sys.stderr)
        elif result.error is not None:
            print(json.dumps({"schema": schema, "error": str(result.error)}), file=sys.stderr)
    print(json.dumps({"count": options.count, "ends": dict(ends), "wall_s": round(report.wall_s, 1)}))
    return int(ends["invalid"] > 0 or ends["error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
