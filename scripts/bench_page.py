"""docs/benchmarks.md, its plots and the README's table, from a result: `scripts/bench_page.py RESULT`.

The other results in the same folder stand at the end of the page, and in a sentence each in the README.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.bench import tables
from shoal.bench.report import beside, write
from shoal.bench.results import Results

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def main(result: Path) -> None:
    name = result.resolve().relative_to(ROOT).as_posix()
    others = beside(result.resolve())
    for path in write(result, ROOT / "docs", name, others):
        print(path)
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end or BEGIN in after or END in after:
        raise SystemExit(f"README.md has no place for the table: {BEGIN} ... {END}, once each")
    readme.write_text(f"{before}{BEGIN}\n{tables.readme(Results.read(result), others)}\n{END}{after}", "utf-8")
    print(readme)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
