"""The Python of docs/agents.md runs, in its order, on the toy model."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import go
from tests.support.cli_fake import opened

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)


def test_the_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the checkpoint of the page is written there
    monkeypatch.setattr("shoal.engine.loading.open_model", lambda *_, **__: opened())
    first, *others = blocks()
    assert len(others) >= 2
    inner = "".join(textwrap.indent(block, "    ") for block in others)
    code = compile(first + inner, str(DOCS), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def main() -> None:
        work = eval(code, names)
        if inspect.isawaitable(work):
            await work

    go(main())
    states = names["result"].states
    assert {"draft", "hire", "judge", "translator", "translator-2", "critic-loop", "branch"} <= set(states)
    assert all(state.final for state in states.values())
