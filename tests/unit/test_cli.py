"""The command line in this process, on the toy model: output, exit status, messages."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from shoal import __version__
from shoal.agents.cards import CardState
from shoal.agents.swarm import SPECIALISTS, Swarm
from shoal.bench.systems import KINDS
from shoal.cli import options
from shoal.cli.console import describe, human_bytes, printable
from shoal.cli.main import app
from shoal.cli.screen import CardGrid, tail
from shoal.errors import ConfigError, KVBudgetError
from shoal.models import DEFAULT_MODEL, Store
from shoal.power import Level, SimulatedSensor
from shoal.types import SamplingParams
from tests.support.cli_fake import opened
from tests.support.tiny_gguf import write_tiny

Shoal = Callable[..., Result]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shoal:
    """Runs the command line; `interrupt_at` are steps at which Ctrl-C comes."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))

    def run(*arguments: str, stdin: str | None = None, **fake: Any) -> Result:
        monkeypatch.setattr("shoal.engine.loading.open_model", lambda *_, **__: opened(**fake))
        monkeypatch.setattr("shoal.cli.console.ensure_model", lambda model: None)
        return CliRunner().invoke(app, arguments, input=stdin)

    return run


def test_the_help_of_bench_names_each_peer(shoal: Shoal) -> None:
    text = " ".join(shoal("bench", "--help").stdout.replace("│", " ").split())
    named = text.partition("Peers, by commas: ")[2].partition(";")[0].split(", ")
    assert sorted(named) == sorted(name for name, kind in KINDS.items() if kind.peer)


def test_help_and_version(shoal: Shoal) -> None:
    assert shoal("--version").stdout == f"shoal {__version__}\n"
    text = shoal("--help").stdout
    assert all(command in text for command in ("swarm", "run", "models", "doctor"))


def test_swarm_prints_cards_and_a_summary(shoal: Shoal) -> None:
    result = shoal("swarm", "Why?", "--max-tokens", "12")
    assert result.exit_code == 0, result.stderr
    assert not CONTROL.search(result.stdout)
    assert result.stderr == ""
    for specialist in SPECIALISTS:
        assert re.search(rf"^== {specialist.name} \(done, \d+ tokens, \d+ tok/s\)\n[a-z]+\n", result.stdout, re.M)
    assert re.search(r"^\d+ tokens in \d+\.\d\d s, \d+ tok/s aggregate, shared prefix \d+ tokens", result.stdout, re.M)


