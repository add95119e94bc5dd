"""A real model with sliding windows on the native runner: KV held, and the same bits wherever it lies; not CI.

python scripts/window_memory.py FILE.gguf [--tokens 2048] [--window-kv 48MiB]

One long prompt, branches of it, a cut in its middle and a next turn: once with all KV in blocks, then with window
blocks and so little memory that KV behind windows is given away. Tokens and log-probabilities must be the same.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from shoal.bench.workloads import TEXT
from shoal.config import EngineConfig, parse_bytes
from shoal.engine.inputs import InputProcessor
from shoal.engine.loop import StepLoop
from shoal.models import load_tokenizer
from shoal.models.files import local_files
from shoal.runners.native.runner import NativeRunner
from shoal.runners.registry import LocalModel
from shoal.types import Event, Request, Result, SamplingParams

BATCH, STEP = 4, 256


def run(runner: NativeRunner, prompts: list[list[int]]) -> list[Result]:
    """All prompts, the first alone and the last when all others have ended; prints the most that was held."""
    spec = runner.spec
    config = EngineConfig(max_batch=BATCH, max_step_tokens=STEP)
    loop = StepLoop(runner, InputProcessor(spec, None, 0), config)
    sampling = SamplingParams(max_tokens=32, logprobs=3, ignore_eos=True)
    logs: list[list[Event]] = []
    alone = most = 0
    for group in (prompts[:1], prompts[1:-1], prompts[-1:]):
        for prompt in group:
            logs.append([])
            request = Request(prompt_tokens=prompt, sampling=sampling)
            loop.add(f"r{len(logs)}", loop.inputs.prepare(request), logs[-1].append)
        while not loop.idle:
            loop.step()
            decoding = all(seq.decoding for seq in loop.scheduler.running)
            most = max(most, loop.stats().kv_held_bytes)
            if len(logs) == 1 and decoding:
                alone = max(alone, loop.stats().kv_held_bytes)
    results = [result for log in logs if (result := log[-1].result) is not None]
    kept = loop.scheduler.kv.windows
    print(f"{spec.num_blocks} blocks and {spec.num_windows} window blocks in {spec.kv_bytes / 2**20:.0f} MiB:")
    print(f"  the first alone, while it writes, holds {alone / 2**20:.1f} MiB, all at most {most / 2**20:.1f} MiB")
    print(f"  cached {[r.cached_tokens for r in results]}, window blocks given away: {kept.lost if kept else 0}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window-kv", default="48MiB", help="of KV with window blocks")
    chosen = parser.parse_args()
    files = local_files("real", chosen.file)
    words = load_tokenizer(files).encode(TEXT.read_text("utf-8"), add_special=True)
    text = random.Random(1).choices(words, k=chosen.tokens + 340)  # the text itself is too short
    trunk, rest = text[: chosen.tokens], text[chosen.tokens :]
    prompts = [trunk, *([*trunk, *rest[n : n + 40]] for n in range(0, 200, 40)), [*trunk[: chosen.tokens // 2], 7]]
    prompts.append([*trunk, *rest[:40], *rest[300:340]])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kv_bytes, apart in ((1 << 30, False), (parse_bytes(chosen.window_kv, "--window-kv"), True)):
            runner = NativeRunner.load(
                LocalModel.read(files),
                kv_bytes=kv_bytes,
                cache_dir=Path(folder),
                max_batch=BATCH,
                max_step_tokens=STEP,
                window_blocks=apart,
            )
            found.append([(r.tokens, r.logprobs) for r in run(runner, prompts)])
            runner.close()
    same = found[0] == found[1]
    print("tokens and log-probabilities are the same" if same else "THEY DIFFER")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
