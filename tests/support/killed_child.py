"""A process that runs a random graph slowly, to be killed: SEED, the checkpoint's path, and "begin" or "resume"."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.support.random_graphs import INPUTS, HashEngine, RandomGraph, whole_run


def main() -> None:
    seed, path = int(sys.argv[1]), Path(sys.argv[2])
    settings: dict[str, Any] = {"resumed": True} if sys.argv[3] == "resume" else {"seed": seed, **INPUTS}
    asyncio.run(whole_run(RandomGraph(seed), HashEngine(pause_s=0.01), checkpoint=path, **settings))


if __name__ == "__main__":
    main()
