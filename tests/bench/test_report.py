"""The page, the README's table and the plots: made from a result, and in step with the one they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.bench import report, tables
from shoal.bench.results import Results, figure, ratio
from shoal.cli.main import app
from shoal.errors import BenchmarkError
from tests.support.bench_results import document, write

ROOT = Path(__file__).parents[2]


def test_the_page_agrees_with_the_result_it_names() -> None:
    """Fails when docs/benchmarks.md, its plots or the README's table were not made from the stored result."""
    page = (ROOT / "docs" / report.PAGE).read_text("utf-8")
    named = re.match(r"<!-- Made by `shoal bench report (\S+) --others` \((\w+)\)", page)
    assert named, "the page names no result"
    results = Results.read(ROOT / named[1])
    others = report.beside(ROOT / named[1])
    assert others
    assert page == report.markdown(results, named[1], others)
    assert f"<!-- bench:begin -->\n{tables.readme(results, others)}\n<!-- bench:end -->" in (
        ROOT / "README.md"
    ).read_text("utf-8")
    images = re.findall(r"!\[\w+\]\((img/bench-\w+\.svg)\)", page)
    assert images
    for image in images:
        assert results.digest in (ROOT / "docs" / image).read_text("utf-8"), f"{image} was drawn from another result"
    drawn = {f"img/{path.name}" for path in (ROOT / "docs" / "img").glob("bench-*.svg")}
    assert drawn == set(images)


def test_the_documentation_names_every_key_and_metric() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        told = json.loads(path.read_text("utf-8"))
        keys = {*told, *told["gate"], *told["levels"][0]}
        for level in told["levels"]:
            for result in level["results"].values():
                keys |= {*result, *(metric for run in result["runs"] for metric in run)}
        assert not [key for key in sorted(keys) if f"`{key}`" not in text], path.name


def test_a_report_says_what_the_result_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "benchmarks" / "results" / "a.json", document())
    made = CliRunner().invoke(app, ["bench", "report", str(path), "--out", str(tmp_path / "docs")])
    assert made.exit_code == 0, made.output
    assert "Also measured" not in (tmp_path / "docs" / "benchmarks.md").read_text("utf-8")
    page = (tmp_path / "docs" / "benchmarks.md").read_text("utf-8")
    assert "| shoal (3 runs) | 1,000 (990 to 1,010) |" in page
    assert "| llama.cpp, same file | 4.00 |" in page, "eight streams: 1,000 over 250"
    assert "| of the ceiling | 50 % |" in page
    assert "| shoal / llama.cpp, same file | - | 0.25 | - |" in page
    assert "A step of the engine takes 0.500 times one of the static batch." in page
    assert "HTTP adds 25.0 ms to the time to first token." in page
    assert "Without `genai`: openvino-genai is not installed." in page
    table = tables.readme(Results.read(path))
    assert "| llama.cpp, same file (3 runs) | 250 | 250 | 250 | 4.00 | 4.00 | 0.0027 |" in table
    images = sorted(path.name for path in (tmp_path / "docs" / "img").iterdir())
    assert images == ["bench-burst.svg", "bench-fanout.svg", "bench-scaling.svg", "bench-scoreboard.svg"]
    first = [(tmp_path / "docs" / "img" / name).read_bytes() for name in images]
    report.write(path, tmp_path / "docs")
    assert [(tmp_path / "docs" / "img" / name).read_bytes() for name in images] == first
    path.write_text(json.dumps(document(2.0)), "utf-8")
    assert report.markdown(Results.read(path), str(path)) != page


def test_a_result_without_figures_is_still_a_page() -> None:
    """Everything throttled: nothing is quoted, nothing is drawn, nothing breaks."""
    told = document()
    for level in told["levels"]:
        for result in level["results"].values():
            result |= {"summary": {}, "throttled": len(result["runs"])}
    page = report.markdown(Results(told), "r.json")
    assert "![" not in page
    assert re.search(r"\d+ runs were throttled", page)
    assert not re.search(r"\| shoal \| [\d,]+(\.\d+)? \(", page)


def test_outputs_that_sharing_changed_are_named() -> None:
    told = document()
    for level in told["levels"]:
        for key, agreed in level["equality"].items():
            agreed["equal"] = agreed["of"] if key.startswith("shoal") else 0
    assert "must change nothing, and did not." in report.markdown(Results(told), "r.json")
    fanout = next(level for level in told["levels"] if level["scenario"] == "fanout")
    fanout["equality"]["shoal:unshared"]["equal"] = 0
    assert "must change nothing, and did in fanout 256." in report.markdown(Results(told), "r.json")


def test_a_failed_system_says_so() -> None:
    told = document()
    burst = next(level for level in told["levels"] if level["scenario"] == "burst")
    burst["results"]["llama"] = {"runs": [], "throttled": 0, "summary": {}, "spans": [], "error": "out of memory"}
    assert "| llama.cpp, same file | failed: out of memory |" in report.markdown(Results(told), "r.json")


def test_ratios_need_both_figures() -> None:
    results = Results(document())
    level = results.level("scaling", "8")
    assert ratio(level, "wall_s", "shoal", "llama") == pytest.approx(0.25)
    assert ratio(level, "wall_s", "shoal", "genai") is None
    assert figure(None, "shoal", "wall_s") is None


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", json.dumps({**document(), "schema": 2})):
        path = tmp_path / "x.json"
        path.write_text(text, "utf-8")
        with pytest.raises(BenchmarkError, match=r"result|read"):
            Results.read(path)
