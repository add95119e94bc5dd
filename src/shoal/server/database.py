"""One SQLite file for what the server keeps: runs of the page, responses, conversations.

Every change is one short transaction in a write-ahead log: a process that is killed at any moment leaves what was saved
before, whole.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import HistoryError

_MIGRATIONS = (
    """
    CREATE TABLE runs (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, question TEXT NOT NULL, model TEXT NOT NULL, created REAL NOT NULL,
        state TEXT NOT NULL, owner TEXT NOT NULL, texts TEXT NOT NULL, document TEXT NOT NULL
    );
    CREATE INDEX runs_by_time ON runs (created DESC);
    """,
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY, caller TEXT NOT NULL, used REAL NOT NULL, owner TEXT NOT NULL, state TEXT NOT NULL,
        previous TEXT, bytes INTEGER NOT NULL, body TEXT, input TEXT NOT NULL, document TEXT NOT NULL
    );
    CREATE INDEX responses_by_use ON responses (used);
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, caller TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL, metadata TEXT NOT NULL
    );
    CREATE INDEX conversations_by_use ON conversations (used);
    CREATE TABLE items (
        place INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT NOT NULL, id TEXT NOT NULL, item TEXT NOT NULL
    );
    CREATE INDEX items_of ON items (conversation, place);
    """,
    """
    ALTER TABLE runs ADD COLUMN thread TEXT NOT NULL DEFAULT '';
    ALTER TABLE runs ADD COLUMN turn INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE runs ADD COLUMN totals TEXT NOT NULL DEFAULT 'null';
    UPDATE runs SET thread = id;
    CREATE INDEX runs_by_thread ON runs (thread, turn);
    """,
    "ALTER TABLE runs ADD COLUMN caller TEXT NOT NULL DEFAULT ''",
)
"""Script n brings a file of version n to n + 1; the version is the file's `user_version`."""

_BUSY_S = 5.0


class Database:
    """One connection to the file. Safe for any number of threads and processes; every method may block on the disk.

    Raises `HistoryError` when the file cannot be read or written: another disk format, a full disk, a newer version.
    """

    def __init__(self, path: Path | None) -> None:
        """The file is made if need be; without a path it is in memory and goes with the process."""
        self._path = path
        self._lock = threading.Lock()
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
            except BaseException:
                self._db.close()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries."""
        with self._failing(), self._lock:
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, for changes: all of them, or none when something is raised."""
        with self._failing(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def size(self) -> int:
        """The bytes that it takes on disk."""
        if self._path is None:
            return 0
        files = (Path(f"{self._path}{end}") for end in ("", "-wal", "-shm"))
        return sum(file.stat().st_size for file in files if file.exists())

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
            with self.transaction() as db:
                if self._version() == number:  # another process may have been first
                    for statement in _MIGRATIONS[number].split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {number + 1}")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

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
