"""The history of swarm runs. Runs that a dead process left unfinished are marked so when the file is next opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.processes import is_alive, this_process
from shoal.server.database import Database

_ROW = "id, title, question, model, created, state"
INTERRUPTED = "the server stopped before the run had ended"


class History:
    """Runs by id. Every method may block on the disk, and raises `HistoryError` as `Database` does."""

    def __init__(self, path: Path | None) -> None:
        """As `Database`."""
        self._owner = this_process()
        self._file = Database(path)
        try:
            self._mark_interrupted()
        except BaseException:
            self._file.close()
            raise

    def save(self, document: dict[str, Any]) -> None:
        """Write a run's record over what there was of it. A title that was changed meanwhile stands."""
        texts = "\n".join(card["text"] for card in document["together"]["cards"])
        values = (
            document["id"], document["title"], document["question"], document["model"]["name"], document["created"],
            document["state"], self._owner, texts, json.dumps(document, ensure_ascii=False),
        )  # fmt: skip
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " state = excluded.state, texts = excluded.texts, document = excluded.document",
                values,
            )

    def search(self, query: str = "", limit: int = 50, offset: int = 0) -> list[dict[str, Any]]:
        """Runs whose title, question or texts hold every word of `query`, newest first, without their cards."""
        words = query.split()
        clause = " AND ".join([r"(title || char(10) || question || char(10) || texts) LIKE ? ESCAPE '\'"] * len(words))
        where = f"WHERE {clause}" if words else ""
        values = [f"%{_escaped(word)}%" for word in words]
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {_ROW} FROM runs {where} ORDER BY created DESC, id LIMIT ? OFFSET ?", [*values, limit, offset]
            ).fetchall()
        return [dict(zip(_ROW.split(", "), row, strict=True)) for row in rows]

    def get(self, run_id: str) -> dict[str, Any] | None:
        """The record of a run, or None."""
        with self._file.reading() as db:
            row = db.execute("SELECT title, document FROM runs WHERE id = ?", (run_id,)).fetchone()
        return None if row is None else {**json.loads(row[1]), "title": row[0]}

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

    def _mark_interrupted(self) -> None:
        """Runs of processes that are gone will not go on."""
        with self._file.reading() as db:
            rows = db.execute("SELECT id, owner, document FROM runs WHERE state = 'running'").fetchall()
        for run_id, owner, text in rows:
            if is_alive(owner):
                continue
            document = json.loads(text)
            document.update(state="failed", note=INTERRUPTED)
            for card in document["together"]["cards"]:
                if card["state"] in ("queued", "prefill", "decoding"):
                    card.update(state="failed", error=INTERRUPTED)
            with self._file.transaction() as db:
                values = (json.dumps(document, ensure_ascii=False), run_id)
                db.execute("UPDATE runs SET state = 'failed', document = ? WHERE id = ?", values)


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
