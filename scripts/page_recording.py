"""Records the page while it answers, on the real model, as docs/img/swarmbench.webp.

    python scripts/page_recording.py

Frames are screenshots as they come, each shown for as long as it stood; nothing is made faster or cut. At most 3 MB.
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from tests.browser.conftest import CHROMIUM, MODEL
from tests.browser.page import QUESTION, Bench
from tests.support.live import Live

from shoal.engine.engine import Engine

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "img" / "swarmbench.webp"
VIEW = {"width": 1440, "height": 860}  # four cards beside each other
MOST_BYTES = 3_000_000
FRAME_S = 0.12  # seldom enough that taking pictures does not slow the model down by much
END_S = 3.0  # how long the last picture stays


def record(page: Page) -> tuple[list[Image.Image], list[int]]:
    """Pictures from the question to the last word, and how many milliseconds each stood."""
    shots: list[tuple[float, bytes]] = []
    while page.locator("#stop").is_visible() or len(shots) < 5:
        begin = time.perf_counter()
        shots.append((begin, page.screenshot(type="jpeg", quality=90)))
        page.wait_for_timeout(max(0.0, FRAME_S - (time.perf_counter() - begin)) * 1e3)
    shots.append((time.perf_counter(), page.screenshot(type="jpeg", quality=90)))
    times = [at for at, _ in shots]
    stood = [*(b - a for a, b in itertools.pairwise(times)), END_S]
    return [Image.open(io.BytesIO(shot)).convert("RGB") for _, shot in shots], [round(s * 1e3) for s in stood]


def main() -> None:
    with Live(Engine.load(MODEL, max_batch=8, warmup=True), name=MODEL) as live, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport=VIEW, color_scheme="light").new_page()
        Bench(page, live.url).open(seed=7, oneByOne=False, maxTokens=96).ask(QUESTION)
        frames, stood = record(page)
        browser.close()
    for quality in (70, 50, 30):
        frames[0].save(
            TARGET, save_all=True, append_images=frames[1:], duration=stood, loop=0, quality=quality, method=4
        )
        if TARGET.stat().st_size <= MOST_BYTES:
            break
    else:
        raise SystemExit(f"{TARGET} has {TARGET.stat().st_size} bytes, more than {MOST_BYTES}")
    print(f"{TARGET.relative_to(ROOT)}: {len(frames)} frames, {sum(stood) / 1e3:.1f} s, {TARGET.stat().st_size} bytes")


main()
