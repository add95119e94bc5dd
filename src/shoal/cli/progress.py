"""A progress bar for what takes long before a model can be used: fetching it, packing its weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from shoal.cli.console import human_bytes
from shoal.models import ModelFiles, Store
from shoal.models.files import Progress


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A bar on standard error once there is something to tell, a line per stage where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(f"{what} {name}", total=None)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _lines(name: str) -> Progress:
    told: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:  # noqa: ARG001 - the face of Progress
        if what not in told:
            told.add(what)
            print(f"{what} {name}, {human_bytes(total)}", file=sys.stderr, flush=True)

    return tell


def pull_with_progress(store: Store, name: str) -> ModelFiles:
    """`Store.pull` that shows how far it is. Raises as `Store.pull`."""
    with progress_bar(name) as show:
        return store.pull(name, show)
