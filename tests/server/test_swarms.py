"""Swarm runs over HTTP, on the toy model: what streams, what is kept, what stops what."""

from __future__ import annotations

import copy
import itertools
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.engine.handles import Progress
from shoal.runners.fake import FakeRunner
from shoal.server.errors import ApiError
from shoal.server.swarmbench.history import History
from shoal.server.swarmbench.record import apply, totals
from shoal.server.swarmbench.steps import _kv
from shoal.server.swarmbench.turns import MAX_TURNS, thread_after
from tests.support.brake import Brake
from tests.support.live import Live, error_of, toy

AGENTS = [{"name": f"Agent {n}", "task": f"Say {n}."} for n in range(8)]
Entry = tuple[int | None, str, Any]  # the event's id, name and data
Events = list[Entry]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(toy(step_s=0.001)) as server:
        yield server


def begin(live: Live, **fields: Any) -> str:
    body = {"question": "Why?", "agents": AGENTS, "max_tokens": 12, "seed": 1, **fields}
    answer = live.post("/swarmbench/runs", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def events(live: Live, run: str, path: str = "events", timeout_s: float = 30.0) -> Events:
    """All events of a run, up to its end."""
    return list(follow(live, run, path, timeout_s))


def follow(live: Live, run: str, path: str = "events", timeout_s: float = 30.0) -> Iterator[Entry]:
    with httpx.stream("GET", f"{live.url}/swarmbench/runs/{run}/{path}", timeout=timeout_s) as answer:
        assert answer.status_code == 200
        number, name = None, ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield number, name, json.loads(line[6:])
                number = None


def record(live: Live, run: str) -> dict[str, Any]:
    return dict(live.http.get(f"/swarmbench/runs/{run}").json())


def finished(live: Live, run: str) -> dict[str, Any]:
    events(live, run)
    return record(live, run)


def test_eight_agents_and_a_synthesis_run_to_their_ends(live: Live) -> None:
    run = finished(live, begin(live))
    assert run["state"] == "done"
    cards = run["together"]["cards"]
    assert [card["name"] for card in cards] == [*(agent["name"] for agent in AGENTS), "Synthesis"]
    assert {card["state"] for card in cards} == {"done"}
    assert all(card["tokens"] and card["ttft_ms"] is not None for card in cards)
    summary = run["together"]["summary"]
    assert summary["tokens"] == sum(card["tokens"] for card in cards[:8])
    assert summary["widest"] == 8
    assert summary["prompt_tokens"] == sum(card["prompt_tokens"] for card in cards[:8])
    assert 0 < summary["cached_tokens"] < summary["prompt_tokens"]
    assert summary["prefix_tokens"] > 100  # the rules and the question, in bytes
    assert summary["kv_peak_saved"] > 0


def test_a_snapshot_and_its_frames_make_the_record(live: Live) -> None:
    got = events(live, begin(live))
    assert got[0][1] == "snapshot"
    assert got[-1][1] == "end"
    made = copy.deepcopy(got[0][2])
    frames = [data for _, name, data in got if name == "frame"]
    for frame in frames:
        apply(made, frame)
    assert made == record(live, made["id"])
    first = got[0][0]
    assert first is not None
    numbers = [number for number, name, _ in got if name == "frame"]
    assert numbers == list(range(first + 1, first + 1 + len(numbers)))


def test_following_goes_on_behind_the_last_frame_that_was_seen(live: Live) -> None:
    run = begin(live)
    whole = [entry for entry in events(live, run, "events?after=0") if entry[1] == "frame"]
    assert len(whole) > 2
    assert [entry for entry in events(live, run, "events?after=2") if entry[1] == "frame"] == whole[2:]
    header = httpx.get(f"{live.url}/swarmbench/runs/{run}/events", headers={"Last-Event-ID": "2"}).text
    assert "snapshot" not in header
    assert header.startswith("id: 3\n")


def test_the_steps_say_who_took_part_joined_and_left(live: Live) -> None:
    steps = finished(live, begin(live))["together"]["steps"]
    joined = left = 0
    for step in steps:
        assert not joined & step[6], "somebody joined twice"
        joined |= step[6]
        left |= step[7]
        assert step[5].bit_count() <= step[2]
    assert joined == left == 0b1_1111_1111
    assert max(step[2] for step in steps) == 8
    assert any(step[9] for step in steps), "nothing was shared"


def test_one_by_one_runs_the_same_again_alone(live: Live) -> None:
    run = finished(live, begin(live, one_by_one=True))
    alone = run["one_by_one"]
    assert run["same_texts"] == 8
    assert [c["text"] for c in alone["cards"]] == [c["text"] for c in run["together"]["cards"][:8]]
    assert alone["summary"]["widest"] == 1
    assert alone["summary"]["tokens"] == run["together"]["summary"]["tokens"]
    assert run["single_tokens_per_s"] > 0


def test_without_sharing_nothing_is_cached(live: Live) -> None:
    first = finished(live, begin(live, sharing=False))
    again = finished(live, begin(live, sharing=False))
    assert [card["cached_tokens"] for run in (first, again) for card in run["together"]["cards"]] == [0] * 18
    shared = finished(live, begin(live))
    texts = [[card["text"] for card in run["together"]["cards"]] for run in (first, again, shared)]
    assert texts[0] == texts[1] == texts[2]


def test_a_card_is_stopped_alone() -> None:
    brake = Brake()
    with Live(brake.fitted(toy())) as live:
        brake.set(after=20)
        run = begin(live, max_tokens=150)
        end = time.monotonic() + 60
        while record(live, run)["together"]["cards"][3]["tokens"] <= 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert live.post(f"/swarmbench/runs/{run}/stop", {"card": 3}).status_code == 200
        brake.release()
        states = [card["state"] for card in finished(live, run)["together"]["cards"]]
        assert states == ["done"] * 3 + ["cancelled"] + ["done"] * 5  # the synthesis reads what there is
        live.wait_idle()


def test_all_are_stopped(slow: Live) -> None:
    run = begin(slow, max_tokens=500, one_by_one=True)
    time.sleep(0.1)
    slow.post(f"/swarmbench/runs/{run}/stop", {})
    told = finished(slow, run)
    assert told["state"] == "cancelled"
    states = [card["state"] for card in told["together"]["cards"]]
    assert states[-1] == "cancelled"  # the synthesis had not begun
    assert states.count("cancelled") > 4
    assert set(states) <= {"cancelled", "done"}  # the toy model may have ended one by itself
    assert told["one_by_one"] is None
    slow.wait_idle()


def test_a_run_goes_on_when_nobody_follows(slow: Live) -> None:
    run = begin(slow, max_tokens=30)
    next(follow(slow, run))
    deadline = time.monotonic() + 60
    while record(slow, run)["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert record(slow, run)["state"] == "done"


def test_a_switch_of_models_ends_a_run_that_does_not_finish_in_time(slow: Live) -> None:
    run = begin(slow, max_tokens=2000)
    assert slow.post("/models/load", {"model": "other", "drain_s": 0.1}).status_code == 200
    told = finished(slow, run)
    assert told["state"] in ("cancelled", "failed")
    states = [card["state"] for card in told["together"]["cards"]]
    assert states[-1] == "cancelled"
    assert states.count("cancelled") > 4
    after = finished(slow, begin(slow, max_tokens=2))
    assert (after["state"], after["model"]["name"]) == ("done", "other")


def test_a_switch_waits_for_a_run_that_does(slow: Live) -> None:
    run = begin(slow, max_tokens=20)
    assert slow.post("/models/load", {"model": "other", "drain_s": 20}).status_code == 200
    assert record(slow, run)["state"] == "done"


def test_a_failed_pass_fails_the_cards_and_says_why() -> None:
    def fault(plan: object) -> None:
        raise ValueError("no such kernel")

    with Live(toy(runner=FakeRunner(fault=fault))) as broken:
        told = finished(broken, begin(broken, agents=AGENTS[:2]))
    assert told["state"] == "failed"
    assert "no such kernel" in told["together"]["cards"][0]["error"]


def test_long_notes_are_cut_to_what_the_model_can_read() -> None:
    with Live(toy(runner=FakeRunner(context_length=700))) as small:
        told = finished(small, begin(small, max_tokens=150))
    last = told["together"]["cards"][-1]
    assert last["state"] == "done"
    assert last["prompt_tokens"] <= 550


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agents", []),
        ("agents", AGENTS * 2),
        ("agents", [{"name": "", "task": "x"}]),
        ("question", ""),
        ("max_tokens", 0),
        ("temperature", 3),
        ("colour", "red"),
    ],
)
def test_a_wrong_order_is_refused_by_name(live: Live, field: str, value: object) -> None:
    answer = live.post("/swarmbench/runs", {"question": "Why?", "agents": AGENTS, field: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith(field)


def test_a_question_of_white_space_is_refused_and_nothing_is_left(live: Live) -> None:
    answer = live.post("/swarmbench/runs", {"question": "  \n", "agents": AGENTS})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "question")
    live.wait_idle()


def test_too_many_runs_are_refused(slow: Live) -> None:
    runs = [begin(slow, max_tokens=400) for _ in range(8)]
    answer = slow.post("/swarmbench/runs", {"question": "Why?", "agents": AGENTS})
    assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
    for run in runs:
        slow.post(f"/swarmbench/runs/{run}/stop", {})
    for run in runs:
        events(slow, run)
    slow.wait_idle()


def test_unknown_runs_are_404(live: Live) -> None:
    for method, path, body in [
        ("GET", "", None),
        ("GET", "/events", None),
        ("POST", "/stop", {}),
        ("PATCH", "", {"title": "x"}),
        ("DELETE", "", None),
    ]:
        answer = live.http.request(method, f"/swarmbench/runs/nobody{path}", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "run_not_found"), (method, path)


def test_history_is_listed_searched_renamed_exported_and_deleted(live: Live) -> None:
    run = begin(live, question="What is a quokka?")
    finished(live, run)
    finished(live, begin(live, question="Something else"))

    def found(query: str) -> list[str]:
        return [entry["title"] for entry in live.http.get("/swarmbench/runs", params={"q": query}).json()["data"]]

    assert found("quokka") == ["What is a quokka?"]
    assert live.http.patch(f"/swarmbench/runs/{run}", json={"title": "Marsupials"}).status_code == 200
    assert found("marsup what") == ["Marsupials"]
    markdown = live.http.get(f"/swarmbench/runs/{run}", params={"form": "markdown"})
    assert markdown.headers["content-type"].startswith("text/markdown")
    assert markdown.text.startswith("# Marsupials\n\nWhat is a quokka?")
    assert "## Agent 7" in markdown.text
    assert live.http.delete(f"/swarmbench/runs/{run}").status_code == 200
    assert found("quokka") == []
    assert live.http.get(f"/swarmbench/runs/{run}").status_code == 404


def test_a_run_that_goes_on_cannot_be_deleted(slow: Live) -> None:
    run = begin(slow, max_tokens=300)
    answer = slow.http.delete(f"/swarmbench/runs/{run}")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "run_in_progress")
    slow.post(f"/swarmbench/runs/{run}/stop", {})
    events(slow, run)


