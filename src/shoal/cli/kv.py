"""`shoal models kv`: the KV of prompts that is kept on disk, and clearing it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import human_bytes, print_json

if TYPE_CHECKING:
    from shoal.engine.kv.files import StoredKV


def kv(
    clear: Annotated[bool, typer.Option("--clear", help="Delete it; engines that run go on and find less.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what KV of prompts is kept on disk, model by model (`kv_cache`), or clear it."""
    from shoal.engine.kv import files
    from shoal.engine.kv.opening import kv_root

    root = kv_root()
    kept = files.stored(root)
    freed = sum(files.clear(one) for one in kept) if clear else 0
    if as_json:
        print_json({"path": str(root), "kept": [entry(one) for one in kept], "cleared_bytes": freed})
    elif clear:
        print(f"{human_bytes(freed)} of KV freed in {root}")
    elif not kept:
        print(f"no KV is kept in {root}; `shoal serve` and kv_cache keep it", file=sys.stderr)
    else:
        for one in kept:
            told = one.about
            name = f"{told.get('model', '?')} ({told.get('runner', '?')}, {told.get('precision', '?')})"
            print(f"{name:40} {one.blocks:>7,} blocks  {human_bytes(one.bytes):>8}  {one.path}")


def entry(kept: StoredKV) -> dict[str, Any]:
    """What is kept of one model, for JSON."""
    return {**kept.about, "blocks": kept.blocks, "bytes": kept.bytes, "path": str(kept.path)}
