"""The page as a test handles it."""

from __future__ import annotations

import json
import re
from typing import Any, Self

from playwright.sync_api import Locator, Page, expect

HOT = 2.0  # a temperature at which the model does not end by itself
QUESTION = "Should our town build a swimming pool?"
expect.set_options(timeout=30_000)  # two busy cores


class Bench:
    """SwarmBench in a tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def open(self, path: str = "/", **prefs: Any) -> Self:
        """Load the page, with choices as if made before."""
        text = json.dumps(json.dumps({"seed": 1, **prefs}))
        self.page.add_init_script(f"localStorage.shoal ??= {text}")
        self.page.goto(self.url + path)
        expect(self.page.locator("#connection-text")).to_have_text("connected")
        expect(self.page.locator("#count input")).to_have_count(8)
        return self

    def ask(self, question: str = QUESTION) -> str:
        """Ask, and give the run's id once it is on the screen."""
        before = self.page.url
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        expect(self.page).not_to_have_url(before)
        expect(self.page.locator("#run-title")).to_have_text(question)
        return self.run_id

    @property
    def run_id(self) -> str:
        return str(self.page.url).partition("#")[2]

    @property
    def cards(self) -> Locator:
        return self.page.locator("#run .card")

    def card(self, number: int) -> Locator:
        return self.page.locator(f'.card[data-number="{number}"]')

    def states(self) -> list[str]:
        told = self.cards.evaluate_all("cards => cards.map(card => card.dataset.state)")
        return [str(state) for state in told]

    def texts(self) -> list[str]:
        return [str(text) for text in self.page.locator("#run .prose").all_inner_texts()]

    def wait_writing(self) -> int:
        """Until an agent has some text and goes on; its card's number.

        Any agent: a model may end one of them early, and which one depends on the processor's kernels.
        """
        writing = self.page.locator('#run .card[data-state="decoding"]')
        writing = writing.filter(has=self.page.locator(".prose", has_text=re.compile(r"\w+ \w+"))).first
        return int(writing.get_attribute("data-number", timeout=30_000) or 0)

    def wait_end(self) -> None:
        """Until the run has ended."""
        expect(self.page.locator("#stop")).to_be_hidden()
        expect(self.page.locator("#run .card[aria-busy=true]")).to_have_count(0)
