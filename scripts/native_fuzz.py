"""Malformed files and plans against the native runner: `python scripts/native_fuzz.py [--seconds 60] [--sanitize]`.

Whatever comes in, the answer is a result or one of this package's errors. With --sanitize the extension is built with
the address and undefined-behaviour sanitizers first, and loaded in place of the installed one. Prints the seed; a
crash repeats with --seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS", "MXFP4")
KV: tuple[Any, ...] = ("bf16", "u8")


def use_extension(path: Path) -> None:
    """Let the package import this build of its extension."""
    name = "shoal.runners.native._core"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def sanitized(arguments: list[str]) -> int:
    """Build with sanitizers and run this script again over that build."""
    out = Path(tempfile.mkdtemp())
    script = str(ROOT / "scripts" / "native_build.py")
    subprocess.run([sys.executable, script, "--sanitize", "--out", str(out)], check=True)
    (built,) = out.glob("_core*.so")
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    # CPython's own allocations at exit are not ours to report. A kv_memory beyond memory must come back as null.
    options = "detect_leaks=0:allocator_may_return_null=1"
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [sys.executable, __file__, "--extension", str(built), *arguments], env=environment, check=False
    ).returncode


def any_int(rng: random.Random, usual: int) -> int:
    return rng.choice([*[rng.randrange(-1, usual + 1)] * 12, -1, 0, usual, 2**31 - 1, 2**31, -(2**31), 2**63])


def random_plan(rng: random.Random, blocks: int, vocab: int, windows: int) -> Any:
    from shoal.runners.plan import ScheduledSequence, StepPlan, Want

    def sequence(seq_id: int) -> ScheduledSequence:
        tokens = tuple(rng.randrange(vocab) for _ in range(rng.choice([0, 1, 1, 1, 2, 31, 33, 64])))
        if rng.random() < 0.1:
            tokens += (any_int(rng, vocab),)
        start = rng.choice([0, 0, 0, 1, 31, 32, rng.randrange(100), any_int(rng, 512)])
        table = tuple(rng.randrange(blocks) for _ in range(rng.choice([0, 1, 2, 3, 4, 6])))
        if rng.random() < 0.1:
            table += (any_int(rng, blocks),)
        top = rng.choice([1, 5, 40, any_int(rng, vocab)])
        first = rng.randrange(max(windows, 1))
        seen = tuple((first + i) % windows for i in range(rng.choice([1, 2, 3, 4]))) if windows else ()
        if rng.random() < 0.1:
            seen += (any_int(rng, windows),)
        return ScheduledSequence(seq_id, tokens, start, table, rng.choice(list(Want)), 0, top, windows=seen)

    copies = tuple((any_int(rng, blocks), any_int(rng, blocks)) for _ in range(rng.choice([0, 0, 0, 1, 2])))
    chain = rng.choice([1, 1, 1, 1, 2, 5, any_int(rng, 16)])
    moved = tuple((any_int(rng, windows), any_int(rng, windows)) for _ in range(rng.choice([0, 0, 0, 1])))
    sequences = tuple(sequence(i) for i in range(rng.choice([0, 1, 1, 2, 3, 8])))
    return StepPlan(0, sequences, copies, chain, moved)


def damage(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, mostly near the front where the structure is; or cut short."""
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        raw[min(int(rng.expovariate(1 / 2000)), len(raw) - 1)] = rng.randrange(256)
    return bytes(raw[: rng.randrange(len(raw))]) if rng.random() < 0.2 else bytes(raw)


def fuzz(seconds: float, seed: int) -> Counter[str]:
    from tests.support.native_tiny import open_tiny, windowed, write_blocks

    from shoal.errors import ShoalError
    from shoal.models.files import local_files
    from shoal.runners.native.core import load_core
    from shoal.runners.native.runner import NativeRunner, packed_path

    rng, outcomes, folder = random.Random(seed), Counter[str](), Path(tempfile.mkdtemp())
    sources = [write_blocks(folder / f"{kind}.gguf", kind, layers=1) for kind in KINDS]
    packed = [(packed_path(local_files("t", path), folder), open_tiny(path, kv=rng.choice(KV))) for path in sources]
    sources.append(folder / "gemma3.gguf")
    with_windows = windowed("gemma3", folder, blocks=6, windows=6, kv=rng.choice(KV))
    packed.append((packed_path(local_files("t", sources[-1]), folder), with_windows))
    isas = load_core().isas()
    until = time.monotonic() + seconds
    round_ = 0
    while time.monotonic() < until:
        round_ += 1
        which = rng.randrange(len(sources))
        made: NativeRunner | None = None
        try:
            if rng.random() < 0.5:
                bad = folder / f"bad{round_ % 4}.gguf"
                bad.write_bytes(damage(rng, sources[which].read_bytes()))
                made = open_tiny(bad, isa=rng.choice(isas), threads=rng.randint(1, 3), kv=rng.choice(KV))
            elif rng.random() < 0.5:
                bad = folder / f"bad{round_ % 4}.gguf"
                bad.write_bytes(sources[which].read_bytes())
                packed_path(local_files("t", bad), folder).write_bytes(damage(rng, packed[which][0].read_bytes()))
                made = open_tiny(bad, isa=rng.choice(isas), threads=rng.randint(1, 3), kv=rng.choice(KV))
            for _ in range(20):
                runner = made or packed[which][1]
                try:
                    spec = runner.spec
                    runner.execute(random_plan(rng, spec.num_blocks, spec.vocab_size, spec.num_windows))
                    outcomes["computed"] += 1
                except ShoalError as error:
                    outcomes[type(error).__name__] += 1
        except ShoalError as error:
            outcomes[f"load: {type(error).__name__}"] += 1
        finally:
            if made is not None:
                made.close()
            for left in folder.glob("bad*"):
                left.unlink()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--extension", type=Path, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    if options.sanitize:
        return sanitized(["--seconds", str(options.seconds), "--seed", str(seed)])
    sys.path.insert(0, str(ROOT))
    if options.extension is not None:
        use_extension(options.extension)
    print(f"seed {seed}", flush=True)
    for outcome, count in sorted(fuzz(options.seconds, seed).items()):
        print(f"{count:8,} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
