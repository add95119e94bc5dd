"""A browser and servers for it. Skipped, with the reason, where there is no Chromium or no model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.engine.engine import Engine
from shoal.errors import ShoalError
from shoal.models import Store
from tests.support.brake import Brake

if TYPE_CHECKING:  # the test modules are skipped where playwright is not installed; this file is not
    from playwright.sync_api import Browser, BrowserContext, Page

    from tests.browser.page import Bench
    from tests.support.live import Live

MODEL = "smollm2-135m"
TWIN = "twin"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="package")  # not the session: Playwright keeps an event loop running while it is open
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium's own sandbox wants more rights than containers give; what it shows here is our own page.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="package")  # not the session: it changes SHOAL_HOME
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with the default model and a second one of the same weights, sharing what was derived from them."""
    real = Store()
    try:
        model = real.resolve(MODEL)
    except ShoalError as error:
        pytest.skip(f"no model: {error}")
    root = tmp_path_factory.mktemp("home")
    (root / "models" / TWIN).mkdir(parents=True)
    (root / "models" / MODEL).symlink_to(model.path.parent)
    (root / "models" / TWIN / "twin.gguf").symlink_to(model.path)
    marker = {"name": TWIN, "kind": "gguf", "files": {"twin.gguf": model.path.stat().st_size}}
    (root / "models" / TWIN / "shoal-model.json").write_text(json.dumps(marker))
    (real.root / "cache").mkdir(exist_ok=True)
    (root / "cache").symlink_to(real.root / "cache")
    before = os.environ.get("SHOAL_HOME")
    os.environ["SHOAL_HOME"] = str(root)
    yield root
    if before is None:
        del os.environ["SHOAL_HOME"]
    else:
        os.environ["SHOAL_HOME"] = before


@pytest.fixture(scope="module")
def brake() -> Brake:
    """Of every engine behind the page."""
    return Brake()


@pytest.fixture(scope="module")
def live(home: Path, brake: Brake) -> Iterator[Live]:
    """The real model, served with a history on disk; whatever is asked for, its weights are loaded."""
    from tests.support.live import Live

    def load(name: str) -> Engine:
        return brake.fitted(Engine.load(MODEL, max_batch=8))

    with Live(load(MODEL), load, name=MODEL, history=home / "history.db", drain_s=0.5) as server:
        yield server


@pytest.fixture
def writing(brake: Brake) -> Iterator[Brake]:
    """The brake, set: a run stops in mid-sentence and goes on when the test releases it."""
    brake.set(after=60)
    yield brake
    brake.release()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1360, "height": 900}, reduced_motion="reduce")
    made.set_default_timeout(30_000)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab in which an error of the page fails the test."""
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    assert errors == []


@pytest.fixture
def bench(page: Page, live: Live) -> Bench:
    """The page on the real model, few tokens to an answer."""
    from tests.browser.page import Bench

    return Bench(page, live.url).open(maxTokens=24)
