"""The model store as the page shows it: what is there, what is being fetched, and deleting."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import ModelError, ModelNotFoundError, ShoalError, StoreError
from shoal.models import Store, StoredModel
from shoal.models.gguf import read_gguf
from shoal.models.quantize import quantize_gguf
from shoal.server.errors import ApiError, bad_request
from shoal.server.hub import ModelHub

_MAX_PULLS = 2  # at a time
_KEPT_PULLS = 32  # that have ended


@dataclass(slots=True)
class Pull:
    """A model on its way into the store, fetched or made. Bytes (made: weights); `total` is 0 while it is unknown.

    `error` says why it failed. `cancelled`: somebody wants it no more.
    """

    name: str
    stage: str = "starting"
    done: int = 0
    total: int = 0
    finished: bool = False
    error: str | None = None
    made: bool = False
    cancelled: bool = False


class Storage:
    """The store, for a server's page. Methods may block on the disk; pulls run on threads of their own."""

    def __init__(self, hub: ModelHub) -> None:
        self._hub = hub
        self._pulls: dict[str, Pull] = {}  # the latest of each name, so many
        self._lock = threading.Lock()
        self._weights: dict[tuple[Path, int], str] = {}

    def describe(self) -> dict[str, Any]:
        """Models with their sizes in bytes, pulls, and how much room is left."""
        store = Store()
        served = self._hub.served
        models = [
            {
                "name": model.name,
                "kind": model.kind,
                "weights": self._precision(model),
                "bytes": model.bytes,
                "derived_bytes": store.derived_bytes(model.name),
                "loaded": served is not None and served.name == model.name,
            }
            for model in store.list()
        ]
        root = next(path for path in (store.root, *store.root.parents) if path.exists())
        pulls = [asdict(pull) for pull in list(self._pulls.values())]
        return {"models": models, "pulls": pulls, "free_bytes": shutil.disk_usage(root).free}

    def pull(self, name: str) -> Pull:
        """Begin to fetch a model; returns at once. `remove` ends it meanwhile.

        ApiError 429 when enough are under way; `ModelNotFoundError`.
        """
        store = Store()
        store.check_name(name)
        return self._begin(name, partial(_fetch, store), made=False)

    def make(self, name: str, kind: str) -> Pull:
        """Begin to make a model at another precision, `NAME-KIND`; returns at once. `remove` ends it meanwhile.

        Raises as `pull`; ApiError 400 for a model that is no GGUF.
        """
        store = Store()
        source = store.resolve(name, pull=False)
        if source.kind != "gguf":
            raise bad_request(
                f"{name} is of kind {source.kind}, and only GGUF files are made at another precision", "name"
            )
        return self._begin(f"{name}-{kind}", partial(_make, store, source.path, kind), made=True)

    def _begin(self, name: str, work: Callable[[Pull], None], *, made: bool) -> Pull:
        with self._lock:  # calls come on several threads
            running = [pull for pull in self._pulls.values() if not pull.finished]
            if any(pull.name == name for pull in running):
                return self._pulls[name]
            if len(running) >= _MAX_PULLS:
                raise ApiError(429, f"{len(running)} models are on their way", code="queue_full")
            for ended in [known for known, pull in self._pulls.items() if pull.finished][: -_KEPT_PULLS or None]:
                del self._pulls[ended]
            pull = self._pulls[name] = Pull(name, made=made)
        threading.Thread(target=_follow, args=(work, pull), name=f"pull-{name}", daemon=True).start()
        return pull

    def remove(self, name: str) -> int:
        """Delete a model, or end one that is on its way, of which nothing is left then; gives the bytes freed.

        ApiError 409 for one in use; `ModelNotFoundError`, `StoreError`.
        """
        store = Store()
        pull = self._pulls.get(name)
        if pull is not None and not pull.finished:
            pull.cancelled = True
            return 0
        if any(store.same(name, used) for used in self._hub.in_use):
            raise ApiError(409, f"{name} is loaded; switch to another model first", param="name", code="model_in_use")
        pulls = [known for known in list(self._pulls) if store.same(name, known)]
        if any(not self._pulls[known].finished for known in pulls):
            raise ApiError(409, f"{name} is being fetched", param="name", code="model_in_use")
        for known in pulls:
            self._pulls.pop(known, None)
        return store.remove(name)

    def _precision(self, model: StoredModel) -> str | None:
        """The type of most of a GGUF's weights, as "Q4_1"; None for other kinds and unreadable files."""
        if model.kind != "gguf":
            return None
        try:
            key = (model.path, model.path.stat().st_mtime_ns)
            if key not in self._weights:
                sizes: Counter[str] = Counter()
                for tensor in read_gguf(model.path).tensors.values():
                    sizes[tensor.type] += tensor.data.nbytes
                self._weights[key] = sizes.most_common(1)[0][0]
        except (OSError, ModelError):
            return None
        return self._weights[key]


def _follow(work: Callable[[Pull], None], pull: Pull) -> None:
    """Bring a model in; what becomes of it is told by the pull."""
    try:
        work(pull)
        pull.stage = "done"
    except ShoalError as error:
        pull.stage, pull.error = ("cancelled", None) if pull.cancelled else ("failed", str(error))
    finally:
        pull.finished = True


def _fetch(store: Store, pull: Pull) -> None:
    def tell(stage: str, done: int, total: int) -> None:
        pull.stage, pull.done, pull.total = stage, done, total
        _end_cancelled(pull)

    try:
        store.pull(pull.name, tell)
    except StoreError:
        if pull.cancelled:  # what had come is not wanted either
            with suppress(ModelNotFoundError):
                store.remove(pull.name)
        raise


def _make(store: Store, source: Path, kind: str, pull: Pull) -> None:
    def tell(done: int, total: int) -> None:
        pull.stage, pull.done, pull.total = f"making {kind}", done, total
        _end_cancelled(pull)

    with store.adding(pull.name) as target:
        quantize_gguf(source, target, kind, tell)


def _end_cancelled(pull: Pull) -> None:
    if pull.cancelled:
        raise StoreError(f"{pull.name} is not wanted any more", value=pull.name)
