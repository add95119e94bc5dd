"""SwarmBench in a real browser, on the real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import MODEL, TWIN
from tests.browser.page import HOT, QUESTION, Bench
from tests.support.brake import Brake
from tests.support.live import Live

LONG: dict[str, Any] = {"maxTokens": 2000, "temperature": HOT}  # goes on for longer than the brake lets it
SHIFT = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""


def test_eight_cards_stream_and_finish_and_a_synthesis_follows(bench: Bench, live: Live) -> None:
    page = bench.page
    page.evaluate(SHIFT)
    bench.ask()
    expect(bench.cards).to_have_count(9)
    page.evaluate("window.shift = 0")  # showing the run was one; streaming must bring none
    bench.wait_end()
    assert set(bench.states()) == {"done"}
    assert all(bench.texts())
    assert page.evaluate("window.shift") < 0.01
    expect(page.locator("#tile-rate")).to_have_text(re.compile(r"\d+ tok/s"))
    expect(page.locator("#totals")).to_have_text(
        re.compile(r"8 agents, \d+ tokens, [\d.]+ s · \d+ of \d+ prompt tokens")
    )
    expect(page.locator("#tile-prefix")).to_have_text("40 tokens")
    expect(page.locator("#tile-kv-note")).to_have_text(re.compile(r"[1-9].* MB saved"))
    facts = re.compile(r"\d+\stok · \d+\stok/s · TTFT\s\d+\sms · \d\d\scached")
    shown = page.locator("#run .card .card-facts").all_inner_texts()
    assert sum(bool(facts.search(text)) for text in shown) >= 7, shown  # all but the one that computes what they share
    told = page.locator("#announcer p").all_inner_texts()
    assert len(told) <= 5, "the listener is told of events, not of tokens"
    assert told[-1].startswith("All have ended")
    live.wait_idle()


def test_the_strip_tells_who_was_in_a_step(bench: Bench) -> None:
    bench.ask()
    bench.wait_end()
    strip, note = bench.page.locator("#strip"), bench.page.locator("#strip-note")
    expect(note).to_contain_text("at most 8 in the batch")
    strip.focus()
    strip.press("ArrowRight")
    expect(note).to_have_text(re.compile(r"Together, step 1: \d in the batch.*KV .* held.*joined: .*Key facts"))
    painted = strip.evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert painted > 9  # a colour for each, and some more


def test_one_card_is_stopped_and_the_others_go_on(page: Page, live: Live, writing: Brake) -> None:
    bench = Bench(page, live.url).open(maxTokens=90, temperature=HOT)
    bench.ask()
    stopped = bench.wait_writing()
    with page.expect_response("**/stop"):
        bench.card(stopped).get_by_role("button", name="Stop").click()
    writing.release()
    expect(bench.card(stopped)).to_have_attribute("data-state", "cancelled")
    bench.wait_end()
    states = bench.states()
    assert states.pop(stopped) == "cancelled"
    assert set(states) == {"done"}


def test_all_are_stopped(page: Page, live: Live, writing: Brake) -> None:
    bench = Bench(page, live.url).open(**LONG)
    bench.ask()
    bench.wait_writing()
    with page.expect_response("**/stop"):
        page.get_by_role("button", name="Stop all").click()
    writing.release()
    bench.wait_end()
    states = bench.states()
    assert states[8] == "cancelled"
    assert "cancelled" in states[:8]
    assert set(states) <= {"done", "cancelled"}
    live.wait_idle()


def test_one_by_one_shows_both_times(bench: Bench) -> None:
    bench.page.locator("#count label").nth(2).click()
    bench.page.get_by_role("switch", name="One by one").check(force=True)
    bench.ask()
    bench.wait_end()
    expect(bench.cards).to_have_count(4)
    expect(bench.page.locator("#tile-alone")).to_have_text(re.compile(r"[\d.]+ s vs [\d.]+ s"))
    expect(bench.page.locator("#tile-alone-note")).to_contain_text("3 of 3 answers equal")


@pytest.mark.parametrize("choice", ["Let it finish", "End it now"])
def test_the_model_is_switched_in_mid_stream(page: Page, live: Live, writing: Brake, choice: str) -> None:
    waits = choice == "Let it finish"
    bench = Bench(page, live.url).open(**{**LONG, "maxTokens": 90 if waits else 2000})
    before = live.http.get("/swarmbench/state").json()["model"]
    other = TWIN if before == MODEL else MODEL
    bench.ask()
    bench.wait_writing()
    expect(page.locator("#model option")).to_have_count(2)
    page.locator("#model").select_option(other)
    with page.expect_request("**/models/load"):
        page.get_by_role("button", name=choice).click()
    writing.release()
    bench.wait_end()
    expect(page.locator("#send")).to_be_enabled()  # again: not while a model is being loaded
    expect(page.locator("#progress")).to_be_hidden()
    assert live.http.get("/swarmbench/state").json()["model"] == other
    states = bench.states()
    assert (set(states) == {"done"}) is waits
    assert waits or states[8] == "cancelled"  # the synthesis was still to come
    page.evaluate("localStorage.shoal = JSON.stringify({ maxTokens: 4 })")
    page.reload()
    expect(page.locator("#model")).to_have_value(other)
    bench.ask("And now?")
    bench.wait_end()
    expect(page.locator("#run-facts")).to_contain_text(other)


def test_a_run_survives_a_reload(page: Page, live: Live, writing: Brake) -> None:
    bench = Bench(page, live.url).open(maxTokens=90, temperature=HOT)
    run = bench.ask()
    bench.wait_writing()
    page.reload()
    expect(page.locator("#run-title")).to_have_text(QUESTION)
    bench.wait_writing()
    writing.release()
    assert bench.run_id == run
    bench.wait_end()
    assert set(bench.states()) == {"done"}
    record = live.http.get(f"/swarmbench/runs/{run}").json()
    assert [card["tokens"] for card in record["together"]["cards"]] == [
        int(re.sub(r"\stok .*", "", text)) for text in page.locator("#run .card-facts").all_inner_texts()
    ]


def test_history_is_searched_reopened_renamed_and_deleted(bench: Bench) -> None:
    page = bench.page
    page.locator("#count label").nth(1).click()
    bench.ask("What do owls eat?")
    bench.wait_end()
    texts = bench.texts()
    page.get_by_role("button", name="New thread").click()
    bench.ask("How are ships built?")
    bench.wait_end()
    page.get_by_role("button", name="History").click()
    page.get_by_role("searchbox").fill("owls eat")
    items = page.locator("#runs li")
    expect(items).to_have_count(1)
    items.locator(".open").click()
    expect(page.locator("#run-title")).to_have_text("What do owls eat?")
    expect(bench.cards).to_have_count(3)
    bench.wait_end()
    assert bench.texts() == texts
    with page.expect_download() as download:
        items.get_by_role("button", name="Export as Markdown").click()
    assert download.value.suggested_filename == "What-do-owls-eat-.md"
    assert "## Key facts" in download.value.path().read_text()
    items.get_by_role("button", name="Rename").click()
    page.locator("#ask-input").fill("Owls")
    page.locator("#ask-input").press("Enter")
    expect(items.locator(".title")).to_have_text("Owls")
    items.get_by_role("button", name="Delete").click()
    page.locator("#ask-buttons").get_by_role("button", name="Delete").click()
    expect(items).to_have_count(0)
    expect(page.locator("#run")).to_be_hidden()


def test_a_thread_goes_on_also_after_a_reload(bench: Bench) -> None:
    page = bench.page
    page.locator("#count label").nth(1).click()
    first = bench.ask("What do owls eat?")
    bench.wait_end()
    closing = page.locator("#totals").inner_text()
    answer = bench.texts()[-1]
    bench.ask("And in winter?")
    bench.wait_end()
    earlier = page.locator("#earlier li")
    expect(earlier).to_have_count(1)
    page.reload()
    expect(page.locator("#run-title")).to_have_text("And in winter?")
    bench.ask("And cats?")
    bench.wait_end()
    expect(earlier).to_have_count(2)
    expect(earlier.locator("h2")).to_have_text(["What do owls eat?", "And in winter?"])
    assert earlier.nth(0).locator(".prose").inner_text().split() == answer.split()
    expect(earlier.nth(0).locator(".totals")).to_have_text(closing)
    shares = re.compile(r"2 agents, \d+ tokens, [\d.]+ s · (\d+) of (\d+) prompt tokens not computed again \(\d+ %\)")
    told = shares.fullmatch(page.locator("#totals").inner_text())
    assert told is not None
    assert int(told[1]) / int(told[2]) > 0.6  # the rules and both turns before
    page.get_by_role("button", name="History").click()
    item = page.locator("#runs li.current")
    expect(item.locator(".title")).to_have_text("What do owls eat?")
    expect(item.locator(".quiet")).to_contain_text(re.compile(r"3 turns · \d+ % reused"))
    earlier.nth(0).locator("a").click()
    expect(page.locator("#run-title")).to_have_text("What do owls eat?")
    expect(page.locator("#earlier")).to_be_hidden()
    assert bench.run_id == first
    page.get_by_role("button", name="New thread").click()
    expect(page.locator("#run")).to_be_hidden()
    bench.ask("Why do ships float?")
    bench.wait_end()
    expect(page.locator("#earlier")).to_be_hidden()


def test_a_phone_can_do_it(browser_phone: Page, live: Live) -> None:
    bench = Bench(browser_phone, live.url).open(maxTokens=8)
    bench.ask()
    bench.wait_end()
    assert set(bench.states()) == {"done"}
    wide = browser_phone.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    card = bench.card(0).bounding_box()
    assert card is not None
    assert card["width"] > 300
    for name in ("Ask", "Settings", "History"):
        box = browser_phone.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 32


@pytest.fixture
def browser_phone(context: BrowserContext) -> Page:
    page = context.new_page()
    page.set_viewport_size({"width": 390, "height": 844})
    return page


def test_the_keyboard_is_enough(page: Page, live: Live, writing: Brake) -> None:
    bench = Bench(page, live.url).open(**LONG)
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    bench.wait_writing()
    with page.expect_response("**/stop"):
        page.keyboard.press("Escape")
    writing.release()
    bench.wait_end()
    page.keyboard.press("Tab")  # the number of agents: one stop, arrows inside
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#count input").nth(6)).to_be_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#team")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(page.locator("#team")).to_be_hidden()
    expect(page.locator("#team-open")).to_be_focused()


def test_landmarks_names_and_live_regions(bench: Bench) -> None:
    page = bench.page
    bench.ask()
    bench.wait_end()
    for landmark in (page.get_by_role("banner"), page.get_by_role("main"), page.get_by_role("log")):
        expect(landmark).to_have_count(1)
    expect(page.get_by_role("region", name="Ask")).to_be_visible()
    expect(page.get_by_role("article", name="Key facts")).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, a")]
          .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("#run [aria-live]").count() == 0  # or a listener would hear every token


def test_specialists_are_edited_and_choices_remembered(bench: Bench) -> None:
    page = bench.page
    page.locator("#team-open").click()
    rows = page.locator("#team-list li")
    for number in range(2, 8):
        rows.nth(number).get_by_role("checkbox").uncheck()
    rows.nth(0).locator(".name").fill("Poet")
    rows.nth(0).locator("textarea").fill("Write one line of verse.")
    rows.nth(0).locator("textarea").blur()
    page.locator("#team").get_by_role("button", name="Done").click()
    page.get_by_role("button", name="Light or dark").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("#count input").nth(1)).to_be_checked()
    bench.ask()
    bench.wait_end()
    expect(page.locator("#run .card h3")).to_have_text(["Poet", "Plan", "Synthesis"])


GRAPH = """name: fleet
shared: "You write about {question}, in short sentences."
nodes:
  plan: {task: Name one thing., sampling: {max_tokens: 8, ignore_eos: true}}
  part: {map: parts, after: plan, task: "Write about {item}.", sampling: {max_tokens: 8, ignore_eos: true}}
  editor: {after: part, task: Join them., sampling: {max_tokens: 8, ignore_eos: true}}
