"""`shoal doctor`: what this machine is, what would run on it and why, and whether it runs right."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import human_bytes, note, print_json
from shoal.errors import BackendError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.runners.registry import RunnerCard


def doctor(
    model: Annotated[
        str | None, typer.Option(help=f"Model for the self-check; {options.DEFAULT_MODEL} if it is here.")
    ] = None,
    isolation: Annotated[
        bool, typer.Option("--isolation", help="Also run twelve chats with secret words, and look for leaks.")
    ] = False,
    batch: Annotated[bool, typer.Option("--batch", help="Also measure which batch pays here; some seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show machine, backend, precision, store and memory, and check that a batch gives what a lone run gives.

    Exit status 1 when the check fails. Never fetches anything.
    """
    document = {}
    required = model is not None or isolation or batch
    for section, facts in _sections(
        model or options.DEFAULT_MODEL, required=required, isolation=isolation, batch=batch
    ):
        document[section] = facts
        if not as_json:
            print(f"{section.replace('_', '-'):11}{_SHOW[section](facts)}", flush=True)
    if as_json:
        print_json(document)
    if any(document[check]["status"] == "FAILED" for check in ("self_check", "isolation") if check in document):
        raise typer.Exit(1)


def _sections(model: str, *, required: bool, isolation: bool, batch: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of the report, each as soon as it is known. `required`: a missing model is an error."""
    from shoal.cli.machine import machine_facts, versions

    yield "machine", machine_facts()
    yield "versions", versions()
    runner = _runner()
    yield "runner", runner
    yield "precision", _precision(_card(runner["name"]))
    yield "store", _store()
    yield "kv_cache", _kv_cache()
    yield "power", _power()
    if "error" in runner:
        yield "memory", {"model": None}
        yield "self_check", {"status": "FAILED", "detail": runner["error"]}
        return
    missing = _missing(model, required=required)
    if missing is not None:
        yield "memory", {"model": None}
        yield "self_check", {"status": "skipped", "detail": missing}
        return
    yield "needs", _needs(model)
    from shoal.engine.engine import Engine

    note(f"loading {model}")
    with Engine.load(model) as engine:
        stats = engine.stats()
        card = _card(engine.spec.runner, model)
        yield (
            "memory",
            {
                "model": model,
                "weight_bytes": stats.weight_bytes,
                "file_bytes": card.file_bytes if card is not None else None,
                "kv_bytes": stats.kv_bytes,
                "step_bytes": stats.step_bytes,
                "total_bytes": stats.memory_bytes,
            },
        )
        from shoal.diagnostics.selfcheck import self_check

        yield "self_check", self_check(engine)
        if batch:
            from shoal.diagnostics.batch import batch_rates

            yield "batch", batch_rates(engine)
        if isolation:
            yield "isolation", _isolation(engine)


def _runner() -> dict[str, Any]:
    from shoal.config import EngineConfig
    from shoal.runners.registry import choose_runner

    try:
        name, why = choose_runner(EngineConfig())
    except BackendError as error:
        return {"name": None, "error": str(error)}
    return {"name": name, "why": why}


def _card(runner: str | None, model: str | None = None) -> RunnerCard | None:
    """What the runner is here; for a model, which must be in the store, with the bytes of its weights."""
    if runner is None:
        return None
    from shoal.config import EngineConfig
    from shoal.models import Store
    from shoal.runners.registry import LocalModel, describe_runner

    if model is None:
        return describe_runner(runner, None, EngineConfig())
    store = Store()
    files = store.resolve(model, pull=False)
    return describe_runner(runner, LocalModel.read(files), EngineConfig(), store.cache_dir(files.key))


def _needs(model: str) -> dict[str, Any]:
    """What a model needs of memory, read off its header: no weight is loaded."""
    from shoal.models import Store, families
    from shoal.models.needs import needs
    from shoal.runners.registry import LocalModel

    local = LocalModel.read(Store().resolve(model, pull=False))
    facts: dict[str, Any] = {"model": model, "file_bytes": local.file_bytes}
    if local.gguf is None:
        return {**facts, "why": f"only GGUF files tell it; this is {local.files.kind}"}
    try:
        need = needs(families.describe(local.gguf), kv_element_bytes=2)
    except UnsupportedModelError as error:
        return {**facts, "why": error.message}
    return facts | dataclasses.asdict(need)


def _precision(card: RunnerCard | None) -> dict[str, Any]:
    """What "auto" comes to on this machine."""
    if card is None:
        return {"name": None, "why": "there is no runner"}
    return {"name": card.precision, "why": card.why, "kv": card.kv, "devices": card.devices, "capabilities": card.isa}


def _store() -> dict[str, Any]:
    from shoal.models import Store

    store = Store()
    models = [{"name": model.name, "kind": model.kind, "bytes": model.bytes} for model in store.list()]
    return {"path": str(store.root), "models": models}


def _kv_cache() -> dict[str, Any]:
    """What KV of prompts is kept on disk, and how much room its disk has."""
    from shoal.cli.kv import entry
    from shoal.engine.kv.files import stored
    from shoal.engine.kv.opening import kv_root

    root = kv_root()
    kept = stored(root)
    place = next(path for path in (root, *root.parents) if path.exists())
    writable, free = os.access(place, os.W_OK), shutil.disk_usage(place).free
    return {"path": str(root), "writable": writable, "free_bytes": free, "kept": [entry(one) for one in kept]}


def _power() -> dict[str, Any]:
    """Which sensors the burst governor would have here: each with its reading, or why it cannot be read."""
    from shoal.power import survey

    sensors: dict[str, Any] = {}
    for found in survey():
        if found.reading is None:
            sensors[found.name] = {"readable": False, "why": found.why}
        else:
            told, level = str(found.reading), str(found.reading.level)
            sensors[found.name] = {"readable": True, "reading": told, "level": level}
    return {"sensors": sensors}


def _missing(model: str, *, required: bool) -> str | None:
    """Why the self-check has no model to run on, or None when it is here."""
    from shoal.models import Store

    try:
        Store().resolve(model, pull=False)
    except ModelNotFoundError:
        if required:
            raise
        return f"{model} is not in the store; `shoal models pull {model}` fetches it (93 MB)"
    return None


def _isolation(engine: Engine) -> dict[str, Any]:
    from shoal.diagnostics.isolation import check_isolation

    report = check_isolation(engine)
    told = f"{report.chats} chats, {report.answers} answers, {report.recalled} with their own secret word"
    if report.ok:
        return {"status": "ok", "detail": f"{told}, none with another's; all equal to what each chat writes alone"}
    found = "; ".join((*report.leaks, *report.differing)[:4]) or "too few recalled their word for the check to count"
    return {"status": "FAILED", "detail": f"{told}, {len(report.leaks)} leaks, {len(report.differing)} differ: {found}"}


def _show_machine(facts: dict[str, Any]) -> str:
    features = ", ".join(facts["features"]) or "no known features"
    total, free = human_bytes(facts["memory_bytes"]), human_bytes(facts["memory_available_bytes"])
    cores = f"{facts['cores']} core{'s' if facts['cores'] != 1 else ''}"
    where = f"{facts['system']}, Python {facts['python']}"
    return f"{facts['cpu']}, {cores} ({features}), {total} memory, {free} available\n{'':11}{where}"


def _show_versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in facts.items())


def _show_choice(facts: dict[str, Any]) -> str:
    return facts.get("error") or f"{facts['name']}: {facts['why']}"


def _show_precision(facts: dict[str, Any]) -> str:
    first = _show_choice(facts)
    if not facts.get("devices"):
        return first
    return f"{first}\n{'':11}on {', '.join(facts['devices'])}; {', '.join(facts['capabilities']) or 'nothing special'}"


def _show_store(facts: dict[str, Any]) -> str:
    models = ", ".join(f"{model['name']} ({human_bytes(model['bytes'])})" for model in facts["models"])
    return f"{facts['path']}: {models or 'empty'}"


def _show_kv_cache(facts: dict[str, Any]) -> str:
    kept = ", ".join(f"{one.get('model', '?')} {human_bytes(one['bytes'])}" for one in facts["kept"]) or "nothing kept"
    free = f"{human_bytes(facts['free_bytes'])} free" if facts["writable"] else "cannot be written"
    return f"{facts['path']}: {kept}; {free} (`shoal serve --kv-cache`, `kv_cache`)"


def _show_power(facts: dict[str, Any]) -> str:
    readable = [told for told in facts["sensors"].values() if told["readable"]]
    lines = [f"{told['reading']}, {told['level']}" for told in readable]
    missing = [f"{name} ({told['why']})" for name, told in facts["sensors"].items() if not told["readable"]]
    return f"\n{'':11}".join([*lines, *([f"not readable: {', '.join(missing)}"] if missing else [])])


def _show_batch(facts: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.0f} at {size}" for size, rate in facts["rates"].items())
    share = f"{100 * facts['share']:.0f} % of the most"
    return f"{rates} tok/s; {facts['smallest']} is the smallest that reaches {share}"


def _show_needs(facts: dict[str, Any]) -> str:
    weights = f"weights {human_bytes(facts['file_bytes'])} in the file"
    if "why" in facts:
        return f"{weights}; the rest is not known: {facts['why']}"
    kv = f"KV {human_bytes(facts['kv_context_bytes'])} for a sequence of {facts['context_length']:,} tokens in bf16"
    states = f", states {human_bytes(facts['state_bytes'])} a sequence" if facts["state_bytes"] else ""
    return f"{weights}, {kv} ({human_bytes(facts['kv_token_bytes'])} a token){states}"


def _show_memory(facts: dict[str, Any]) -> str:
    if facts["model"] is None:
        return "unknown until a model is loaded"
    weights, kv, step = (human_bytes(facts[f"{part}_bytes"]) for part in ("weight", "kv", "step"))
    total = human_bytes(facts["total_bytes"])
    if facts["file_bytes"]:
        weights += f" ({human_bytes(facts['file_bytes'])} in its files)"
    return f"at most {total} for {facts['model']}: weights {weights}, KV {kv} as it fills, a step {step}"


def _show_check(facts: dict[str, Any]) -> str:
    return f"{facts['status']}: {facts['detail']}"


_SHOW = {
    "machine": _show_machine,
    "versions": _show_versions,
    "runner": _show_choice,
    "precision": _show_precision,
    "store": _show_store,
    "kv_cache": _show_kv_cache,
    "power": _show_power,
    "needs": _show_needs,
    "memory": _show_memory,
    "self_check": _show_check,
    "batch": _show_batch,
    "isolation": _show_check,
}
