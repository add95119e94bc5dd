"""`shoal quantize`: a model at another precision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import ensure_model, human_bytes
from shoal.errors import UnsupportedModelError


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Name in the store, or path of a .gguf file.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A new name in the store, or path of a new .gguf file.")],
    kind: Annotated[str, typer.Option("--type", help="q8_0, q4_0 or q4_1.")] = "q8_0",
) -> None:
    """Write a GGUF model with its matrices at another precision."""
    from shoal.models import Store
    from shoal.models.quantize import quantize_gguf

    ensure_model(source)
    store = Store()
    files = store.resolve(source, pull=False)
    if files.kind != "gguf":
        raise UnsupportedModelError(
            f"{source} is of kind {files.kind}", value=files.kind, limit="gguf", hint="only GGUF files are quantised"
        )

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{100 * done // total:3d} %", end="\n" if done == total else "", file=sys.stderr, flush=True)

    if target.endswith(".gguf"):
        made = quantize_gguf(files.path, Path(target), kind, show)
    else:
        with store.adding(target) as path:
            made = quantize_gguf(files.path, path, kind, show)
    sizes = f"{human_bytes(made.source_bytes)} to {human_bytes(made.bytes)}"
    print(f"{target}: {sizes}, {made.tensors} matrices as {kind}, relative error {made.rms_error:.2e}")
