"""The history on disk: what it finds, and what is left of it when the process or the disk gives out."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import HistoryError
from shoal.server.database import _MIGRATIONS
from shoal.server.swarmbench.history import History


def run(name: str, text: str = "an answer", state: str = "done", **fields: Any) -> dict[str, Any]:
    card = {"name": "A", "task": "t", "text": text, "state": "decoding" if state == "running" else state}
    phase = {"cards": [card], "steps": [], "summary": None}
    told = {
        "id": name,
        "title": f"Title {name}",
        "question": f"Question {name}",
        "model": {"name": "m"},
        "created": 1.0,
        "settings": {"synthesis": False},
        "thread": name,
        "turn": 1,
        "earlier": [],
        "left_out": 0,
    }
    return {**told, "state": state, "note": None, "together": phase, "one_by_one": None, **fields}


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    history = History(tmp_path / "h.db")
    history.save(run("a", "grüße 🐟", created=1.0))
    history.save(run("b", "other", created=2.0))
    history.close()
    again = History(tmp_path / "h.db")
    assert again.get("a") == run("a", "grüße 🐟", created=1.0)
    assert again.get("nobody") is None
    assert [entry["id"] for entry in again.search()] == ["b", "a"]
    assert [entry["id"] for entry in again.search(limit=1, offset=1)] == ["a"]
    assert again.size()[0] == 2
    again.close()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("needle", ["a"]),
        ("NEEDLE", ["a"]),
        ("title b", ["b"]),
        ("needle b", []),
        ("100%", ["b"]),
        ("%", ["b"]),
        ("_", []),
        ("\\", []),
        ("'; DROP TABLE runs; --", []),
        ("  ", ["a", "b"]),
    ],
)
def test_search_takes_words_as_they_are(query: str, found: list[str]) -> None:
    history = History(None)
    history.save(run("a", "hay needle hay"))
    history.save(run("b", "100% sure"))
    assert sorted(entry["id"] for entry in history.search(query)) == found


def test_a_save_keeps_the_title_that_was_given_meanwhile() -> None:
    history = History(None)
    history.save(run("a", state="running"))
    assert history.rename("a", "Mine")
    history.save(run("a", "more"))
    told = history.get("a")
    assert told is not None
    assert (told["title"], told["together"]["cards"][0]["text"]) == ("Mine", "more")
    assert not history.rename("nobody", "x")
    assert history.delete("a")
    assert not history.delete("a")


def test_threads_are_listed_with_their_first_title_and_their_latest_turn() -> None:
    history = History(None)
    history.save(run("a", "owls", created=1.0))
    history.save(run("b", "ships", created=2.0))
    told = {"tokens": 5, "wall_s": 1.5, "prompt_tokens": 10, "cached_tokens": 8}
    last = run("c", "mice", created=3.0, thread="a", turn=2)
    last["together"]["summary"] = told
    history.save(last)
    threads = history.threads()
    assert [(one["id"], one["turns"], one["last"], one["title"]) for one in threads] == [
        ("a", 2, "c", "Title a"),
        ("b", 1, "b", "Title b"),
    ]
    assert threads[0]["totals"] == {"agents": 1, **told}
    assert threads[1]["totals"] is None
    assert [one["id"] for one in history.threads("owls")] == ["a"]
    assert [one["id"] for one in history.threads("ships")] == ["b"]
    assert [one["id"] for one in history.threads(limit=1, offset=1)] == ["b"]
    assert [(one["id"], one["turn"]) for one in history.thread("a")] == [("a", 1), ("c", 2)]
    assert history.thread("nobody") == []


def test_runs_of_an_earlier_version_are_threads_of_one_turn(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with sqlite3.connect(path) as db:
        for statement in (*_MIGRATIONS[0].split(";"), *_MIGRATIONS[1].split(";"), "PRAGMA user_version = 2"):
            db.execute(statement)
        old = {name: value for name, value in run("a").items() if name not in ("thread", "turn", "earlier", "left_out")}
        values = ("a", "Title a", "Question a", "m", 1.0, "done", "x", "an answer", json.dumps(old))
        db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    db.close()
    history = History(path)
    assert history.get("a") == run("a")
    assert [(one["id"], one["turns"]) for one in history.threads()] == [("a", 1)]
    history.close()


WRITER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from shoal.server.swarmbench.history import History
from tests.server.test_history import run
history = History(Path(sys.argv[1]))
number = 0
while True:
    history.save(run(f"r{{number}}", "x" * 200_000, "running" if number % 2 else "done"))
    print(number, flush=True)
    number += 1
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    last = -1
    for wait_s in (0.0, 0.013, 0.037, 0.05):
        code = WRITER.format(path=sys.path)
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(wait_s)
            os.kill(writer.pid, signal.SIGKILL)
            told = [int(line) for line in writer.stdout.read().split()]
        last = max([last, 0, *told])
        history = History(path)
        for left in history.take_over():
            history.mark_interrupted(left.document, "gone")
        for number in range(last + 1):
            found = history.get(f"r{number}")
            assert found is not None
            assert found["together"]["cards"][0]["text"] == "x" * 200_000
            if number % 2:  # nobody will go on with it
                assert (found["state"], found["note"]) == ("interrupted", "gone")
                assert found["together"]["cards"][0]["state"] == "failed"
        history.close()
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


def test_a_run_of_a_living_process_goes_on(tmp_path: Path) -> None:
    first = History(tmp_path / "h.db")
    first.save(run("a", state="running"))
    second = History(tmp_path / "h.db")
    assert second.take_over() == []
    told = second.get("a")
    assert told is not None
    assert told["state"] == "running"
    second.save(run("b"))
    assert first.get("b") is not None
    first.close()
    second.close()


def test_a_full_disk_is_a_typed_error_and_spoils_nothing(tmp_path: Path) -> None:
    history = History(tmp_path / "h.db")
    history.save(run("a"))
    with history._file.reading() as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 2}")  # what SQLite does on ENOSPC, it does here
    with pytest.raises(HistoryError, match="full") as caught:
        history.save(run("b", "y" * 100_000))
    assert caught.value.hint == "free some space, or delete runs"
    assert history.get("a") == run("a")
    assert history.get("b") is None
    history.save(run("c"))
    history.close()


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    History(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(HistoryError, match="newer version") as caught:
        History(path)
    assert (caught.value.value, caught.value.limit) == (99, 4)


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    path.write_text(json.dumps({"some": "thing else"}) * 100)
    before = path.read_bytes()
    with pytest.raises(HistoryError, match="not a database"):
        History(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be opened"):
        History(tmp_path / "file" / "h.db")


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    for mode in (None, 0o644):
        if mode is not None:
            path.chmod(mode)  # as an earlier version left it
        history = History(path)
        history.save(run("a"))
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
        history.close()
        assert set(modes.values()) == {"0o600"}, modes


def test_processes_that_open_a_new_file_together_all_succeed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.server.swarmbench.history import History\n"
        "for line in sys.stdin: History(Path(line.strip())).close(); print('ok', flush=True)"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    for number in range(40):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{tmp_path / str(number)}\n")
            process.stdin.flush()
    told = [process.communicate()[0].split() for process in processes]
    assert told == [["ok"] * 40] * 2


def test_a_file_that_is_locked_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """What SQLite does not wait for by itself: the switch of a new file to a log while somebody reads it."""
    path = tmp_path / "h.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE x (y)")
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    timer.start()
    History(path).close()
    timer.join()
    other.close()
