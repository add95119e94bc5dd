"""The server is killed and started again while the page is open."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from playwright.sync_api import Page, expect

from tests.browser.conftest import MODEL
from tests.browser.page import HOT, QUESTION, Bench


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(port: int, home: Path) -> Iterator[subprocess.Popen[str]]:
    code = "from shoal.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--model", MODEL, "--port", str(port)]
    environment = {**os.environ, "SHOAL_HOME": str(home)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline().startswith("shoal serves")
            yield server
        finally:
            if server.poll() is None:
                server.kill()


def test_the_page_finds_a_server_that_was_killed_and_started_again(page: Page, home: Path) -> None:
    port = free_port()
    with serving(port, home) as server:
        bench = Bench(page, f"http://127.0.0.1:{port}").open(maxTokens=4000, temperature=HOT)
        run = bench.ask()
        bench.wait_writing()
        page.wait_for_timeout(2000)  # the record is saved once a second
        server.send_signal(signal.SIGKILL)
        server.wait(60)
    expect(page.locator("#connection-text")).to_have_text(re.compile("no connection|connection lost"))
    with serving(port, home):
        expect(page.locator("#banner-text")).to_have_text(
            re.compile("The server was restarted. The run goes on"), timeout=60_000
        )
        expect(page.locator("#connection-text")).to_have_text("connected")
        assert bench.run_id == run
        bench.wait_writing()
        page.get_by_role("button", name="Stop all").click()
        bench.wait_end()
        assert "failed" not in bench.states()
        page.evaluate("localStorage.shoal = JSON.stringify({ maxTokens: 8 })")
        page.reload()
        bench.ask(f"{QUESTION} Again?")
        bench.wait_end()
        assert set(bench.states()) == {"done"}
