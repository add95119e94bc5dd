"""The examples on the real model, with short answers: their shapes are what is tested, not the model's wisdom."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from shoal.agents import read_trace
from shoal.errors import ModelNotFoundError
from shoal.models import Store

MODEL = "smollm2-135m"


@pytest.fixture(autouse=True, scope="module")
def stored() -> None:
    try:
        Store().resolve(MODEL, pull=False)
    except ModelNotFoundError:
        pytest.skip("the default model is not in the store")


def run(name: str, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    importlib.import_module(f"examples.{name}").main(list(argv))
    return str(capsys.readouterr().out)


def states(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^== (\S+) \((\w+)\)$", printed, re.MULTILINE))


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    printed = run("report", capsys, "--max-tokens", "16", "--seed", "1", "--trace", str(path))
    names = ["planner", "writer[0]", "writer[1]", "writer[2]", "reviewer", "editor"]
    assert states(printed) == dict.fromkeys(names, "done")
    attempts = {r["agent_id"]: r for r in read_trace(path) if r["kind"] == "attempt"}
    assert set(attempts) == set(names)
    assert all(attempts[name]["cache_hit"] for name in names[2:])
    ends = [attempts[name]["left_at_ms"] for name in names]
    assert attempts["editor"]["submitted_at_ms"] >= max(ends[:5])
    starts = [attempts[f"writer[{i}]"]["submitted_at_ms"] for i in range(3)]
    assert max(starts) < min(ends[1:4])  # the three write at the same time


def test_map_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("map_reduce", capsys, "--documents", "4", "--tokens", "100")
    forms = [json.loads(text) for text in re.findall(r"^reader\[\d\]: (\{.*)$", printed, re.MULTILINE)]
    assert len(forms) == 4
    for form in forms:
        assert set(form) == {"place", "project", "year", "summary", "risk"}
        assert 150 <= len(form["summary"]) <= 240
        assert 1900 <= form["year"] <= 2100
    assert re.search(r"^4 documents, \d+ tokens read, \d+ written", printed, re.MULTILINE)
    read, written = map(int, re.findall(r"(\d+) tokens read, (\d+) written", printed)[0])
    assert read > 4 * 100
    assert 4 * 50 < written <= 4 * 128


def test_the_corpus_is_what_it_says() -> None:
    documents = importlib.import_module("examples.map_reduce").corpus(16, 1000)
    assert len(set(documents)) == 16
    from shoal.models import load_tokenizer

    tokenizer = load_tokenizer(Store().resolve(MODEL, pull=False))
    lengths = [len(tokenizer.encode(text, add_special=False)) for text in documents]
    assert min(lengths) > 850
    assert max(lengths) < 1150


def test_critics(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("critics", capsys, "--max-tokens", "24")
    assert states(printed) == dict.fromkeys(["planner", "critic[0]", "critic[1]", "critic[2]", "revision"], "done")
    cached, prompt = map(int, re.findall(r"found (\d+) of its (\d+) prompt tokens", printed)[0])
    assert 32 <= cached < prompt  # the planner's conversation was there


def test_best_of_n(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("best_of_n", capsys, "--drafts", "5", "--keep", "2", "--max-tokens", "64", "--seed", "1")
    drafts = dict(re.findall(r"^(draft-\w) \((\w+)\)", printed, re.MULTILINE))
    assert len(drafts) == 5
    assert set(drafts.values()) == {"done", "skipped"}
    best = re.findall(r"The judge takes (draft-\w): ", printed)
    assert drafts[best[0]] == "done"


def test_debate(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("debate", capsys, "--rounds", "1", "--max-tokens", "16")
    names = re.findall(r"^== (\S+)$", printed, re.MULTILINE)
    assert set(names[:2]) == {"for", "against"}
    assert set(names[2:4]) == {"for-again", "against-again"}
    assert names[4] == "judge"
    assert re.search(r"^The judge sides with (for|against)\.$", printed, re.MULTILINE)