def test_a_run_that_a_stop_cut_off_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    order = {"max_tokens": 150, "seed": 3}
    with Live(toy()) as whole:
        never_stopped = finished(whole, begin(whole, **order))
    runner = FakeRunner(step_s=0.01)
    with Live(toy(runner=runner), history=path, drain_s=0.1) as first:
        done = begin(first, max_tokens=4)
        finished(first, done)
        cut = begin(first, **order)
        stopped = False
        for _, name, data in follow(first, cut):  # until one agent has ended
            assert name != "end"
            if any(card["state"] == "done" for card in data.get("cards", ())):
                runner.step_s = 0.3  # the stop comes before the rest has ended
                stopped = True
                break
        assert stopped
        kept = path.with_suffix(".runs") / cut
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    history = History(path)
    left = history.get(cut)
    history.close()
    assert left is not None
    assert left["state"] == "running"
    assert kept.exists()
    ended = [number for number, card in enumerate(left["together"]["cards"]) if card["state"] == "done"]
    assert 0 < len(ended) < 9
    with Live(toy(), history=path) as second:
        told = finished(second, cut)
        assert record(second, done)["state"] == "done"
        deadline = time.monotonic() + 10
        while kept.exists():  # it is deleted once the end is saved
            assert time.monotonic() < deadline
            time.sleep(0.01)
        computed = second.engine.stats().finished
    assert told["state"] == "done"
    cards, others = told["together"]["cards"], never_stopped["together"]["cards"]
    assert [card["text"] for card in cards] == [card["text"] for card in others]
    assert [card["tokens"] for card in cards] == [card["tokens"] for card in others]
    assert computed == 9 - len(ended)  # nobody wrote twice
    assert told["together"]["summary"]["tokens"] == never_stopped["together"]["summary"]["tokens"]
    steps = told["together"]["steps"]
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(steps))


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with Live(toy(step_s=0.01), history=path, drain_s=0.1) as first:
        runs = [begin(first, max_tokens=500) for _ in range(3)]
        for run in runs:
            next(follow(first, run))
        time.sleep(0.2)
    kept = path.with_suffix(".runs")
    (kept / runs[0]).unlink()
    (kept / runs[1]).write_bytes(b"no journal")
    with Live(toy(), history=path) as second:
        notes = [finished(second, run)["note"] for run in runs[:2]]
        assert "nothing was kept" in notes[0]
        assert "is broken in record 1" in notes[1]
        assert [record(second, run)["state"] for run in runs[:2]] == ["interrupted"] * 2
        second.post(f"/swarmbench/runs/{runs[2]}/stop", {})
        finished(second, runs[2])
    with Live(toy(step_s=0.01), history=path, drain_s=0.1) as third:
        cut = begin(third, max_tokens=500)
        next(follow(third, cut))
        time.sleep(0.1)
    with Live(toy(), history=path, name="another") as fourth:
        told = record(fourth, cut)
        assert told["state"] == "interrupted"
        assert "toy (" in told["note"]
        assert "is not served any more" in told["note"]
        assert {"failed"} <= {card["state"] for card in told["together"]["cards"]} <= {"failed", "done"}
        fourth.wait_idle()
    assert list(kept.iterdir()) == []


