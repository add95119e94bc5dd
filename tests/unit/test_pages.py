"""The Python of the README and of docs/engine.md runs, in its order, on the toy model; and every link has its file."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.engine import Engine
from shoal.engine.loading import OpenedModel
from shoal.runners.fake import ByteTokenizer, FakeRunner

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


@pytest.fixture(autouse=True)
def toy_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `load` of a page gives the toy model."""
    model = OpenedModel(ByteTokenizer(), FakeRunner)
    monkeypatch.setattr("shoal.engine.loading.open_model", lambda *_, **__: model)


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def run(block: str, names: dict[str, Any], where: str) -> None:
    work = eval(compile(block, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(work):

        async def wait() -> None:
            await asyncio.wait_for(work, 60)

        asyncio.run(wait())


def test_every_snippet_of_the_readme_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    use, plan = blocks(ROOT / "README.md")
    run(use, {"__name__": "__main__"}, "README.md, use")
    told = capsys.readouterr().out
    assert "tokens a second in" in told
    assert told.count("length") + told.count("stop") == 3
    run(plan, {"__name__": "__main__"}, "README.md, plan")
    assert "'editor': <State.DONE" in capsys.readouterr().out


def test_the_snippets_of_the_engine_s_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(ROOT / "docs" / "engine.md")):
        run(block, names, f"engine.md, block {number}")
    assert isinstance(names["engine"], Engine)
    assert names["engine"].closed
    assert len(names["branches"]) == 3
    assert names["report"].results[0].text in ('{"mood":"good"}', '{"mood":"bad"}')
    assert capsys.readouterr().out


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_architecture_is_the_tree() -> None:
    """Every folder of the package is in the drawing, every module of the drawing and of the page's table is there."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "shoal"
    drawn = page.split("src/shoal/\n", 1)[1].split("tests/  ", 1)[0]
    folders = [path for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert not [path.name for path in folders if f"  {path.name}/" not in drawn]
    for line in re.findall(r"^  (\w+)/ +(.*)$", drawn, re.M):
        words = line[1].split("  ")[0]
        for word in words.split() if ":" not in words else ():
            name = word.rstrip("/")
            if name.isidentifier():
                place = package / line[0] / name
                assert place.is_dir() or place.with_suffix(".py").exists(), f"{line[0]}/{name}"
    for path in re.findall(r"`((?:core|engine|models|runners|agents|server|bench)/[\w/]+\.py)`", page):
        assert (package / path).exists(), path
