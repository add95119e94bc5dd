"""Takes the screenshots of docs/img from the page as it is, on the real model.

    python scripts/page_shots.py

Light, dark and phone width, each under 150 kB: the colours are few, so a palette loses nothing to see.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image
from playwright.sync_api import sync_playwright
from tests.browser.conftest import CHROMIUM, MODEL
from tests.browser.page import QUESTION, Bench
from tests.support.live import Live

from shoal.engine.engine import Engine

ROOT = Path(__file__).parent.parent
SHOTS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 880}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 880}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "is_mobile": True},
}


def main() -> None:
    into = ROOT / "docs" / "img"
    into.mkdir(exist_ok=True)
    with Live(Engine.load(MODEL, max_batch=8), name=MODEL) as live, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, settings in SHOTS.items():
            page = browser.new_context(**settings).new_page()
            bench = Bench(page, live.url).open(seed=7, oneByOne=True, maxTokens=96)
            bench.ask(QUESTION)
            page.locator("#stop").wait_for(state="hidden", timeout=180_000)
            page.locator("#run-title").click()  # the focus off the message box
            page.wait_for_timeout(300)
            path = into / f"swarmbench-{name}.png"
            shot = Image.open(io.BytesIO(page.screenshot()))
            shot.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=4).save(path, optimize=True)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
        browser.close()


main()
