"""The history of swarm runs, in one SQLite file.

Every change is one short transaction in a write-ahead log: a process that is killed at any moment leaves what was saved
before, whole. Runs that a dead process left unfinished are marked so when the file is next opened.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import HistoryError
from shoal.processes import is_alive, this_process

_MIGRATIONS = (
    """
    CREATE TABLE runs (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, question TEXT NOT NULL, model TEXT NOT NULL, created REAL NOT NULL,
        state TEXT NOT NULL, owner TEXT NOT NULL, texts TEXT NOT NULL, document TEXT NOT NULL
    );
    CREATE INDEX runs_by_time ON runs (created DESC);
    """,
)
"""Script n brings a file of version n to n + 1; the version is the file's `user_version`."""

_BUSY_S = 5.0
_ROW = "id, title, question, model, created, state"
INTERRUPTED = "the server stopped before the run had ended"


class History:
    """Runs by id. Safe for any number of threads and processes; every method may block on the disk.

    Raises `HistoryError` when the file cannot be read or written: another disk format, a full disk, a newer version.
    """

    def __init__(self, path: Path | None) -> None:
        """The file is made if need be; without a path the history is in memory and goes with the process."""
        self._path = path
        self._lock = threading.Lock()
        self._owner = this_process()
        with self._failing():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Questions and answers are their owner's. The files beside it take their mode from this one.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                path.chmod(0o600)
            self._db = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._begin_log()
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._migrate()
                self._mark_interrupted()
            except BaseException:
                self._db.close()
                raise

    def save(self, document: dict[str, Any]) -> None:
        """Write a run's record over what there was of it. A title that was changed meanwhile stands."""
        texts = "\n".join(card["text"] for card in document["together"]["cards"])
        values = (
            document["id"], document["title"], document["question"], document["model"]["name"], document["created"],
            document["state"], self._owner, texts, json.dumps(document, ensure_ascii=False),
        )  # fmt: skip
        with self._transaction() as db:
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
        with self._failing(), self._lock:
            rows = self._db.execute(
                f"SELECT {_ROW} FROM runs {where} ORDER BY created DESC, id LIMIT ? OFFSET ?", [*values, limit, offset]
            ).fetchall()
        return [dict(zip(_ROW.split(", "), row, strict=True)) for row in rows]

    def get(self, run_id: str) -> dict[str, Any] | None:
        """The record of a run, or None."""
        with self._failing(), self._lock:
            row = self._db.execute("SELECT title, document FROM runs WHERE id = ?", (run_id,)).fetchone()
        return None if row is None else {**json.loads(row[1]), "title": row[0]}

    def rename(self, run_id: str, title: str) -> bool:
        """Give a run another title; False when there is no such run."""
        with self._transaction() as db:
            return bool(db.execute("UPDATE runs SET title = ? WHERE id = ?", (title, run_id)).rowcount)

    def delete(self, run_id: str) -> bool:
        """Forget a run; False when there is no such run."""
        with self._transaction() as db:
            return bool(db.execute("DELETE FROM runs WHERE id = ?", (run_id,)).rowcount)

    def size(self) -> tuple[int, int]:
        """How many runs there are, and the bytes they take on disk."""
        with self._failing(), self._lock:
            (count,) = self._db.execute("SELECT count(*) FROM runs").fetchone()
        if self._path is None:
            return count, 0
        files = (Path(f"{self._path}{end}") for end in ("", "-wal", "-shm"))
        return count, sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._db.close()

    def _begin_log(self) -> None:
        """Switch the file to a write-ahead log. Another process that does so is waited for: SQLite itself does not."""
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return

    def _migrate(self) -> None:
        version = self._version()
        if version > len(_MIGRATIONS):
            raise HistoryError(
                f"{self._path} was written by a newer version of shoal",
                value=version,
                limit=len(_MIGRATIONS),
                hint="update shoal, or move the file away",
            )
        for number in range(version, len(_MIGRATIONS)):
            with self._transaction() as db:
                if self._version() == number:  # another process may have been first
                    for statement in _MIGRATIONS[number].split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {number + 1}")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _mark_interrupted(self) -> None:
        """Runs of processes that are gone will not go on."""
        rows = self._db.execute("SELECT id, owner, document FROM runs WHERE state = 'running'").fetchall()
        for run_id, owner, text in rows:
            if is_alive(owner):
                continue
            document = json.loads(text)
            document.update(state="failed", note=INTERRUPTED)
            for card in document["together"]["cards"]:
                if card["state"] in ("queued", "prefill", "decoding"):
                    card.update(state="failed", error=INTERRUPTED)
            with self._transaction() as db:
                values = (json.dumps(document, ensure_ascii=False), run_id)
                db.execute("UPDATE runs SET state = 'failed', document = ? WHERE id = ?", values)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._failing(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            hints = {
                sqlite3.SQLITE_FULL: "free some space, or delete runs",
                sqlite3.SQLITE_NOTADB: "move the file away: it is no history",
                sqlite3.SQLITE_CORRUPT: "move the file away: it is damaged",
                sqlite3.SQLITE_BUSY: "another process holds it; try again",
            }
            hint = hints.get(_code(error), "check the file and its directory")
            raise HistoryError(f"the history failed: {error}", value=str(self._path), hint=hint) from error
        except OSError as error:
            raise HistoryError(
                f"the history cannot be opened: {error}", value=str(self._path), hint="set SHOAL_HOME to another place"
            ) from error


def _code(error: sqlite3.Error) -> int:
    """The kind of an error, without what SQLite adds to it."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
