"""What moved beyond noise, and counts against their baseline."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from shoal.bench.compare import moves, same_machine
from shoal.bench.counts import counts, differences
from shoal.bench.results import Results
from shoal.cli.main import app
from tests.support.bench_results import document, write

ROOT = Path(__file__).parents[2]


def test_the_same_result_has_not_moved() -> None:
    assert list(moves(Results(document()), Results(document(1.005)))) == []


def test_slower_is_worse_in_times_and_in_rates(tmp_path: Path) -> None:
    found = list(moves(Results(document()), Results(document(1.5))))
    assert {move.contender for move in found} == {"shoal"}
    assert all(move.better is False for move in found)
    wall = next(move for move in found if (move.scenario, move.metric) == ("burst", "wall_s"))
    assert round(wall.change, 3) == 0.5
    old, new = write(tmp_path / "a.json", document()), write(tmp_path / "b.json", document(1.5))
    made = CliRunner().invoke(app, ["bench", "compare", str(old), str(new)])
    assert made.exit_code == 1
    assert "WORSE   burst 16 shoal wall_s: 1.00 -> 1.50 (+50 %)" in made.stdout
    made = CliRunner().invoke(app, ["bench", "compare", str(new), str(old)])
    assert made.exit_code == 0
    assert "better  scaling 8 shoal decode_tokens_per_s: 667 -> 1,000 (+50 %)" in made.stdout
    assert ", 0 for the worse" in made.stdout


def test_single_runs_are_not_compared() -> None:
    told = document(3.0)
    for level in told["levels"]:
        for figure in level["results"]["shoal"]["summary"].values() if "shoal" in level["results"] else ():
            figure["n"] = 1
    assert list(moves(Results(document()), Results(told))) == []


def test_another_machine_is_said() -> None:
    told = document()
    told["machine"]["cpu"] = "another"
    assert same_machine(Results(document()), Results(told)) == ["machine cpu"]


def test_no_count_has_moved() -> None:
    """What the scheduler makes of the workloads. `shoal bench counts --write` stores new counts when that is meant."""
    baseline = json.loads((ROOT / "benchmarks" / "counts.json").read_text("utf-8"))
    assert differences(baseline, counts()) == []


def test_differences_are_named() -> None:
    old = {"a": {"steps": 1, "tokens": 2}, "b": {"steps": 1}}
    new = {"a": {"steps": 1, "tokens": 3}, "c": {"steps": 1}}
    assert differences(old, new) == [
        "a: tokens was 2, is 3",
        "b: only in the baseline",
        "c: only now",
    ]
