"""The history of swarm runs, and which of them a process that is gone has left unfinished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.processes import is_alive, this_process
from shoal.server.database import Database
from shoal.server.swarmbench.record import totals
from shoal.server.swarmbench.resumed import Resumed

_ROW = ("id", "title", "question", "model", "created", "state", "thread", "turn", "totals")


class History:
    """Runs by id. Every method may block on the disk, and raises `HistoryError` as `Database` does."""

    def __init__(self, path: Path | None) -> None:
        """As `Database`."""
        self._owner = this_process()
        self._file = Database(path)

    def save(self, document: dict[str, Any], caller: str = "", *, left: bool = False) -> None:
        """Write a run's record over what there was of it. A title that was changed meanwhile stands.

        `left`: this process does not go on with it; whoever comes next may take it over.
        """
        texts = "\n".join(card["text"] for card in document["together"]["cards"])
        values = (
            document["id"], document["title"], document["question"], document["model"]["name"], document["created"],
            document["state"], "" if left else self._owner, texts, json.dumps(document, ensure_ascii=False),
            document["thread"], document["turn"], json.dumps(totals(document)), caller,
        )  # fmt: skip
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " state = excluded.state, texts = excluded.texts, document = excluded.document,"
                " totals = excluded.totals, owner = excluded.owner",
                values,
            )

    def search(self, query: str = "", limit: int = 50, offset: int = 0) -> list[dict[str, Any]]:
        """Runs whose title, question or texts hold every word of `query`, newest first, without their cards."""
        where, values = _having(query)
        return self._rows(
            _ROW, f"FROM runs WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?", [*values, limit, offset]
        )

    def threads(self, query: str = "", limit: int = 50, offset: int = 0) -> list[dict[str, Any]]:
        """Threads with a run that `search` would find: the one of the latest turn first.

        `id` is the thread's, `first` and `title` are of its first turn, `last` and the rest of its latest one.
        """
        where, values = _having(query)
        first = "FROM runs AS one WHERE one.thread = runs.thread ORDER BY turn, created LIMIT 1)"
        columns = {
            "id": "thread", "first": f"(SELECT id {first}", "title": f"(SELECT title {first}", "last": "id",
            "turns": "count(*)", "created": "max(created)", "model": "model", "state": "state", "totals": "totals",
        }  # fmt: skip
        # With max() the other columns are those of the row that has it: SQLite says so.
        text = (
            f"FROM runs WHERE thread IN (SELECT thread FROM runs WHERE {where}) GROUP BY thread"
            " ORDER BY max(created) DESC, thread LIMIT ? OFFSET ?"
        )
        rows = self._rows(tuple(columns.values()), text, [*values, limit, offset])
        return [dict(zip(columns, row.values(), strict=True)) for row in rows]

    def thread(self, thread_id: str) -> list[dict[str, Any]]:
        """The runs of a thread, in order, without their cards."""
        return self._rows(_ROW, "FROM runs WHERE thread = ? ORDER BY turn, created", [thread_id])

    def _rows(self, columns: Sequence[str], text: str, values: Sequence[object]) -> list[dict[str, Any]]:
        with self._file.reading() as db:
            rows = db.execute(f"SELECT {', '.join(columns)} {text}", values).fetchall()
        found = [dict(zip(columns, row, strict=True)) for row in rows]
        return [{**row, "totals": json.loads(row["totals"])} for row in found]

    def get(self, run_id: str) -> dict[str, Any] | None:
        """The record of a run, or None."""
        with self._file.reading() as db:
            row = db.execute("SELECT title, thread, turn, document FROM runs WHERE id = ?", (run_id,)).fetchone()
        if row is None:
            return None
        place = {"thread": row[1], "turn": row[2]}  # a run of an earlier version does not tell
        return {"earlier": [], "left_out": 0, **json.loads(row[3]), **place, "title": row[0]}

    def rename(self, run_id: str, title: str) -> bool:
        """Give a run another title; False when there is no such run."""
        with self._file.transaction() as db:
            return bool(db.execute("UPDATE runs SET title = ? WHERE id = ?", (title, run_id)).rowcount)

    def delete(self, run_id: str) -> bool:
        """Forget a run; False when there is no such run."""
        with self._file.transaction() as db:
            return bool(db.execute("DELETE FROM runs WHERE id = ?", (run_id,)).rowcount)

    def size(self) -> tuple[int, int]:
        """How many runs there are, and the bytes they take on disk."""
        with self._file.reading() as db:
            (count,) = db.execute("SELECT count(*) FROM runs").fetchone()
        return count, self._file.size()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def take_over(self) -> list[Resumed]:
        """The runs that processes that are gone have left: they are this one's from now on. Nobody else gets them."""
        with self._file.transaction() as db:
            rows = db.execute("SELECT id, owner, caller FROM runs WHERE state = 'running' ORDER BY created").fetchall()
            left = [(run_id, caller) for run_id, owner, caller in rows if not (owner and is_alive(owner))]
            db.executemany("UPDATE runs SET owner = ? WHERE id = ?", [(self._owner, run_id) for run_id, _ in left])
        found = [(self.get(run_id), caller) for run_id, caller in left]
        return [Resumed(document, caller) for document, caller in found if document is not None]

    def mark_interrupted(self, document: dict[str, Any], why: str) -> None:
        """A run will not go on."""
        cards = document["together"]["cards"]
        for card in [card for card in cards if card["state"] in ("queued", "prefill", "decoding")]:
            card.update(state="failed", error=why)
        document.update(state="interrupted", note=why)
        with self._file.transaction() as db:
            values = (json.dumps(document, ensure_ascii=False), document["id"])
            db.execute("UPDATE runs SET state = 'interrupted', document = ? WHERE id = ?", values)


def _having(query: str) -> tuple[str, list[str]]:
    """The condition that a run's title, question or texts hold every word, and its values."""
    words = query.split()
    clauses = [r"(title || char(10) || question || char(10) || texts) LIKE ? ESCAPE '\'"] * len(words)
    return " AND ".join(clauses) or "1", [f"%{_escaped(word)}%" for word in words]


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