def test_a_governor_is_told_of_where_it_slows_a_command_down(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = SimulatedSensor(Level.SERIOUS)
    monkeypatch.setattr("shoal.power.governor.find_sensors", lambda **_: [hot])
    told = "power serious: 40% speed, background agents wait (simulated 2)"
    result = shoal("swarm", "Why?", "-n", "2", "--max-tokens", "4", "--battery", "60")
    assert result.stdout.rstrip().endswith(f"; {told}"), result.stderr
    assert (
        json.loads(shoal("swarm", "Why?", "-n", "1", "--max-tokens", "4", "--governor", "--json").stdout)["power"][
            "level"
        ]
        == "serious"
    )
    assert told in shoal("run", "Why?", "--max-tokens", "4", "--governor").stderr
    refused = shoal("run", "Why?", "--joules", "100")
    assert (refused.exit_code, "needs a sensor that counts energy" in refused.stderr) == (2, True)


def test_swarm_json_is_one_document_and_nothing_else(shoal: Shoal) -> None:
    result = shoal("swarm", "Why?", "-n", "3", "--max-tokens", "12", "--json", "--model", "toy")
    document = json.loads(result.stdout)
    assert list(document) == ["question", "model", "agents", "tokens", "wall_s", "tokens_per_s", "prefix_tokens"]
    assert (document["question"], document["model"]) == ("Why?", "toy")
    for agent in document["agents"]:
        assert list(agent) == ["name", "text", "tokens", "finish_reason", "ttft_s", "cached_tokens"]
        assert agent["finish_reason"] in ("stop", "length")
        assert agent["text"].isalpha()
    assert [agent["name"] for agent in document["agents"]] == [s.name for s in SPECIALISTS[:3]]
    assert document["tokens"] == sum(agent["tokens"] for agent in document["agents"])
    assert document["agents"][1]["cached_tokens"] >= document["prefix_tokens"] > 0


def test_the_same_seed_gives_the_same_answers_serial_or_not(shoal: Shoal) -> None:
    def texts(*more: str) -> list[str]:
        document = json.loads(shoal("swarm", "Why?", "--max-tokens", "12", "--json", *more).stdout)
        return [agent["text"] for agent in document["agents"]]

    assert texts() == texts() == texts("--serial")
    assert texts() != texts("--seed", "1")


@pytest.mark.parametrize("serial", [False, True])
def test_ctrl_c_prints_what_there_is(shoal: Shoal, serial: bool) -> None:
    more = ["--serial"] if serial else []
    result = shoal("swarm", "Why?", "--max-tokens", "3000", "--json", *more, step_s=0.002, interrupt_at=(20,))
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    reasons = [agent["finish_reason"] for agent in document["agents"]]
    assert "aborted" in reasons
    assert document["agents"][0]["text"]
    assert result.stderr.startswith("interrupted; aborted: ")


def test_ctrl_c_without_a_terminal_prints_the_cards(shoal: Shoal) -> None:
    result = shoal("swarm", "Why?", "--max-tokens", "3000", "-n", "2", step_s=0.002, interrupt_at=(20,))
    assert result.exit_code == 130
    assert re.search(r"^== Plan \(aborted, \d+ tokens", result.stdout, re.M)
    assert "Plan" in result.stderr


def test_run_streams_text_and_reports_on_stderr(shoal: Shoal) -> None:
    result = shoal("run", "Why?", "--max-tokens", "10", "--temperature", "1", "--seed", "4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip().isalpha()
    assert re.search(r"\[\d+ prompt tokens, \d+ tokens, (length|stop), first after", result.stderr)
    again = shoal("run", "-", "--max-tokens", "10", "--temperature", "1", "--seed", "4", stdin="Why?")
    assert again.stdout == result.stdout
    raw = shoal("run", "Why?", "--raw", "--max-tokens", "10", "--temperature", "1", "--seed", "4")
    assert raw.stdout != result.stdout
    assert "[4 prompt tokens" in raw.stderr


def test_run_ends_on_ctrl_c(shoal: Shoal) -> None:
    result = shoal("run", "Why?", "--max-tokens", "3000", step_s=0.002, interrupt_at=(20,))
    assert result.exit_code == 130
    assert len(result.stdout.strip()) >= 10
    assert "aborted" in result.stderr


BAD = [
    (["swarm", "Why?", "-n", "9"], "agents is 9", "from 1 to 8"),
    (["swarm", "Why?", "-n", "0"], "agents is 0", "from 1 to 8"),
    (["swarm", "  "], "the question is empty", "ask something"),
    (["swarm", "Why?", "--temperature", "-1"], "temperature is -1", "from 0.0 to 100.0"),
    (["swarm", "Why?", "--max-tokens", "0"], "max_tokens is 0", "from 1 to"),
    (["swarm", "Why?", "--seed", "-3"], "seed is -3", "from 0 to"),
    (["swarm", "Why?", "--kv-memory", "lots"], "kv_memory is 'lots'", "512MiB"),
    (["swarm", "Why?", "--threads", "0"], "threads is 0", "from 1 to 1024"),
    (["swarm", "why " * 3000], "the prompt has", "shorten the prompt"),
    (["run", ""], "the prompt is empty", "give some text"),
    (["run", "Why?", "--top-p", "0"], "top_p is 0", "above 0"),
    (["run", "Why?", "--min-p", "nan"], "min_p is nan", "from 0.0 to 1.0"),
    (["run", "Why?", "--stop", ""], "stop is ('',)", "non-empty strings"),
    (["run", "why " * 3000], "the prompt has", "shorten the prompt"),
    (["models", "info", "smollm2-135m"], "not in the store", "pull smollm2-135m"),
    (["models", "rm", "smollm3-135m"], "there is no model 'smollm3-135m'", "did you mean 'smollm2-135m'"),
    (["models", "pull", "no such model"], "there is no model", "shoal models list"),
]


@pytest.mark.parametrize(("arguments", "wrong", "advice"), BAD, ids=[" ".join(a)[:40] for a, _, _ in BAD])
def test_bad_input_is_a_message_and_status_2(shoal: Shoal, arguments: list[str], wrong: str, advice: str) -> None:
    result = shoal(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert wrong in result.stderr
    assert advice in result.stderr
    assert len(result.stderr.splitlines()) <= 2


@pytest.mark.parametrize("arguments", [["swarm"], ["swarm", "Why?", "-n", "many"], ["nonsense"], ["run", "a", "--x"]])
def test_usage_errors_are_status_2_too(shoal: Shoal, arguments: list[str]) -> None:
    result = shoal(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage" in result.stderr


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["run", "-"], input=b"\xff\xfe")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 (byte 0)" in result.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("shoal.engine.engine.Engine.load", broken)
    result = CliRunner().invoke(app, ["run", "Why?"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_failed_agent_is_status_2(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, plan: object) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr("shoal.runners.fake.FakeRunner.execute", broken)
    result = shoal("swarm", "Why?", "-n", "2")
    assert result.exit_code == 2
    assert "2 of 2 agents failed" in result.stderr
    assert "the device is gone" in result.stderr
    assert "(failed)" in result.stdout


def test_models_of_an_empty_store(shoal: Shoal) -> None:
    result = shoal("models", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no models in" in result.stderr
    assert json.loads(shoal("models", "list", "--json").stdout) == []


def test_models_worth_a_try(shoal: Shoal) -> None:
    lines = shoal("models", "search", "qwen3", "apache").stdout.splitlines()
    assert lines
    assert all("qwen3" in line.lower() and "Apache-2.0" in line for line in lines)
    told = json.loads(shoal("models", "search", "--json").stdout)
    sizes = [model["bytes"] for model in told["models"]]
    assert sizes == sorted(sizes)
    assert told["models"][0]["name"] == DEFAULT_MODEL
    store = Store()
    for model in told["models"]:
        store.check_name(model["name"])  # each is what `pull` takes
    nothing = shoal("models", "search", "nobody-has-this")
    assert (nothing.exit_code, nothing.stdout) == (0, "")


def test_models_list_says_what_each_is(shoal: Shoal, tmp_path: Path) -> None:
    assert shoal("quantize", str(write_tiny(tmp_path / "tiny.gguf", "llama")), "small").exit_code == 0
    (model,) = json.loads(shoal("models", "list", "--json").stdout)
    assert model["family"] == "llama"
    assert model["context_length"] > 0
    assert (model["runner"] is None) == ("no runner" in shoal("models", "list").stdout)
    Path(model["path"]).write_bytes(b"GGUF")  # of another size: as good as absent
    assert json.loads(shoal("models", "list", "--json").stdout) == []


def test_errors_say_value_limit_and_hint_once() -> None:
    error = KVBudgetError("too much", param="max_tokens", value=7, limit=5, hint="use less")
    assert describe(error) == "shoal: too much (value: 7; limit: 5)\n  use less"
    assert describe(ConfigError("x is 7", value=7, hint="at most 5")) == "shoal: x is 7\n  at most 5"
    assert describe(ConfigError("line\nbreak\x1b[2J", limit=["a", "b"])) == "shoal: line break[2J (limit: a, b)"


def test_small_things() -> None:
    assert [human_bytes(n) for n in (0, 999, 98_362_432, 1.5e11)] == ["0 B", "999 B", "98.4 MB", "150 GB"]
    assert printable("a\x1b[31m\tb\n\x9bc\r") == "a[31m\tb\nc"
    assert options.DEFAULT_MODEL == DEFAULT_MODEL


def test_the_tail_of_a_text_is_wrapped_to_cells() -> None:
    assert tail("one two three four", 9, 2) == "three\nfour"
    assert tail("one\n\ntwo", 9, 3) == "one\n\ntwo"
    assert tail("漢字かな交じり文", 6, 3) == "漢字か\nな交じ\nり文"
    assert tail("", 5, 3) == ""


def test_the_grid_fits_the_screen_and_ends_in_full() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=30, color_system=None)
    work = Swarm("Why?", SPECIALISTS, SamplingParams(max_tokens=4))
    words = " ".join(f"word{n}" for n in range(80))
    with CardGrid(console, "Why?", "toy", work) as grid:
        for card in work.cards:
            card.text, card.tokens, card.state = words, 160, CardState.DECODING
        grid.show([])
        frame = out.getvalue().rpartition("╭─ Key facts")[2]
        assert frame.count("\n") <= 30
        assert "word79" in frame
        assert "word0 " not in frame
        work.cards[0].state = CardState.DONE
        grid.end()
    end = out.getvalue().rpartition("╭─ Key facts")[2]
    assert end.count("word0 ") == end.count("word79") == len(SPECIALISTS)
    assert "done, 160 tokens" in end
    assert out.getvalue().rpartition("\x1b[?25l")[2].count("\x1b[?25h") == 1  # the cursor is back


def test_compare_shows_both_and_how_far_apart_they_are(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Why?\n\nWhat is it?\n")
    arguments = ("compare", "first", "second", "--prompts", str(tmp_path / "prompts"), "--max-tokens", "6")
    result = shoal(*arguments)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^agreement 1\.0000 of 12 tokens, divergence 0\.00000 nats per token$", result.stdout, re.M)
    told = json.loads(shoal(*arguments, "--json").stdout)
    assert (told["agreement"], told["same_texts"], told["positions"]) == (1.0, 1.0, 12)
    assert [side["model"] for side in told["models"]] == ["first", "second"]
    missing = shoal("compare", "a", "b", "--prompts", str(tmp_path / "none"))
    assert missing.exit_code == 2
    assert "cannot be read" in missing.stderr


def test_quantize_writes_a_file_or_into_the_store(shoal: Shoal, tmp_path: Path) -> None:
    source = str(write_tiny(tmp_path / "tiny.gguf", "llama"))
    result = shoal("quantize", source, str(tmp_path / "out.gguf"), "--type", "q4_0")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"out\.gguf: [\d.]+ kB to [\d.]+ kB, 15 matrices as q4_0, relative error", result.stdout)
    assert shoal("quantize", source, "small", "--type", "q8_0").exit_code == 0
    assert shoal("models", "list").stdout.startswith("small ")
    again = shoal("quantize", source, "small")
    assert again.exit_code == 2
    assert "cannot be called 'small'" in again.stderr
