"""How long packing a model's weights takes beside a copy of its file: python scripts/native_pack.py FILE.gguf [...]

Both read the file from the page cache, write beside it and wait for the disk (fsync); medians of rounds in turn.
Packing begins with the header of the file, which a copy does not look at: some 0.2 s for a large vocabulary.
The bar is twice the time of the copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shoal.config import Precision
from shoal.models.files import local_files
from shoal.runners.native.runner import packed_path, write_packed
from shoal.runners.registry import LocalModel


def copy(file: Path, target: Path) -> None:
    """A copy that is on disk when this returns."""
    shutil.copyfile(file, target)
    with target.open("rb") as copied:
        os.fsync(copied.fileno())


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(file: Path, precision: Precision, rounds: int) -> None:
    files = local_files("model", file)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        packed, copied = packed_path(files, Path(folder), precision), Path(folder) / "copy"
        times = []
        for _ in range(rounds):
            copying = timed(lambda: copy(file, copied))
            times.append((copying, timed(lambda: write_packed(LocalModel.read(files), packed, precision))))
            size = packed.stat().st_size
            copied.unlink()
            packed.unlink()
    copies, packs = (statistics.median(each) for each in zip(*times, strict=True))
    share = size / file.stat().st_size
    told = f"{file.name} ({file.stat().st_size / 1e6:,.0f} MB), precision {precision}: copy {copies:.2f} s"
    print(f"{told}, packing {packs:.2f} s = {packs / copies:.2f} of it, {share:.3f} of the bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="auto")
    chosen = parser.parse_args()
    for file in chosen.files:
        measure(file, chosen.precision, chosen.rounds)


if __name__ == "__main__":
    main()
