"""`shoal models`: what the store holds, and changing it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import human_bytes, print_json
from shoal.cli.kv import kv

if TYPE_CHECKING:
    from shoal.models import StoredModel
    from shoal.runners.registry import LocalModel

app = typer.Typer(no_args_is_help=True, help="Fetch, list and remove models.")

app.command("kv")(kv)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="smollm2-135m, or a hub id: org/name, org/name:file.gguf, org/name:Q4_K_M."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("pull")
def pull(name: Name) -> None:
    """Fetch a model into the store, unless it is there."""
    from shoal.cli.progress import pull_with_progress
    from shoal.models import Store

    store = Store()
    files = pull_with_progress(store, name)
    print(f"{name}: {human_bytes(store.info(name).bytes)} in {files.path}")


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models in the store: size, format, family, context, the runner that takes each, and where it lies."""
    from shoal.models import Store

    store = Store()
    models = store.list()
    if as_json:
        print_json([{**_entry(model), **_summary(model)} for model in models])
    elif not models:
        print(f"no models in {store.root}; `shoal models pull` fetches one", file=sys.stderr)
    else:
        width = max(len(model.name) for model in models)
        for model in models:
            facts = _summary(model)
            context = f"{facts['context_length']:,}" if facts["context_length"] else "?"
            runner = facts["runner"] or f"no runner: {facts['why']}"
            told = f"{facts['family'] or '?':10}  {context:>7} tokens  {runner}"
            print(f"{model.name:{width}}  {human_bytes(model.bytes):>8}  {model.kind:11}  {told}")


@app.command("search")
def search(
    words: Annotated[list[str] | None, typer.Argument(help="Words that name, family or licence must have.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show small models worth a try, from a list made by hand; the hub is not asked."""
    from shoal.models import catalog

    found = catalog.search(" ".join(words or ()))
    if as_json:
        entries = [{"name": e.name, "family": e.family, "bytes": e.bytes, "license": e.license} for e in found]
        print_json({"date": catalog.DATE, "models": entries})
        return
    if not found:
        print("nothing in the list has all of these words; any hub id can be pulled", file=sys.stderr)
        return
    width = max(len(entry.name) for entry in found)
    for entry in found:
        print(f"{entry.name:{width}}  {human_bytes(entry.bytes):>8}  {entry.family:9}  {entry.license}")
    print(f"A list made by hand on {catalog.DATE}, sizes rounded; `shoal models pull` fetches one.", file=sys.stderr)


@app.command("info")
def info(name: Name, as_json: AsJson = False) -> None:
    """Show what a model in the store is."""
    from shoal.models import Store

    model = Store().info(name)
    facts = {**_entry(model), **_describe(model)}
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):15} {_show(key, value)}")


@app.command("rm")
def remove(name: Name) -> None:
    """Delete a model and what was derived from it."""
    from shoal.models import Store

    freed = Store().remove(name)
    print(f"{name} removed, {human_bytes(freed)} freed")


def _show(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "bytes":
        return human_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _entry(model: StoredModel) -> dict[str, Any]:
    return {"name": model.name, "kind": model.kind, "bytes": model.bytes, "path": str(model.path)}


def _summary(model: StoredModel) -> dict[str, Any]:
    """Family, context and runner of a model; what cannot be read says why."""
    from shoal.config import EngineConfig
    from shoal.errors import ShoalError
    from shoal.models import Store
    from shoal.runners.registry import LocalModel, choose_runner

    facts: dict[str, Any] = {"family": None, "context_length": None, "runner": None, "why": ""}
    try:
        local = LocalModel.read(Store().resolve(model.name, pull=False))
        facts |= _read(local)
        facts["runner"], facts["why"] = choose_runner(EngineConfig(), local)
    except ShoalError as error:
        facts["why"] = error.message
    return facts


def _read(model: LocalModel) -> dict[str, Any]:
    if model.gguf is not None:
        return {"family": model.gguf.architecture, "context_length": model.gguf.context_length}
    try:
        config = json.loads((model.files.path / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    config = config.get("text_config", config)  # a model that sees has one for its language part
    return {"family": config.get("model_type"), "context_length": config.get("max_position_embeddings")}


def _describe(model: StoredModel) -> dict[str, Any]:
    """What a GGUF file says about itself; other kinds say it in a configuration that the runner reads."""
    if model.kind != "gguf":
        return {}
    from shoal.models.gguf import read_gguf

    gguf = read_gguf(model.path)
    return {
        "architecture": gguf.architecture,
        "layers": gguf.n_layers,
        "vocabulary": gguf.vocab_size,
        "context_length": gguf.context_length,
        "chat_template": gguf.chat_template is not None,
    }
