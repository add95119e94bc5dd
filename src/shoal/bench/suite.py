"""A whole run of the suite: machine, model, systems, levels, fidelity, to one document."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.ceiling import ModelFacts
from shoal.bench.harness import Harness, Rounds, Tell, why_missing
from shoal.bench.machine import Energy, ThermalGate, measured
from shoal.bench.results import SCHEMA
from shoal.bench.shapes import write_shape
from shoal.bench.systems import DEFAULT_PEERS, FILES, Named, named
from shoal.bench.systems.base import Measured
from shoal.bench.workloads import TEXT, Sizes, select
from shoal.errors import BenchmarkError, ShoalError
from shoal.models import ModelFiles, Store, load_tokenizer, oracle
from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.quantize import TYPES, quantize_gguf

_FIDELITY_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `peers` are names of systems, None for all installed ones; `margin` is the thermal gate's.

    With `shape` it is a file of random weights in that shape and `format` (`bench/shapes.py`), and not `model`.
    """

    scenario: str = "all"
    rounds: Rounds = field(default_factory=Rounds)
    sizes: Sizes = field(default_factory=Sizes)
    peers: tuple[str, ...] | None = None
    model: str = "smollm2-135m"
    shape: str = ""
    format: str = "q4_k_m"
    runner: str = "auto"
    threads: int | None = None
    quick: bool = False
    margin: float = 0.25


def run_suite(
    options: Options, facts: Mapping[str, Any], command: str, tell: Tell, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure, and give the document that `benchmarks/README.md` describes.

    `facts` are those of the machine as `shoal doctor` has them; `tell` gets a line for each thing done, `save` the
    document after each level, with what there is by then. Raises `BenchmarkError` for names that are not known, any
    `ModelError`. A system that fails is in the document, with why.
    """
    workloads = select(options.scenario, options.sizes, quick=options.quick)
    store = Store()
    files = _files(options, store, tell)
    if files.kind != "gguf":
        raise BenchmarkError(f"{files.name} is no GGUF file", value=files.kind, hint="peers share one GGUF; give one")
    threads = options.threads or int(facts["cores"])
    default = DEFAULT_PEERS if any(workload.peers for workload in workloads) else ()
    peers = options.peers if options.peers is not None else default
    sources, missing = _sources(options, peers, files, store, threads)
    for key, why in missing.items():
        tell(f"without {key}: {why}")
    tell("measuring the machine")
    machine = {**facts, **measured(threads, list(facts["features"])), "threads": threads, "load": os.getloadavg()[0]}
    machine["energy"] = Energy().to_json()
    text = load_tokenizer(files).encode(TEXT.read_text("utf-8"), add_special=False)
    gate = ThermalGate(margin=options.margin, wait_s=1.0 if options.quick else 20.0)
    model = ModelFacts.of(files.path)
    harness = Harness(sources, gate, text=text, facts=model, machine=machine, tell=tell)
    begin = time.perf_counter()
    fidelity: dict[str, dict[str, Any]] = {}
    levels: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "quick": options.quick,
            "took_s": time.perf_counter() - begin,
            "machine": machine,
            "model": {
                "name": f"{options.shape} in {options.format}" if options.shape else files.name,
                "random_weights": bool(options.shape),
                **_describe_file(files.path),
            },
            "gate": gate.to_json(),
            "rounds": asdict(options.rounds),
            "systems": {s.key: _system(s, sources[s], harness, fidelity) for s in sources},
            "missing": missing,
            "levels": levels,
        }

    try:
        if not options.shape:  # of random weights it says nothing
            fidelity |= _fidelity(harness, files, text[: 64 if options.quick else _FIDELITY_TOKENS], tell)
        for i, workload in enumerate(workloads):
            levels.append(harness.level(workload, options.rounds))
            save(document())
            if i + 1 == len(workloads) or workloads[i + 1].scenario != workload.scenario:
                harness.close(variants_only=True)
    finally:
        harness.close()
    return document()


def _files(options: Options, store: Store, tell: Tell) -> ModelFiles:
    """The model under measurement. A shape's file is written once and kept; `ConfigError` for an unknown one."""
    if not options.shape:
        return store.resolve(options.model)
    tell(f"{options.shape} in {options.format}, random weights")
    return store.resolve(str(_shape(options.shape, options.format, store)))


def _shape(shape: str, kind: str, store: Store) -> Path:
    path = store.cache_dir("shapes") / f"{shape}-{kind}.gguf"
    return path if path.exists() else write_shape(path, shape, kind)


def _sources(
    options: Options, peers: Sequence[str], files: ModelFiles, store: Store, threads: int
) -> tuple[dict[Named, Measured], dict[str, str]]:
    """Ours and `peers` with their models, and why some of them do not take part. BenchmarkError for an unknown name."""
    model = str(files.path) if options.shape else options.model
    ours = Measured(model, files.path, threads, store.cache_dir(files.key), options={"runner": options.runner})
    sources = {named("shoal"): ours, named("shoal-http"): ours, named("shoal-agents"): ours}
    missing: dict[str, str] = {}
    for text in peers:
        system = named(text)
        source = replace(ours, options={}, url=system.url)
        reason = why_missing(system)
        if reason is None and system.other_file:
            try:
                path = other_file(options, files, store, system.flavour)
                source = replace(source, path=path, model=str(path), options=ours.options)
            except ShoalError as error:
                reason = error.message
        elif system.kind == "shoal":
            source = replace(source, options={"runner": system.flavour or options.runner})
        if reason is None:
            sources[system] = source
        else:
            missing[text] = reason
    reason = why_missing(named("shoal-http"))
    if reason is not None:
        del sources[named("shoal-http")]
        missing["shoal-http"] = reason
    return sources, missing


def other_file(options: Options, files: ModelFiles, store: Store, flavour: str) -> Path:
    """The same model in another format, made once: of a shape random weights, else requantised.

    llama.cpp's own tool makes them all; without it `shoal quantize` makes those it can. `BenchmarkError` for the rest.
    """
    kind = FILES[flavour]
    if options.shape:
        return _shape(options.shape, kind.lower(), store)
    target = store.cache_dir("peers") / f"{files.key}.{kind}.gguf"
    if target.exists():
        return target
    if why_missing(named("llama")) is None:
        from shoal.bench.systems.llama import requantised

        return requantised(files.path, target, flavour)
    if kind.lower() not in TYPES:
        raise BenchmarkError(f"{kind} is made by llama.cpp's tool, and llama-cpp-python is not installed", value=kind)
    quantize_gguf(files.path, target, kind.lower())
    return target


def _fidelity(harness: Harness, files: ModelFiles, tokens: Sequence[int], tell: Tell) -> dict[str, dict[str, Any]]:
    """Each system against exact float32 arithmetic over the weights of the file under measurement."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        exact = Path(directory) / "exact.npy"
        np.save(exact, oracle.logits(describe(read_gguf(files.path)), list(tokens)))
        for system in harness.sources:
            told = found[system.key] = harness.fidelity(system, str(exact), tokens)
            if "mean_kl" in told:
                tell(f"fidelity of {system.key}: mean KL {told['mean_kl']:.4f}, top-1 {told['top1']:.3f}")
    return found


def _describe_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _system(
    system: Named, source: Measured, harness: Harness, fidelity: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    loaded = harness.loaded.get(system.key, {})
    size = source.path.stat().st_size if source.path.is_file() else None
    return {
        "label": system.label,
        "file": source.path.name,
        "file_bytes": size,
        "fidelity": fidelity.get(system.key, {}),
        **loaded,
    }
