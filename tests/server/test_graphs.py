"""Graphs from files on the page, over HTTP and on the toy model: what is refused, what runs, what is kept."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.agents.graphcards import MAX_NODES
from shoal.server.swarmbench.record import apply
from shoal.server.swarmbench.schemas import MAX_GRAPH
from tests.server.test_swarms import events, finished, record
from tests.support.live import Live, error_of, toy

GRAPH = """name: fleet
shared: "Facts about {question}."
nodes:
  plan: {task: Plan it., sampling: {max_tokens: 6, ignore_eos: true}}
  part: {map: parts, after: plan, task: "Write about {item}.", sampling: {max_tokens: 5, ignore_eos: true}}
  editor: {after: part, task: Join them., sampling: {max_tokens: 7, ignore_eos: true}}
"""
INPUTS = {"question": "Why boats?", "parts": '["sails", "oars"]'}
NAMES = ["plan", "part", "editor", "part[0]", "part[1]"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(toy(step_s=0.001)) as server:
        yield server


def begin(live: Live, text: str = GRAPH, inputs: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"file": "fleet.yaml", "text": text, "inputs": INPUTS if inputs is None else inputs, "seed": 1, **fields}
    answer = live.post("/swarmbench/graphs/runs", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def refusal(live: Live, text: str, inputs: dict[str, str] | None = None) -> str:
    """Why a run of a graph does not begin: always a 400."""
    answer = live.post("/swarmbench/graphs/runs", {"file": "f.yaml", "text": text, "inputs": inputs or {}})
    assert answer.status_code == 400, answer.text
    return str(error_of(answer)["message"])


def cards_of(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {card["name"]: card for card in run["together"]["cards"]}


def test_a_file_is_described_or_refused_with_its_line(live: Live) -> None:
    told = live.post("/swarmbench/graphs", {"file": "fleet.yaml", "text": GRAPH}).json()
    assert told["name"] == "fleet"
    assert told["inputs"] == ["question", "parts"]
    assert [node["name"] for node in told["nodes"]] == ["plan", "part", "editor"]
    assert told["nodes"][2]["needs"] == ["part"]
    wrong = live.post("/swarmbench/graphs", {"file": "fleet.yaml", "text": GRAPH.replace("after: part", "after: prat")})
    assert wrong.status_code == 400
    assert error_of(wrong)["code"] == "graph_invalid"
    assert error_of(wrong)["message"].startswith("fleet.yaml:6: after names 'prat', which is no node")
    json_file = live.post("/swarmbench/graphs", {"file": "g.json", "text": '{"nodes": {"a": {"task": "Go."}}}'})
    assert [node["name"] for node in json_file.json()["nodes"]] == ["a"]


def test_each_node_has_a_card_those_of_rules_too(live: Live) -> None:
    run = finished(live, begin(live))
    assert run["state"] == "done"
    cards = cards_of(run)
    assert list(cards) == NAMES
    assert {card["state"] for card in cards.values()} == {"done"}
    assert {name: card["tokens"] for name, card in cards.items()} == {
        "plan": 6, "part": 0, "editor": 7, "part[0]": 5, "part[1]": 5,
    }  # fmt: skip
    assert cards["part"]["text"] == ""
    assert cards["part[1]"]["task"] == "Write about {item}."
    assert run["title"] == "fleet: Why boats?"
    assert run["finals"] == [2]
    assert run["graph"]["text"] == GRAPH
    assert run["together"]["summary"]["tokens"] == 23
    assert live.http.get("/swarmbench/runs", params={"q": "boats"}).json()["data"][0]["totals"]["agents"] == 4
    assert run["together"]["summary"]["cached_tokens"] > 0
    texts = [card["text"] for card in cards.values()]
    assert texts == [card["text"] for card in cards_of(finished(live, begin(live))).values()]  # the seed decides
    markdown = live.http.get(f"/swarmbench/runs/{run['id']}?form=markdown").text
    assert "## part[0]" in markdown


def test_a_snapshot_and_its_frames_make_the_record_as_cards_are_added(live: Live) -> None:
    got = events(live, begin(live))
    made = copy.deepcopy(got[0][2])
    for _, name, data in got:
        if name == "frame":
            apply(made, data)
    assert made == record(live, made["id"])
    assert len(made["together"]["cards"]) == 5


def test_a_failed_attempt_and_what_stands_in_for_it_are_shown(live: Live) -> None:
    text = """
nodes:
  cut: {task: Go., schema: {type: object, properties: {a: {type: string, minLength: 90}}, required: [a]},
        sampling: {max_tokens: 4, temperature: 0.5}, on_failure: {retry: 2, backoff_s: 0, then: {default: {a: b}}}}
  gone: {task: Go., schema: {type: object, properties: {a: {type: string, minLength: 90}}, required: [a]},
         sampling: {max_tokens: 4}, on_failure: skip}
  broken: {task: Go., schema: {type: object, properties: {a: {type: string, minLength: 90}}, required: [a]},
           sampling: {max_tokens: 4}}
"""
    got = events(live, begin(live, text, {}))
    run = record(live, got[0][2]["id"])
    made = copy.deepcopy(got[0][2])
    for _, name, data in got:
        if name == "frame":
            apply(made, data)
    assert made == run
    cards = cards_of(run)
    assert {name: card["state"] for name, card in cards.items()} == {
        "cut": "done",
        "gone": "skipped",
        "broken": "failed",
    }
    assert cards["cut"]["text"] == '{"a": "b"}'  # not what three attempts wrote
    assert all("cut at 4 tokens" in card["error"] for card in cards.values())
    assert run["state"] == "failed"  # a final node failed


def test_a_follow_up_has_what_the_graph_was_for(live: Live) -> None:
    first = finished(live, begin(live))
    answer = cards_of(first)["editor"]["text"].strip()
    second = finished(live, begin(live, after=first["id"]))
    assert second["turn"] == 2
    assert second["earlier"][0]["answer"] == answer
    assert cards_of(second)["plan"]["prompt_tokens"] > cards_of(first)["plan"]["prompt_tokens"] + len(answer)


def test_a_node_is_stopped_and_the_others_go_on_without_it(slow: Live) -> None:
    text = """
