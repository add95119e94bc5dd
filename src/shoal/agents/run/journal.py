"""A file of records to which is only added: what a killed process leaves is read back up to its last whole record.

A line is a checksum, a space and one JSON document. The checksum covers the line and all lines before it. The file can
be read by its owner only, and is open in one process at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

log = logging.getLogger(__name__)
Record = Mapping[str, Any]


class Journal:
    """One such file, open for more records.

    Invariant: up to `_size` the file is whole records. What cannot be written (a full disk) ends the journal: `error`
    says why, and whoever writes goes on without it. A record counts as written once `write` has returned: a process
    that is killed then loses nothing, a machine that loses its power may lose the last ones.
    """

    def __init__(self, path: Path, file: io.FileIO, size: int, checksum: int) -> None:
        self.error: CheckpointError | None = None
        self._path = path
        self._file: io.FileIO | None = file
        self._size = size
        self._checksum = checksum

    @classmethod
    def begin(cls, path: Path, first: Record) -> Journal:
        """A new file with its first record, there whole or not at all. CheckpointError when there is one already."""
        line, checksum = _line(first, 0)
        try:
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # for its owner only
        except OSError as error:
            raise _failed("made", path, error) from error
        file = io.FileIO(descriptor, "r+")
        try:
            _lock(file, path)
            _write(file, line)
            os.fsync(file)
            os.link(name, path)
        except BaseException as error:
            file.close()
            if isinstance(error, FileExistsError):
                message = f"there is a file {path} already"
                raise CheckpointError(message, value=str(path), hint="resume it, or give another path") from error
            if isinstance(error, OSError):
                raise _failed("made", path, error) from error
            raise
        finally:
            Path(name).unlink()
        return cls(path, file, len(line), checksum)

    @classmethod
    def resume(cls, path: Path) -> tuple[Journal, list[Record]]:
        """The file and its records. What a kill has left of a last one is cut off.

        CheckpointError when it cannot be read, is broken before its end, or is open in another process.
        """
        try:
            file = io.FileIO(path, "r+")
        except OSError as error:
            raise _failed("opened", path, error) from error
        try:
            _lock(file, path)
            records, size, checksum = _read(file.readall(), path)
            file.truncate(size)
            file.seek(size)
        except OSError as error:
            file.close()
            raise _failed("read", path, error) from error
        except BaseException:
            file.close()
            raise
        return cls(path, file, size, checksum), records

    def write(self, record: Record) -> None:
        """Add a record; nothing happens once the journal has ended."""
        if self._file is None:
            return
        line, checksum = _line(record, self._checksum)
        try:
            _write(self._file, line)
        except OSError as error:
            self.error = _failed("written", self._path, error)
            log.error("%s", self.error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            self.close()
        else:
            self._size += len(line)
            self._checksum = checksum

    def close(self) -> None:
        """Take no more records. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.fsync(file)
            file.close()


def _line(record: Record, checksum: int) -> tuple[bytes, int]:
    text = json.dumps(record, separators=(",", ":")).encode()
    checksum = zlib.crc32(text, checksum)
    return b"%08x %s\n" % (checksum, text), checksum


def _write(file: io.FileIO, data: bytes) -> None:
    """All of the data; a disk that fills up takes a part and then refuses the rest."""
    while data:
        data = data[file.write(data) :]


def _read(data: bytes, path: Path) -> tuple[list[Record], int, int]:
    """The records, the bytes they take, and the checksum over them."""
    records: list[Record] = []
    at = checksum = 0
    while at < len(data):
        end = data.find(b"\n", at)
        text = data[at + 9 : end]
        if end < 0 or data[at : at + 9] != b"%08x " % zlib.crc32(text, checksum):
            if 0 <= end < len(data) - 1 or not records:
                message = f"{path} is broken in record {len(records) + 1}"
                raise CheckpointError(message, value=str(path), hint="begin the run again")
            break  # the last one, which was being written
        checksum = zlib.crc32(text, checksum)
        records.append(json.loads(text))
        at = end + 1
    if not records:
        raise CheckpointError(f"{path} is empty", value=str(path), hint="begin the run again")
    return records, at, checksum


def _lock(file: io.FileIO, path: Path) -> None:
    """Held until the file is closed or the process is gone. Windows has no such lock: there nobody is kept out."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"{path} is in use by another run"
        raise CheckpointError(message, value=str(path), hint="wait for that run to end, or stop it") from error


def _failed(what: str, path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be {what}: {error}", value=str(path), hint="check the path and the room on its disk"
    )
