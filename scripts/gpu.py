"""Check and measure the CUDA runner on a machine with an NVIDIA GPU, in one go: `python scripts/gpu.py [--wheels DIR]`.

Needs torch with Triton, numpy and gguf; a folder of wheels can be given with --wheels. Prints one JSON, at the end and
after each part what is known so far; a part that fails leaves its error there, and the others run. Models are random:
tiny ones for the checks, and the shapes of Qwen3-0.6B and of four layers of Qwen3-30B-A3B, about 8 GB of files in
--folder. llama.cpp runs beside it where `llama-bench` and `llama-batched-bench` are on PATH.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gpu_checks as checks  # noqa: E402
import gpu_speed as speed  # noqa: E402
from gpu_common import runner_of  # noqa: E402


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and what they run, in order: what tells most comes first."""
    from tests.cuda.tiny import qwen3_shape

    if not options.skip_checks:
        yield "products_wrong", checks.check_products
        yield "tiny", checks.check_tiny
        yield "ahead_equal", checks.check_ahead
        yield "draws", checks.check_draws
    rate = speed.memory_rate()
    yield "memory_rate", lambda: rate
    decoder = qwen3_shape()
    rows: list[int] = options.rows
    runner = runner_of(decoder, blocks=12_000, slots=256, rows=4096)
    yield "short", lambda: speed.speeds(runner, rows, 40, rate)
    yield "context_1000", lambda: speed.speeds(runner, rows, 1000, rate)
    yield "trunk_896", lambda: speed.speeds(runner, [r for r in rows if r > 1], 1000, rate, trunk=896)
    for count in rows:
        yield f"kernels_{count}_rows_context_1000", lambda: speed.kernel_shares(runner, count, 1000, rate)  # noqa: B023
    yield "prefill", lambda: speed.prefill_speed(runner, decoder)
    runner.close()
    yield "engine", lambda: speed.engine_speed(decoder, rows)
    yield "workload", lambda: speed.workload(decoder)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
    yield "formats", lambda: speed.formats(folder, rows, rate)
    yield "llama", lambda: speed.llama(folder)
    if not options.skip_checks:
        yield "schedules", lambda: checks.check_schedules(options.schedules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--folder", type=Path, help="where the files of random weights are kept")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 256])
    parser.add_argument("--schedules", type=int, default=200, help="random schedules of each form")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of parts; all of them unless given")
    options = parser.parse_args()
    if options.wheels:
        target = tempfile.mkdtemp(prefix="shoal-wheels-")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target]
        subprocess.run([*command, *map(str, options.wheels.glob("*.whl"))], check=True)
        sys.path.insert(0, target)
    import torch

    from shoal.runners.cuda.device import told

    report: dict[str, Any] = {"device": told(0), "torch": torch.__version__, "failed": []}
    try:
        for name, measure in parts(options):
            if not options.only or name in options.only:
                report[name] = tried(name, measure, report["failed"])
    finally:
        print(json.dumps(report, indent=1))


def tried(name: str, measure: Callable[[], Any], failed: list[str]) -> Any:
    """What a part found, or its error."""
    begin = time.perf_counter()
    try:
        found = measure()
    except Exception as error:  # noqa: BLE001 - it must not cost the others: a GPU is seldom at hand
        found = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-800:]}
        failed.append(name)
    print(json.dumps({name: found}), flush=True)
    print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
