"""What the page costs and how quick it feels: eight agents of 48 tokens from the click, in a real Chromium.

    python scripts/page_bench.py [--runs 7] [--tokens 48]

Starts `shoal serve` on a free port and drives the page over it. Prints one JSON line: seconds from the click until the
eight agents have ended on the screen (and with the synthesis), frames a second while they stream, the longest task of
the page's thread, the shift of its layout, and the weight of the page. With
--check it fails when the eight take over 2 s, a task over 100 ms, or the page weighs over 300 kB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.browser.conftest import CHROMIUM, MODEL
from tests.browser.page import QUESTION, Bench

from shoal.models import Store
from shoal.server.swarmbench.page_files import ROOT

MEASURE = """
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--check", action="store_true", help="fail when a bound is broken")
    options = parser.parse_args()
    Store().resolve(MODEL)
    with tempfile.TemporaryDirectory() as home:
        for part in ("models", "cache"):  # the model as it is, a history of its own
            (Store().root / part).mkdir(parents=True, exist_ok=True)
            Path(home, part).symlink_to(Store().root / part)
        told = measure(home, options.runs, options.tokens)
    weight = sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file())
    told = {"figure": "page", "tokens": options.tokens, "runs": options.runs, **told, "page_bytes": weight}
    print(json.dumps(told))
    good = told["agents_s"] <= 2 and told["longest_task_ms"] <= 100 and weight < 300_000
    return 0 if good or not options.check else 1


def measure(home: str, runs: int, tokens: int) -> dict[str, Any]:
    """Medians over some runs, after one that is not counted; of the longest task the worst."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-c", "from shoal.cli.main import main; main()", "serve", "--port", "0"]
    command += ["--kv-cache", "off"]  # a prompt of the run before is not to be found
    environment = {**os.environ, "SHOAL_HOME": home}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1].removesuffix("/v1")
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1360, "height": 900})
                Bench(page, url).open(maxTokens=tokens)
                results = [page.evaluate(MEASURE, f"{QUESTION} ({number})") for number in range(runs + 1)][1:]
                browser.close()
        finally:
            server.terminate()
    told = {name: statistics.median(result[name] for result in results) for name in results[0]}
    for name in ("longest_task_ms", "longest_gap_ms", "layout_shift"):
        told[name] = max(result[name] for result in results)
    return {name: round(value, 4) for name, value in told.items()}


if __name__ == "__main__":
    sys.exit(main())
