"""Kill a process at random moments of writing KV to disk, and look at what it left: `kv_kill.py [TIMES] [--seed N]`.

Each time a process writes blocks of its own and of the toy model's, is killed with SIGKILL, and another one opens the
directory. What it finds must be whole and right, or not there. Exit status 1 when a block was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.config import EngineConfig
from shoal.engine.inputs import InputProcessor
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.disk import DiskTier
from shoal.engine.kv.files import KVFiles
from shoal.engine.kv.tiering import Tiering
from shoal.engine.loop import StepLoop
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.types import Event, Namespace, Request, SamplingParams

_QUOTA = 6 << 20  # small: files are deleted all the time as well
_BLOCK = 200_000  # bytes of the largest plain blocks: written in more than one go


def digest_of(number: int) -> bytes:
    """The name of plain block `number`."""
    return hashlib.blake2b(str(number).encode(), digest_size=20).digest()


def block_of(number: int) -> NDArray[np.uint8]:
    """Its bytes, which follow from its name."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, 1 + number * 7919 % _BLOCK, dtype=np.uint8)


def prompt_of(number: int) -> tuple[int, ...]:
    """A prompt that shares its beginning with one in four others."""
    rng = random.Random(number // 4)
    trunk = [rng.randrange(250) for _ in range(200)]
    return (*trunk, *(number % 4 + 3 * i for i in range(40)))


def loop_of(root: Path | None) -> StepLoop:
    """A loop on the toy model, with a disk or without."""
    runner = FakeRunner(num_blocks=200, block_size=8)
    loop = StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), EngineConfig())
    if root is not None:
        files = KVFiles(root, runner.identity, {"model": "toy"}, _QUOTA)
        buffers = Buffers(runner.block_bytes, 1 << 16)
        loop.tiering = Tiering(loop.scheduler, runner, None, DiskTier(files, buffers), buffers)
    return loop


def ask(loop: StepLoop, number: int, task: str) -> tuple[tuple[int, ...], int]:
    """Tokens of one request, and how many of its prompt came from disk."""
    events: list[Event] = []
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    request = Request(prompt_tokens=prompt_of(number), sampling=sampling, namespace=Namespace(task))
    loop.add(str(number), loop.inputs.prepare(request), events.append)
    while not loop.idle:
        loop.step()
    result = events[-1].result
    assert result is not None
    return result.tokens, result.receipt.disk_tokens


def write(root: Path, first: int) -> None:
    """Write for ever: plain blocks, and what the toy model computes."""
    plain = KVFiles(root, "plain", {"model": "plain"}, _QUOTA)
    loop = loop_of(root)
    print("began", flush=True)
    for number in range(first, first + 10**6):
        plain.write(digest_of(number % 500), block_of(number % 500))
        if number % 20 == 0:
            plain.clean()
        ask(loop, number % 64, f"task {number % 2}")
        while loop.copy_out():
            pass


def check(root: Path, expected: dict[int, tuple[int, ...]]) -> tuple[int, int, list[str]]:
    """Plain blocks found, prompt tokens that came from disk, and what was wrong."""
    wrong, found, restored = [], 0, 0
    plain = KVFiles(root, "plain", {"model": "plain"}, _QUOTA)
    for number in range(500):
        data = plain.read(digest_of(number), Buffers(1, 0))
        if data is not None:
            found += 1
            if not np.array_equal(data, block_of(number)):
                wrong.append(f"plain block {number}")
    loop = loop_of(root)
    for number in random.sample(range(64), 6):
        tokens, from_disk = ask(loop, number, f"task {number % 2}")
        restored += from_disk
        if tokens != expected.setdefault(number, ask(loop_of(None), number, "")[0]):
            wrong.append(f"tokens of prompt {number}")
        if ask(loop, number, f"nobody's {random.random()}")[1]:
            wrong.append(f"prompt {number} was found in another namespace")
    loop.close()
    plain.clean()
    left = [path.name for path in plain.path.iterdir() if path.name.startswith(".")]
    return found, restored, wrong + [f"{name} was left" for name in left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, arguments.seed)
    random.seed(arguments.seed)
    root = Path(tempfile.mkdtemp(prefix="kv-kill-"))
    expected: dict[int, tuple[int, ...]] = {}
    found = restored = failures = 0
    for time_no in range(arguments.times):
        command = [sys.executable, __file__, "--write", str(root), "--seed", str(random.randrange(10**6))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.random() * 0.3)
            process.send_signal(signal.SIGKILL)
        blocks, tokens, wrong = check(root, expected)
        found, restored, failures = found + blocks, restored + tokens, failures + len(wrong)
        for what in wrong:
            print(f"after kill {time_no}: {what}", flush=True)
        if (time_no + 1) % 25 == 0:
            print(f"{time_no + 1} kills, {failures} wrong", flush=True)
    shutil.rmtree(root, ignore_errors=True)  # a writer that was told to end may be at its last file
    print(f"{arguments.times} kills: {found} plain blocks and {restored} prompt tokens found again, {failures} wrong")
    return 1 if failures or not found or not restored else 0


if __name__ == "__main__":
    sys.exit(main())
