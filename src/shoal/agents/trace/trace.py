"""The trace of runs: one JSON record per line, of attempts, nodes, graphs and whatever else decides something."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from shoal.errors import StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one agent. Times named `_at_ms` count from the beginning of the run.

    `cache_hit` says that at least one token came from the prefix tree, `prefix_tokens` how many. `queue_ms`,
    `ttft_ms` and `latency_ms` count from submission; None where it never came to that, or a remote engine does not
    tell. `kv_mb` is the KV that it added, without what it found cached: a shared block counts once, with whoever
    computed it; `process_mb` is what this process held at the end (10**6 bytes; None where the engine does not tell, or
    is not in this process). The log of a server means the same by both. `outcome` is ok,
    failed, invalid (the output does not fit the schema), timeout or cancelled, and `cause` says why it is not ok, or
    which identical call it was answered by.
    """

    request_id: str
    task_id: str
    agent_id: str
    attempt: int
    cache_hit: bool
    prefix_tokens: int
    generated_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    latency_ms: float
    kv_mb: float | None
    process_mb: float | None
    outcome: str
    cause: str | None
    agent: str
    prompt_tokens: int
    seed: int | None
    priority: str
    submitted_at_ms: float
    joined_at_ms: float | None
    left_at_ms: float

    def record(self) -> dict[str, Any]:
        """As it stands in the trace."""
        return {"kind": "attempt", **{name: getattr(self, name) for name in _FIELDS}}


_FIELDS = [field.name for field in fields(Attempt)]


class Trace:
    """Collects records, and writes them to a file, one JSON document a line, if it has a path. Thread-safe.

    Every record has a `kind`: "graph", "node" and "attempt" come from runs; others, such as "decision", from
    the caller of `write`. Usable with `with`, and closed by it. StoreError when the file cannot be opened; one that
    cannot be written any more (a full disk) ends, `error` says why, and what it belongs to goes on.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._path = path
        self._file: TextIO | None = None
        self.error: StoreError | None = None
        if path is not None:
            try:
                self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - `close` closes it
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(f"the trace cannot be written: {error}", value=str(self._path), hint="give another path")

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Take a record in; it gets a `kind` ("decision") and a `time` (seconds since 1970) where it has none."""
        full = {"kind": "decision", "time": round(time.time(), 6), **record}
        line = json.dumps(full, ensure_ascii=False, default=str)
        with self._lock:
            self.records.append(full)
            if self._file is not None:
                try:
                    self._file.write(line + "\n")
                    self._file.flush()
                except OSError as error:
                    self.error = self._unwritable(error)
                    log.error("%s", self.error)
                    self._end_file()
        return full

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what is in its buffer still does not fit
                file.close()

    def close(self) -> None:
        """Close the file. Idempotent; the records stay."""
        with self._lock:
            self._end_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The records of a trace file. StoreError when it cannot be read or a line is no record."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"no trace can be read: {error}", value=str(path), hint="give what --trace wrote") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path}:{number}: no JSON: {error}", value=line[:80]) from error
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            raise StoreError(f"{path}:{number}: no record of a trace", value=line[:80], hint="a record has a kind")
        records.append(record)
    return records
