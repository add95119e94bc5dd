"""Requests in flight and pinned prefixes on disk: arrays in safetensors, the rest in JSON, nothing that executes.

The directory holds `state.json`, which names the file of its arrays. KV is not written: it is computed
again on restore, which gives the same tokens and fits any machine.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shoal.engine.inputs import PreparedRequest
from shoal.engine.loop import RequestState, StepLoop
from shoal.errors import ModelFormatError, StoreError, UnsupportedModelError
from shoal.types import Namespace, Priority, Request, SamplingParams

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_VERSION = 1


def save(loop: StepLoop, path: Path) -> None:
    """Write the loop's requests and pinned prefixes to directory `path`; an earlier state there is replaced whole."""
    now = loop.clock()
    arrays: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
    requests = [_describe(state, now, i, arrays) for i, state in enumerate(loop.states)]
    prefixes = []
    for i, (tokens, namespace) in enumerate(loop.prefixes.values()):
        arrays[f"prefix.{i}"] = np.array(tokens, np.int32)
        prefixes.append(dataclasses.asdict(namespace))
    name = f"tokens-{secrets.token_hex(4)}.safetensors"
    spec = loop.runner.spec
    document = {
        "version": _VERSION,
        "model": {"name": spec.name, "architecture": spec.architecture, "vocab_size": spec.vocab_size},
        "arrays": name,
        "requests": requests,
        "prefixes": prefixes,
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file(arrays, path / name)
        temporary = path / f"{name}.json"
        temporary.write_text(json.dumps(document, indent=1))
        temporary.replace(path / "state.json")
        for old in path.glob("tokens-*"):
            if old.name != name:
                old.unlink()
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the state cannot be written: {error}", value=str(path), hint="give another path") from error


def _describe(state: RequestState, now: float, i: int, arrays: dict[str, Any]) -> dict[str, Any]:
    request, seq = state.prepared.request, state.seq
    arrays[f"prompt.{i}"] = np.array(state.prepared.tokens, np.int32)
    arrays[f"output.{i}"] = np.array(seq.tokens[seq.prompt_len :], np.int32)
    return {
        "id": state.request_id,
        "sampling": dataclasses.asdict(state.prepared.sampling),
        "seed": state.prepared.seed,
        "priority": request.priority,
        "deadline_s": None if request.deadline_s is None else max(state.arrival + request.deadline_s - now, 1e-3),
        "timeout_s": request.timeout_s,
        "group": request.group,
        "namespace": dataclasses.asdict(request.namespace),
        "critical_path": request.critical_path,
    }


def restore(engine: Engine, path: Path) -> None:
    """Pin the saved prefixes and let the saved requests go on in `engine`.

    Raises `StoreError` when the state cannot be read, `ModelFormatError` when it is broken, `UnsupportedModelError`
    when it belongs to another model.
    """
    document, arrays = _read(path)
    try:
        _check_model(engine, document["model"], path)
        for i, namespace in enumerate(document["prefixes"]):
            tokens = arrays[f"prefix.{i}"].tolist()
            engine.restored_prefixes.append(engine.cache_prefix(tokens, namespace=Namespace(**namespace)))
        for i, saved in enumerate(document["requests"]):
            written = tuple(arrays[f"output.{i}"].tolist())
            prepared = _admissible(engine, saved, arrays[f"prompt.{i}"].tolist())
            engine.restored_handles.append(engine.resume_request(prepared, written))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(
            f"the state in {path} is broken: {error}", value=str(path), hint="save it again"
        ) from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        document = json.loads((path / "state.json").read_text())
        arrays = load_file(path / str(document["arrays"]))
    except OSError as error:
        raise StoreError(
            f"no state can be read: {error}", value=str(path), hint="give what Engine.save wrote"
        ) from error
    except (ValueError, SafetensorError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"the state in {path} is broken: {error}", value=str(path), hint="save it again"
        ) from error
    if document.get("version") != _VERSION:
        raise ModelFormatError(
            f"the state has version {document.get('version')!r}", value=document.get("version"), limit=_VERSION
        )
    return document, arrays


def _check_model(engine: Engine, model: Mapping[str, Any], path: Path) -> None:
    spec = engine.spec
    if (model["architecture"], model["vocab_size"], model["name"]) != (spec.architecture, spec.vocab_size, spec.name):
        raise UnsupportedModelError(
            f"the state in {path} is of model {model['name']}, the engine has {spec.name}",
            value=model["name"],
            limit=spec.name,
            hint="load the model that the state was saved with",
        )


def _admissible(engine: Engine, saved: Mapping[str, Any], tokens: list[int]) -> PreparedRequest:
    sampling = dict(saved["sampling"])
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    request = Request(
        prompt_tokens=tokens,
        id=saved["id"],
        sampling=SamplingParams(**sampling),
        priority=Priority(saved["priority"]),
        deadline_s=saved["deadline_s"],
        timeout_s=saved["timeout_s"],
        group=saved["group"],
        namespace=Namespace(**saved["namespace"]),
        critical_path=saved.get("critical_path", 0),
    )
    return dataclasses.replace(engine.inputs.prepare(request), seed=int(saved["seed"]))
