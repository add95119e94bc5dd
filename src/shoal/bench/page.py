"""What the page costs and how quick it feels: eight agents from the click to their ends, in a real Chromium."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import BenchmarkError
from shoal.models import Store

_QUESTION = "Should our town build a swimming pool?"
_TOKENS = 48  # of each agent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WORST = ("longest_task_ms", "longest_gap_ms", "layout_shift")  # of all runs; the rest are medians
_MEASURE = """
async (question) => {
  const tasks = [];
  const shifts = [];
  const watch = (type, take) => new PerformanceObserver((list) => list.getEntries().forEach(take)).observe({ type });
  watch("longtask", (entry) => tasks.push(entry.duration));
  watch("layout-shift", (entry) => shifts.push(entry.value));
  document.getElementById("question").value = question;
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const state = (n) => document.querySelector(`.card[data-number="${n}"]`)?.dataset.state;
  const done = (n) => ["done", "failed", "cancelled"].includes(state(n));
  const texts = () => [...document.querySelectorAll("#cards .prose")].map((e) => e.textContent.length).join();
  const began = performance.now();
  document.getElementById("send").click();
  while (document.getElementById("run-title").textContent !== question) await frame();
  let [first, agents, frames, changed, gap, last, shown] = [null, null, 0, 0, 0, performance.now(), ""];
  while (!done(8)) {
    const now = await frame();
    const text = texts();
    if (first === null && /[1-9]/.test(text)) first = performance.now();
    if (first !== null && agents === null) {
      frames += 1;
      changed += text !== shown;
      gap = Math.max(gap, now - last);
    }
    [last, shown] = [now, text];
    if (agents === null && [0, 1, 2, 3, 4, 5, 6, 7].every(done)) agents = performance.now();
  }
  const all = performance.now();
  await new Promise((resolve) => setTimeout(resolve, 200));
  return {
    first_text_s: (first - began) / 1e3,
    agents_s: (agents - began) / 1e3,
    all_s: (all - began) / 1e3,
    frames_per_s: frames / ((agents - first) / 1e3),
    text_frames_per_s: changed / ((agents - first) / 1e3),
    longest_gap_ms: gap,
    longest_task_ms: Math.max(0, ...tasks),
    layout_shift: shifts.slice(1).reduce((a, b) => a + b, 0),
  };
}
"""


_WEIGHT = """
() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .reduce((sum, entry) => sum + entry.decodedBodySize, 0)
"""


def measure_page(model: str, runner: str, runs: int) -> dict[str, Any]:
    """Seconds from the click, frames a second while agents stream, the longest task of the page's thread, its weight.

    After one run that is not counted. `BenchmarkError` without Playwright or a Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        hint = "pip install playwright; apt-get install chromium"
        raise BenchmarkError("Playwright is not installed", value="playwright", hint=hint) from error
    chromium = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if chromium is None:
        raise BenchmarkError("no Chromium is found", value=_BROWSERS, hint="apt-get install chromium")
    with _served(model, runner) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        preferred = json.dumps(json.dumps({"seed": 1, "maxTokens": _TOKENS}))
        page.add_init_script(f"localStorage.shoal ??= {preferred}")
        page.goto(url)
        page.wait_for_function("document.getElementById('connection-text').textContent === 'connected'")
        page.wait_for_function("document.querySelectorAll('#count input').length === 8")
        weight = page.evaluate(_WEIGHT)
        results = [page.evaluate(_MEASURE, f"{_QUESTION} ({number})") for number in range(runs + 1)][1:]
        browser.close()
    return {"tokens": _TOKENS, "page_bytes": weight, **_told(results)}


def _told(results: list[Mapping[str, float]]) -> dict[str, float]:
    """Medians over the runs; of what a run shows at its worst, the worst."""
    take: dict[str, Callable[[list[float]], float]] = dict.fromkeys(_WORST, max)
    named = {name: [result[name] for result in results] for name in results[0]}
    return {name: round(take.get(name, statistics.median)(values), 4) for name, values in named.items()}


@contextmanager
def _served(model: str, runner: str) -> Iterator[str]:
    """The address of `shoal serve` in a process of its own, with the models as they are and an empty history."""
    command = [sys.executable, "-c", "from shoal.cli.main import main; main()", "serve", "--port", "0"]
    command += ["--model", model, "--runner", runner, "--kv-cache", "off"]  # no prompt of the run before is found
    with tempfile.TemporaryDirectory() as home:
        for part in ("models", "cache"):
            (Store().root / part).mkdir(parents=True, exist_ok=True)
            Path(home, part).symlink_to(Store().root / part)
        environment = {**os.environ, "SHOAL_HOME": home}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as server:
            try:
                assert server.stdout is not None
                yield server.stdout.readline().split()[-1].removesuffix("/v1")
            finally:
                server.terminate()
