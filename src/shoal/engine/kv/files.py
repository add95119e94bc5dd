"""KV blocks as files of one directory, safe with several processes, after a kill and on a full disk.

    <root>/key                     what digests are keyed with, so that a file's name tells nothing of its tokens
    <root>/<model>/about.json      whose blocks these are, for people
    <root>/<model>/<digest>        one block: a header with a checksum, and the bytes

A block is written under another name and then renamed, so a file is whole or not there; one that is not (a power cut,
a damaged disk) fails its checksum and is deleted. A file's time of change says when it was last of use: where the quota
is exceeded, the oldest of all models go first. All can be read by their owner only. Nothing here waits for a disk to
have written: what a power cut takes is computed again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.tiers import Digest
from shoal.engine.kv.buffers import Buffers
from shoal.processes import is_alive, this_process

_HEADER = struct.Struct("<8s20sQI24x")  # magic, digest, bytes that follow, checksum; 64 bytes
_MAGIC = b"shoalKV1"
_SECRET_BYTES = 32
_SPARE = 256 << 20  # bytes of the disk that are left to others
_LEFT = 0.9  # of the quota, what a clean-up leaves


@dataclass(frozen=True, slots=True)
class StoredKV:
    """What is kept of one model under one directory."""

    path: Path
    about: Mapping[str, str]
    blocks: int
    bytes: int


class KVFiles:
    """The blocks of one model in a directory that several models and processes share.

    Invariant: what `read` gives is what `write` got under that digest, whole. May be called from any thread. What the
    system refuses is an OSError.
    """

    def __init__(self, root: Path, identity: str, about: Mapping[str, str], quota: int) -> None:
        """Makes the directory. `identity` and `about` say of which KV; `quota` is in bytes, of all models together."""
        self.root = root
        self.quota = quota
        self.path = root / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._about = json.dumps(dict(about)).encode()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.secret = _secret(root)
        self._names = (f".{this_process()}.{n}" for n in itertools.count())
        self._make()

    def _make(self) -> None:
        self.path.mkdir(exist_ok=True, mode=0o700)
        if not (self.path / "about.json").exists():
            self._put("about.json", [self._about])

    def digests(self) -> set[Digest]:
        """What is there now, by name; files are not opened."""
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries]
        return {bytes.fromhex(name) for name in names if _is_digest(name)}

    def write(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        """Store a block. Raises OSError, with nothing left behind, when the disk refuses or is all but full."""
        if not self.path.exists():  # somebody has cleared it
            self._make()
        if shutil.disk_usage(self.path).free < _SPARE + data.nbytes:
            raise OSError(errno.ENOSPC, f"less than {_SPARE >> 20} MiB of the disk would be left")
        payload = data.data
        self._put(digest.hex(), [_header(digest, payload), payload])
        self._mark_used(self.path / digest.hex())

    def read(self, digest: Digest, buffers: Buffers) -> NDArray[np.uint8] | None:
        """A block in an array of `buffers`, checked; None when it is gone, or damaged and therefore deleted."""
        path = self.path / digest.hex()
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size - _HEADER.size
                header = file.read(_HEADER.size)
                data = buffers.take(max(size, 0))
                whole = _fill(file, data.data)
        except FileNotFoundError:
            return None
        if whole and header == _header(digest, data.data):
            return data
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def delete(self, digests: Iterable[Digest]) -> None:
        """Remove blocks; those that are not there are no matter."""
        for digest in digests:
            _unlink(self.path / digest.hex())

    def touch(self, digests: Iterable[Digest], until: Mapping[Digest, float]) -> None:
        """These were of use just now, or will be `until` a time in seconds since the epoch.

        The last ones are the first in line to go, so that no beginning goes before its end.
        """
        for digest in reversed(list(digests)):
            self._mark_used(self.path / digest.hex(), until.get(digest, 0.0))

    def clean(self) -> set[Digest]:
        """Delete what dead processes left half written and, above the quota, what was of no use the longest.

        Gives those of this model that are gone.
        """
        files = [entry for path in _model_paths(self.root) for entry in _entries(path)]
        for path, _, _ in files:
            if path.name.startswith(".") and not is_alive(path.name[1:].partition(".")[0]):
                _unlink(path)
        kept = sorted((used, size, path) for path, size, used in files if _is_digest(path.name))
        total = sum(size for _, size, _ in kept)
        gone = set()
        if total > self.quota:
            for _, size, path in kept:
                if total <= self.quota * _LEFT:
                    break
                _unlink(path)
                total -= size
                if path.parent == self.path:
                    gone.add(bytes.fromhex(path.name))
        return gone

    @staticmethod
    def _mark_used(path: Path, until: float = 0.0) -> None:
        now = max(
            time.time_ns(), int(until * 1e9)
        )  # what the system would note by itself is coarser: blocks of one step would be equal
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))

    def _put(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        temporary = self.path / next(self._names)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for part in parts:
                    _write_all(descriptor, memoryview(part))
            finally:
                os.close(descriptor)
            temporary.replace(self.path / name)
        except BaseException:
            _unlink(temporary)
            raise


def stored(root: Path) -> list[StoredKV]:
    """What is kept, model by model; nothing where there is no such directory."""
    found = []
    for path in _model_paths(root):
        try:
            about = {str(k): str(v) for k, v in json.loads((path / "about.json").read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError):
            about = {}
        sizes = [size for file, size, _ in _entries(path) if _is_digest(file.name)]
        found.append(StoredKV(path, about, len(sizes), sum(sizes)))
    return found


def clear(kept: StoredKV) -> int:
    """Delete what is kept of a model; returns the bytes. An engine that uses it at the moment finds less."""
    for file, _, _ in _entries(kept.path):
        _unlink(file)
    with contextlib.suppress(OSError):  # somebody wrote meanwhile
        kept.path.rmdir()
    return kept.bytes


def _secret(root: Path) -> bytes:
    """The key of the directory's digests, made by the first who comes."""
    path = root / "key"
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == _SECRET_BYTES:
                return secret
            _unlink(path)  # damaged: what was kept under it cannot be found any more
        temporary = root / f".key.{this_process()}.{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(descriptor, memoryview(secrets.token_bytes(_SECRET_BYTES)))
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, path)  # unlike a rename, it never replaces the key of another process
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            temporary.replace(path)
        _unlink(temporary)
    return path.read_bytes()


def _header(digest: Digest, payload: memoryview) -> bytes:
    checksum = zlib.crc32(payload, zlib.crc32(digest + len(payload).to_bytes(8, "little")))
    return _HEADER.pack(_MAGIC, digest, len(payload), checksum)


def _fill(file: FileIO, data: memoryview) -> bool:
    """Read until `data` is full; False when the file ends before."""
    at = 0
    while at < len(data):
        count = file.readinto(data[at:])
        if not count:
            return False
        at += count
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.write(descriptor, data[at:])


def _is_digest(name: str) -> bool:
    return len(name) == 40 and all(character in "0123456789abcdef" for character in name)


def _model_paths(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if len(path.name) == 16 and path.is_dir())
    except OSError:
        return []


def _entries(path: Path) -> list[tuple[Path, int, int]]:
    """Path, bytes and time of last use of every file of a model."""
    found = []
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                told = entry.stat()
                found.append((Path(entry.path), told.st_size, told.st_mtime_ns))
    return found


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
