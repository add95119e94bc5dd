"""What `store` keeps: responses with their input, and conversations, each for the key that made it.

A response refers to the one before it; a chain of them is a conversation's history. What was used longest ago goes when
there are too many, and a chain is used as a whole.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.processes import is_alive, this_process
from shoal.server.database import Database

Document = dict[str, Any]
MAX_CHAIN = 2000  # responses one after another
_CHAIN = f"""
    WITH RECURSIVE chain (id, previous, depth) AS (
        SELECT id, previous, 0 FROM responses WHERE id = ? AND caller = ?
        UNION ALL
        SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
        WHERE depth < {MAX_CHAIN}
    )
"""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A response that a process left unfinished: its body as it was asked for, and what was known of it."""

    id: str
    body: Document
    document: Document


class Kept:
    """Responses and conversations by id and caller. Every method may block on the disk; `HistoryError` as `Database`.

    Invariant: what one caller made, no other reads, changes or counts on.
    """

    def __init__(self, path: Path | None, most: int, most_bytes: int) -> None:
        """Keeps at most so many responses, and so many conversations; `most_bytes` is for the responses together."""
        self._file = Database(path)
        self._owner = this_process()
        self._most = most
        self._most_bytes = most_bytes

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    # -- responses ----------------------------------------------------------------------------------------------

    def begin(self, caller: str, document: Document, given: Sequence[Document], body: Document) -> None:
        """A response has begun; `given` are its own input items."""
        texts = json.dumps(body), json.dumps(list(given)), json.dumps(document)
        row = (document["id"], caller, time.time(), self._owner, "in_progress", document["previous_response_id"])
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, sum(map(len, texts)), *texts),
            )
            if document["previous_response_id"] is not None:
                db.execute(
                    f"{_CHAIN} UPDATE responses SET used = ? WHERE id IN (SELECT id FROM chain)",
                    (document["previous_response_id"], caller, time.time()),
                )
            self._trim(db)

    def finish(self, document: Document) -> None:
        """A response has ended, one way or another; nothing happens when it was deleted meanwhile."""
        text = json.dumps(document)
        conversation = (document.get("conversation") or {}).get("id")
        with self._file.transaction() as db:
            row = db.execute("SELECT input FROM responses WHERE id = ?", (document["id"],)).fetchone()
            if row is None:
                return
            db.execute(
                "UPDATE responses SET state = ?, document = ?, body = NULL, bytes = length(input) + ? WHERE id = ?",
                (document["status"], text, len(text), document["id"]),
            )
            if conversation is not None and document["status"] in ("completed", "incomplete"):
                _append(db, conversation, [*json.loads(row[0]), *document["output"]])

    def get(self, caller: str, response_id: str) -> Document | None:
        """The response object, or None."""
        with self._file.reading() as db:
            row = db.execute(
                "SELECT document FROM responses WHERE id = ? AND caller = ?", (response_id, caller)
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def given(self, caller: str, response_id: str) -> list[Document] | None:
        """The input items of a response, or None."""
        with self._file.reading() as db:
            row = db.execute(
                "SELECT input FROM responses WHERE id = ? AND caller = ?", (response_id, caller)
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def delete(self, caller: str, response_id: str) -> bool:
        """Forget a response; False when there is none."""
        with self._file.transaction() as db:
            return bool(db.execute("DELETE FROM responses WHERE id = ? AND caller = ?", (response_id, caller)).rowcount)

    def chain(self, caller: str, response_id: str) -> list[Document] | None:
        """Input and output items of a response and of all before it, in order; None when one of them is not there."""
        with self._file.reading() as db:
            rows = db.execute(
                f"{_CHAIN} SELECT chain.previous, state, input, document FROM chain JOIN responses USING (id)"
                " ORDER BY depth DESC",
                (response_id, caller),
            ).fetchall()
        if not rows or rows[0][0] is not None:
            return None
        items: list[Document] = []
        for _, _, given, document in rows:
            items += [*json.loads(given), *json.loads(document)["output"]]
        return items

    def put_aside(self, ids: Iterable[str]) -> None:
        """These are nobody's: whoever asks for `interrupted` gets them."""
        with self._file.transaction() as db:
            db.executemany("UPDATE responses SET owner = '' WHERE id = ?", [(name,) for name in ids])

    def interrupted(self) -> list[Interrupted]:
        """Responses that processes left unfinished which are gone. They are this process's from here on."""
        with self._file.transaction() as db:
            rows = db.execute("SELECT id, owner, body, document FROM responses WHERE state = 'in_progress'").fetchall()
            left = [row for row in rows if not is_alive(row[1])]
            for row in left:
                db.execute("UPDATE responses SET owner = ? WHERE id = ?", (self._owner, row[0]))
        return [Interrupted(row[0], json.loads(row[2]), json.loads(row[3])) for row in left]

    def _trim(self, db: sqlite3.Connection) -> None:
        """Forget what was used longest ago of what is too much, but nothing that has not ended."""
        for table, running in (("responses", "WHERE state != 'in_progress'"), ("conversations", "")):
            (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            db.execute(
                f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} {running} ORDER BY used LIMIT ?)",
                (max(0, count - self._most),),
            )
        db.execute(
            "DELETE FROM responses WHERE state != 'in_progress' AND id IN (SELECT id FROM (SELECT id,"
            " sum(bytes) OVER (ORDER BY used DESC, id) AS so_far FROM responses) WHERE so_far > ?)",
            (self._most_bytes,),
        )
        db.execute("DELETE FROM items WHERE conversation NOT IN (SELECT id FROM conversations)")

    # -- conversations ------------------------------------------------------------------------------------------

    def converse(self, caller: str, items: Sequence[Document], metadata: Document) -> Document:
        """A new conversation."""
        name, now = f"conv_{secrets.token_hex(16)}", time.time()
        with self._file.transaction() as db:
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", (name, caller, now, now, json.dumps(metadata))
            )
            _append(db, name, items)
            self._trim(db)
        return _conversation(name, now, metadata)

    def conversation(self, caller: str, name: str, metadata: Document | None = None) -> Document | None:
        """A conversation, or None; `metadata` replaces what it had."""
        with self._file.transaction() as db:
            if metadata is not None:
                values = (json.dumps(metadata), time.time(), name, caller)
                db.execute("UPDATE conversations SET metadata = ?, used = ? WHERE id = ? AND caller = ?", values)
            row = db.execute(
                "SELECT created, metadata FROM conversations WHERE id = ? AND caller = ?", (name, caller)
            ).fetchone()
        return None if row is None else _conversation(name, row[0], json.loads(row[1]))

    def end_conversation(self, caller: str, name: str) -> bool:
        """Forget a conversation and its items; False when there is none."""
        with self._file.transaction() as db:
            gone = db.execute("DELETE FROM conversations WHERE id = ? AND caller = ?", (name, caller)).rowcount
            if gone:
                db.execute("DELETE FROM items WHERE conversation = ?", (name,))
        return bool(gone)

    def items(self, caller: str, name: str) -> list[Document] | None:
        """The items of a conversation in order, which is used by this; None when there is none."""
        with self._file.transaction() as db:
            now = (time.time(), name, caller)
            if not db.execute("UPDATE conversations SET used = ? WHERE id = ? AND caller = ?", now).rowcount:
                return None
            rows = db.execute("SELECT item FROM items WHERE conversation = ? ORDER BY place", (name,)).fetchall()
        return [json.loads(row[0]) for row in rows]

    def add_items(self, caller: str, name: str, items: Sequence[Document]) -> list[Document] | None:
        """Put items behind a conversation's others; gives them with their ids. None when there is none."""
        with self._file.transaction() as db:
            now = (time.time(), name, caller)
            if not db.execute("UPDATE conversations SET used = ? WHERE id = ? AND caller = ?", now).rowcount:
                return None
            _append(db, name, items)
        return list(items)

    def drop_item(self, caller: str, name: str, item_id: str) -> bool:
        """Take an item out of a conversation; False when it is not there."""
        owned = "conversation IN (SELECT id FROM conversations WHERE id = ? AND caller = ?)"
        with self._file.transaction() as db:
            return bool(db.execute(f"DELETE FROM items WHERE {owned} AND id = ?", (name, caller, item_id)).rowcount)


def _append(db: sqlite3.Connection, name: str, items: Sequence[Document]) -> None:
    rows = [(name, item["id"], json.dumps(item)) for item in items]
    db.executemany("INSERT INTO items (conversation, id, item) VALUES (?, ?, ?)", rows)


def _conversation(name: str, created: float, metadata: Document) -> Document:
    return {"id": name, "object": "conversation", "created_at": int(created), "metadata": metadata}