nodes:
  long: {task: Go., sampling: {max_tokens: 900, ignore_eos: true}}
  last: {after: long, task: End., sampling: {max_tokens: 3, ignore_eos: true}, on_failure: {default: none}}
  beside: {task: Go., sampling: {max_tokens: 3, ignore_eos: true}}
  both: {after: [long, beside], task: End., sampling: {max_tokens: 3, ignore_eos: true}}
"""
    run = begin(slow, text, {})
    while cards_of(record(slow, run))["long"]["tokens"] < 3:
        time.sleep(0.01)
    assert slow.post(f"/swarmbench/runs/{run}/stop", {"card": 0}).status_code == 200
    ended = finished(slow, run)
    states = {name: card["state"] for name, card in cards_of(ended).items()}
    assert states == {"long": "cancelled", "last": "skipped", "beside": "done", "both": "done"}
    assert ended["state"] == "cancelled"
    slow.wait_idle()


def test_all_nodes_are_stopped(slow: Live) -> None:
    run = begin(slow, GRAPH.replace("max_tokens: 6", "max_tokens: 900"))
    while cards_of(record(slow, run))["plan"]["tokens"] < 3:
        time.sleep(0.01)
    slow.post(f"/swarmbench/runs/{run}/stop", {})
    ended = finished(slow, run)
    assert ended["state"] == "cancelled"
    assert {card["state"] for card in cards_of(ended).values()} == {"cancelled"}
    slow.wait_idle()


def test_what_is_too_large_is_refused_before_it_runs(live: Live) -> None:
    nodes = "".join(f"  n{i}: {{task: Go.}}\n" for i in range(MAX_NODES + 1))
    many = f"has {MAX_NODES + 1} nodes"
    assert many in refusal(live, f"nodes:\n{nodes}")
    assert many in error_of(live.post("/swarmbench/graphs", {"file": "f", "text": f"nodes:\n{nodes}"}))["message"]
    items = [0] * MAX_NODES
    assert many in refusal(live, f"nodes: {{a: {{map: {items}, task: Go.}}}}")
    assert many in refusal(live, "nodes: {a: {map: x, task: Go.}}", {"x": str(items)})
    assert live.post("/swarmbench/graphs", {"file": "f", "text": "#" * (MAX_GRAPH + 1)}).status_code == 400
    assert "lacks input 'parts'" in refusal(live, GRAPH, {"question": "Why?"})
    assert "no input 'other'" in refusal(live, GRAPH, {**INPUTS, "other": "x"})
    assert "wait for each other: a -> b -> a" in refusal(
        live, "nodes: {a: {task: x, after: b}, b: {task: x, after: a}}"
    )
    assert live.http.get("/swarmbench/state").json()["running"] == []


def test_a_graph_that_grows_too_large_is_ended(live: Live) -> None:
    text = f"""
nodes:
  loop:
    loop: {{agents: {{again: {{task: Go., sampling: {{max_tokens: 1, ignore_eos: true}}}}}},
           until: {{contains: never}}, at_most: {MAX_NODES + 5}}}
"""
    run = finished(live, begin(live, text, {}))
    assert run["state"] == "failed"
    assert f"has {MAX_NODES + 1} nodes" in run["note"]
    text = f"""
nodes:
  many: {{map: {[0] * (MAX_NODES - 3)}, task: Go., sampling: {{max_tokens: 900, ignore_eos: true}}}}
  one: {{reduce: many, task: Join.}}
"""
    steps = live.engine.stats().steps
    run = finished(live, begin(live, text.replace("900", "1"), {}))
    assert run["state"] == "failed"
    assert "nodes" in run["note"]
    assert len(run["together"]["cards"]) == MAX_NODES
    assert live.engine.stats().steps < steps + 100
    live.wait_idle()


def test_a_graph_that_a_stop_cut_off_goes_on_after_it(tmp_path: Path) -> None:
    history = tmp_path / "history.db"
    long = GRAPH.replace("max_tokens: 7", "max_tokens: 80")
    with Live(toy(step_s=0.001), history=history) as server:
        wanted = cards_of(finished(server, begin(server, long)))
    with Live(toy(step_s=0.01), history=history, drain_s=0.0) as server:
        run = begin(server, long)
        while cards_of(record(server, run))["editor"]["tokens"] < 3:
            time.sleep(0.01)
    with Live(toy(step_s=0.001), history=history) as server:
        ended = finished(server, run)
        assert ended["state"] == "done"
        got = cards_of(ended)
        assert {name: card["text"] for name, card in got.items()} == {n: c["text"] for n, c in wanted.items()}
        assert list(got) == NAMES
        assert got["part[0]"]["tokens"] == 5  # it was not asked again, and its numbers are known


def test_a_file_does_not_choose_whose_prefixes_it_shares(live: Live) -> None:
    first = finished(live, begin(live))
    other = "namespace: {agent: somebody, version: 7}\n" + GRAPH
    second = finished(live, begin(live, other))
    assert cards_of(second)["plan"]["cached_tokens"] == 0
    again = finished(live, begin(live))  # a version of a file takes nothing from others
    assert cards_of(again)["plan"]["cached_tokens"] >= cards_of(first)["plan"]["cached_tokens"] > 0
