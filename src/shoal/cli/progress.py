"""A progress bar for fetching models."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shoal.cli.console import human_bytes
from shoal.models import ModelFiles, Store


def pull_with_progress(store: Store, name: str) -> ModelFiles:
    """`Store.pull` with a bar on standard error, a line per stage where that is no terminal. Raises as `Store.pull`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def tell(what: str, done: int, total: int) -> None:  # noqa: ARG001 - the face of Progress
            if what not in told:
                told.add(what)
                print(f"{what} {name}, {human_bytes(total)}", file=sys.stderr, flush=True)

        return store.pull(name, tell)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"fetch {name}", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{what} {name}", completed=done, total=total)

        return store.pull(name, show)