"""


def test_a_graph_from_a_file_is_asked(bench: Bench, tmp_path: Path) -> None:
    page, dialog = bench.page, bench.page.locator("#graph")
    (tmp_path / "wrong.yaml").write_text(GRAPH.replace("after: part", "after: prat"))
    (tmp_path / "fleet.yaml").write_text(GRAPH)
    page.locator("#graph-open").click()
    page.locator("#graph-file").set_input_files(tmp_path / "wrong.yaml")
    expect(dialog.get_by_role("alert")).to_contain_text("wrong.yaml:6: after names 'prat', which is no node")
    page.locator("#graph-file").set_input_files(tmp_path / "fleet.yaml")
    expect(dialog.get_by_role("alert")).to_be_hidden()
    expect(dialog.locator("#graph-nodes b")).to_have_text(["plan", "part", "editor"])
    dialog.get_by_label("Input parts").fill('["sails", "oars"]')
    dialog.get_by_role("button", name="Done").click()
    expect(page.locator("#graph-open")).to_have_text("Graph: fleet")
    expect(page.locator("#team-open")).to_be_hidden()
    page.fill("#question", "boats")
    page.press("#question", "Enter")
    expect(page.locator("#run .card h3")).to_have_text(["plan", "part", "editor", "part[0]", "part[1]"])
    bench.wait_end()
    assert bench.states() == ["done"] * 5
    expect(page.locator("#run-facts")).to_contain_text("graph fleet (fleet.yaml)")
    expect(page.locator("#totals")).to_contain_text("4 agents, 32 tokens")
    expect(bench.card(4).locator(".card-facts")).to_contain_text("8\u00a0tok")
    page.locator("#graph-open").click()
    dialog.get_by_role("button", name="Back to the specialists").click()
    dialog.get_by_role("button", name="Done").click()
    expect(page.locator("#team-open")).to_be_visible()
    page.reload()  # what was written comes back with its cards
    expect(page.locator("#run .card h3")).to_have_count(5)


def test_settings_reach_the_engine_and_the_store_is_shown(bench: Bench, live: Live) -> None:
    page = bench.page
    page.get_by_role("button", name="Settings").click()
    stall = page.get_by_label("Stall bound")
    stall.fill("77")
    stall.blur()
    expect(page.locator("#storage li")).to_have_count(2)
    expect(page.locator("#storage")).to_contain_text("Q4_1 · 98.4 MB")
    deletable = page.locator("#storage").get_by_role("button", name="Delete")
    assert deletable.evaluate_all("buttons => buttons.map(b => b.disabled)").count(True) == 1
    page.get_by_label("Prefix sharing").uncheck(force=True)
    page.get_by_label("Max tokens").fill("6")
    page.get_by_label("Max tokens").blur()
    page.locator("#settings .close").click()
    assert live.engine.config.max_stall_ms == 77
    bench.ask()
    bench.wait_end()
    expect(page.locator("#tile-prefix-note")).to_have_text("sharing is off")
    expect(page.locator("#run-facts")).to_contain_text("at most 6 tokens each")
    expect(bench.card(1).locator(".card-facts")).to_have_text(re.compile(r"· 0\scached"))


def test_two_models_answer_side_by_side(bench: Bench) -> None:
    """The loaded model and a second one, one after another: the toy of two names has the same weights, and answers."""
    page = bench.page
    page.click("#settings-open")
    other = TWIN if page.locator("#model").input_value() == MODEL else MODEL
    row = page.locator("#storage li", has=page.locator("b", has_text=re.compile(f"^{other}$")))
    row.get_by_role("button", name="Compare").click()
    expect(page.locator("#sides-state")).to_contain_text("8 of 8 answers are the same", timeout=120_000)
    assert page.locator("#sides-body td").count() == 16
    expect(page.locator("#sides-body th").nth(1)).to_contain_text("tok/s")
    page.locator("#sides .close").click()


def test_a_precision_is_offered_where_it_can_be_made(bench: Bench) -> None:
    bench.page.click("#settings-open")
    choice = bench.page.get_by_label(f"Make {MODEL} at another precision")
    expect(choice).to_be_visible()
    assert choice.locator("option").all_inner_texts() == ["Make…", "q8_0", "q4_1", "q4_0"]
