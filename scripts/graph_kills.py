"""Kill random graphs while they run, resume them, and compare with runs that never stopped.

python scripts/graph_kills.py [--graphs 1000] [--first 0]       about four minutes for a thousand

Each graph is killed in random writes of its checkpoint, in the middle of a line too, until it ends. Its outputs must be
those of a run without kills, and nothing may run again whose end was recorded. The first that differs ends the script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.random_graphs import killed_and_resumed


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first graph")
    options = parser.parse_args()
    kills = 0
    for seed in range(options.first, options.first + options.graphs):
        with tempfile.TemporaryDirectory() as folder:
            kills += killed_and_resumed(seed, Path(folder, "run.checkpoint"))
    print(f"{options.graphs} graphs, {kills} kills: all ended as if never killed, nothing ran twice")


if __name__ == "__main__":
    main()