def test_a_history_that_fails_is_told_and_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_text("no database at all, but long enough to be looked at" * 50)
    with Live(toy(), history=path) as live:
        run = begin(live, max_tokens=4)
        assert [name for _, name, _ in events(live, run)][-1] == "end"
        answer = live.http.get("/swarmbench/runs")
        assert (answer.status_code, error_of(answer)["code"]) == (507, "history_failed")
        deadline = time.monotonic() + 5
        while live.http.get("/swarmbench/state").json()["history_error"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_kv_held_counts_window_blocks_too() -> None:
    one = Progress("decoding", 8, blocks=(1, 2, 3), windows=(7, 8))
    other = Progress("decoding", 8, blocks=(1, 2, 4), windows=(7, 9))
    assert _kv([one, other], 10, 100) == (4 * 10 + 3 * 100, 2 * 10 + 100)
    assert _kv([one, other], 10, 0) == (40, 20)


def test_the_stall_bound_changes_while_the_engine_runs(live: Live) -> None:
    told = live.post("/swarmbench/state", {"max_stall_ms": 33}).json()
    assert told["engine"]["max_stall_ms"] == 33
    assert live.engine.config.max_stall_ms == 33
    assert live.engine._loop.scheduler.pacer.max_stall_ms == 33
    assert live.post("/swarmbench/state", {"max_stall_ms": 0}).status_code == 400


def test_many_follow_one_run(slow: Live) -> None:
    run = begin(slow, max_tokens=30)
    got: list[Events] = []
    threads = [threading.Thread(target=lambda: got.append(events(slow, run, "events?after=0"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 5
    assert all(entry == got[0] for entry in got)


def test_the_servers_deadline_holds_for_agents_too() -> None:
    with Live(toy(step_s=0.01), request_timeout_s=0.3) as live:
        told = finished(live, begin(live, max_tokens=2000))
    assert told["state"] == "failed"
    late = [card for card in told["together"]["cards"][:8] if card["finish_reason"] == "timeout"]
    assert late
    assert {(card["state"], card["error"]) for card in late} == {("failed", "its deadline passed")}


def test_old_runs_leave_the_memory_and_stay_in_the_history(live: Live) -> None:
    runs = [begin(live, max_tokens=1, agents=AGENTS[:1], synthesis=False, question=f"Old {n}?") for n in range(4)]
    for number in range(20):
        runs.append(begin(live, max_tokens=1, agents=AGENTS[:1], synthesis=False, question=f"New {number}?"))
        events(live, runs[-1])
    for run in runs:
        told = finished(live, run)
        assert (told["id"], told["state"]) == (run, "done")
    assert [name for _, name, _ in events(live, runs[0])] == ["snapshot", "end"]  # no frames are kept of it


def test_a_follow_up_has_the_turns_before_in_what_all_share(live: Live) -> None:
    first = finished(live, begin(live, question="Why are owls quiet?"))
    second = finished(live, begin(live, question="And mice?", after=first["id"]))
    third = finished(live, begin(live, question="And cats?", after=second["id"]))
    assert [run["thread"] for run in (first, second, third)] == [first["id"]] * 3
    assert [run["turn"] for run in (first, second, third)] == [1, 2, 3]
    answer = first["together"]["cards"][-1]["text"]
    assert second["earlier"] == [
        {"id": first["id"], "question": "Why are owls quiet?", "answer": answer.strip(), "totals": totals(first)}
    ]
    assert [turn["id"] for turn in third["earlier"]] == [first["id"], second["id"]]
    prefixes = [run["together"]["summary"]["prefix_tokens"] for run in (first, second, third)]
    grown = len("Why are owls quiet?") + len(answer.encode())
    assert prefixes[1] - prefixes[0] >= grown - 20  # the toy's tokens are bytes; the questions differ in length
    for run, before in ((second, first), (third, second)):
        # Nobody computes again what the turn before has computed: its rules, turns and question.
        known = before["together"]["summary"]["prefix_tokens"]
        assert all(card["cached_tokens"] >= known - 32 for card in run["together"]["cards"])
    assert f"## And mice?\n\n{second['together']['cards'][-1]['text'].strip()}" in exported(live, third["id"])
    live.wait_idle()


def exported(live: Live, run: str) -> str:
    return live.http.get(f"/swarmbench/runs/{run}", params={"form": "markdown"}).text


def test_threads_are_listed_continued_after_a_restart_and_deleted(tmp_path: Path) -> None:
    with Live(toy(), history=tmp_path / "history.db") as first:
        other = begin(first, question="Ships?", max_tokens=2)
        finished(first, other)
        one = begin(first, question="Owls?", max_tokens=2)
        finished(first, one)
    with Live(toy(), history=tmp_path / "history.db") as second:
        two = begin(second, question="Mice?", after=one, max_tokens=2)
        told = finished(second, two)
        threads = second.http.get("/swarmbench/threads").json()["data"]
        assert [(thread["id"], thread["turns"], thread["last"]) for thread in threads] == [
            (one, 2, two),
            (other, 1, other),
        ]
        assert threads[0]["title"] == "Owls?"
        assert threads[0]["totals"] == totals(told)
        turns = second.http.get(f"/swarmbench/threads/{one}").json()["data"]
        assert [(turn["id"], turn["turn"]) for turn in turns] == [(one, 1), (two, 2)]
        assert second.http.delete(f"/swarmbench/threads/{one}").status_code == 200
        assert second.http.get(f"/swarmbench/runs/{two}").status_code == 404
        assert second.http.get(f"/swarmbench/threads/{one}").status_code == 404
        assert second.http.delete(f"/swarmbench/threads/{one}").status_code == 404


def test_a_question_after_a_run_that_goes_on_is_refused(slow: Live) -> None:
    run = begin(slow, max_tokens=400)
    body = {"question": "And?", "agents": AGENTS, "after": run}
    answer = slow.post("/swarmbench/runs", body)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "run_in_progress")
    assert slow.http.delete(f"/swarmbench/threads/{run}").status_code == 409
    slow.post(f"/swarmbench/runs/{run}/stop", {})
    finished(slow, run)
    answer = slow.post("/swarmbench/runs", {**body, "after": "nobody"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "run_not_found")
    slow.wait_idle()


def test_the_oldest_turns_are_left_out_when_the_window_is_full() -> None:
    with Live(toy(runner=FakeRunner(context_length=900))) as small:
        runs: list[dict[str, Any]] = []
        for number in range(5):
            after = {"after": runs[-1]["id"]} if runs else {}
            runs.append(finished(small, begin(small, question=f"{number}: {'why ' * 20}?", max_tokens=20, **after)))
        assert {run["state"] for run in runs} == {"done"}
        assert runs[1]["left_out"] == 0
        assert 0 < runs[4]["left_out"] < 4
        assert max(card["prompt_tokens"] for card in runs[4]["together"]["cards"][:8]) <= 450
        assert len(runs[4]["earlier"]) == 4


def test_a_thread_has_an_end() -> None:
    turn = {"id": "x", "question": "Q", "answer": "A", "totals": None}
    run = {"id": "y", "question": "Q", "settings": {"synthesis": False}, "together": {"cards": [], "summary": None}}
    assert len(thread_after({**run, "thread": "x", "earlier": [turn] * (MAX_TURNS - 2)}).earlier) == MAX_TURNS - 1
    with pytest.raises(ApiError, match="begin a new one"):
        thread_after({**run, "thread": "x", "earlier": [turn] * (MAX_TURNS - 1)})
