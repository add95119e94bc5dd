"""`shoal conform`: what of it runs in a few seconds; the outside suites have their own extra."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.conform.functions import _tool
from shoal.conform.outcome import CaseOutcome, Target, attempt
from shoal.conform.page import page
from shoal.errors import ConfigError
from tests.server.conftest import MODEL
from tests.support.live import Live

pytest.importorskip("openai", reason="the extra `clients` is not installed")


def test_every_case_of_our_matrix_passes_on_our_server(real: Live, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    arguments = ["conform", f"shoal={real.url}/v1={MODEL}", "--suite", "openai-sdk", "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    text = out.read_text()
    assert ran.exit_code == 0, text
    assert "| openai-sdk | 36 of 36 |" in text


def test_a_case_that_fails_is_listed_with_its_reason() -> None:
    def broken() -> None:
        raise AssertionError("it | has\na <reason>")

    outcomes = [attempt("good", lambda: None), attempt("bad", broken), CaseOutcome("odd", "skip", "not here")]
    text = page({"s": {"a": outcomes}}, [Target("a", "http://h/v1")], {"s": "about"}, "shoal conform")
    assert "| s | 1 of 2 | about |" in text
    assert "| a | bad | fails | it \\| has a &lt;reason> |" in text
    assert "| a | odd | skipped | not here |" in text
    assert "good" not in text


@pytest.mark.parametrize("text", ["http://h/v1", "a=h/v1", "=http://h/v1"])
def test_a_server_is_a_name_and_a_url(text: str) -> None:
    with pytest.raises(ConfigError):
        Target.parse(text)
    assert Target.parse("a=http://h:1/v1/=m") == Target("a", "http://h:1/v1", "m")


def test_an_answer_is_forced_by_what_the_checker_accepts() -> None:
    function = {
        "name": "math.root",
        "description": "",
        "parameters": {
            "type": "dict",
            "properties": {"x": {"type": "float"}, "names": {"type": "array"}, "unit": {"type": "string"}},
        },
    }
    forced = _tool(function, {"x": [4, 5.5], "names": [["a"]], "unit": ["", "m"]})["function"]
    assert forced["name"] == "math_root"
    assert forced["parameters"]["properties"]["x"] == {"enum": [4.0, 5.5]}
    assert forced["parameters"]["required"] == ["x", "names"]
    assert forced["parameters"]["properties"]["unit"] == {"enum": ["m"]}
