"""Requests in flight and pinned prefixes on disk, in one safetensors file: arrays, JSON, nothing that executes.

Token ids are the file's arrays, everything else is the JSON text `state` of its metadata. KV is not written: it is
computed again on restore, which gives the same tokens and fits any machine. What people asked their models is private:
the file can be read by its owner only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from shoal.core.request import RequestSpec
from shoal.engine.inflight import Output, RequestState
from shoal.engine.loop import StepLoop
from shoal.errors import ModelFormatError, StoreError, UnsupportedModelError
from shoal.types import Namespace, TokenLogprob
from shoal.wire import from_json, to_json

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_VERSION = 2
STATE_FILE = "state.safetensors"
_OLD = "state.json"  # what version 1 wrote

Arrays = dict[str, NDArray[np.int32]]


def save(loop: StepLoop, path: Path) -> None:
    """Write the loop's requests and pinned prefixes to directory `path`; an earlier state there is replaced whole.

    A prefill that is under way is saved as the prefix it will be.
    """
    now = loop.clock()
    arrays: Arrays = {}
    states = loop.states
    writing = [state for state in states if not state.seq.spec.prefill_only]
    requests = [_saved(state, now, i, arrays) for i, state in enumerate(writing)]
    prefixes = list(loop.prefixes.values())
    prefixes += [(s.seq.spec.prompt, s.seq.spec.namespace) for s in states if s.seq.spec.prefill_only]
    for i, (tokens, _) in enumerate(prefixes):
        arrays[f"prefix.{i}"] = np.array(tokens, np.int32)
    spec = loop.runner.spec
    document = {
        "version": _VERSION,
        "model": {"name": spec.name, "architecture": spec.architecture, "vocab_size": spec.vocab_size},
        "requests": to_json(requests),
        "prefixes": to_json([namespace for _, namespace in prefixes]),
    }
    try:
        _write(path, to_safetensors(arrays, {"state": json.dumps(document)}))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the state cannot be written: {error}", value=str(path), hint="give another path") from error


def _write(path: Path, data: bytes) -> None:
    """Put the state in place whole: whoever reads, and a power cut, sees the old one or the new one."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path, prefix=f".{STATE_FILE}.")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path / STATE_FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@dataclass(frozen=True, slots=True)
class _Saved:
    """One request: what the scheduler needs of it, without its prompt, which is an array, and its log-probabilities."""

    spec: RequestSpec
    logprobs: tuple[TokenLogprob, ...]


def _saved(state: RequestState, now: float, i: int, arrays: Arrays) -> _Saved:
    spec, output = state.seq.spec, state.output()
    arrays[f"prompt.{i}"] = np.array(spec.prompt, np.int32)
    arrays[f"output.{i}"] = np.array(output.tokens, np.int32)
    left_s = None if spec.deadline_s is None else max(state.seq.arrival + spec.deadline_s - now, 1e-3)
    return _Saved(dataclasses.replace(spec, id=state.request_id, prompt=(), deadline_s=left_s), output.logprobs)


def restore(engine: Engine, path: Path) -> None:
    """Pin the saved prefixes and let the saved requests go on in `engine`.

    Raises `StoreError` when the state cannot be read, `ModelFormatError` when it is broken or of another version,
    `UnsupportedModelError` when it belongs to another model.
    """
    document, arrays = _read(path)
    try:
        _check_model(engine, document["model"], path)
        for i, namespace in enumerate(document["prefixes"]):
            tokens = arrays[f"prefix.{i}"].tolist()
            prefix = engine.cache_prefix(tokens, namespace=from_json(namespace, Namespace))
            engine.restored_prefixes.append(prefix)
        for i, entry in enumerate(document["requests"]):
            saved = from_json(entry, _Saved)
            spec = dataclasses.replace(saved.spec, prompt=tuple(arrays[f"prompt.{i}"].tolist()))
            before = Output(tuple(arrays[f"output.{i}"].tolist()), saved.logprobs)
            engine.restored_handles.append(engine.resume_request(spec, before))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(path, error) from error


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    if (path / _OLD).exists() and not (path / STATE_FILE).exists():
        raise _of_version(1)
    try:
        with safe_open(path / STATE_FILE, "numpy") as file:
            document = json.loads(file.metadata()["state"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except OSError as error:
        raise StoreError(
            f"no state can be read: {error}", value=str(path), hint="give what Engine.save wrote"
        ) from error
    except (ValueError, SafetensorError, KeyError, TypeError) as error:
        raise _broken(path, error) from error
    if document.get("version") != _VERSION:
        raise _of_version(document.get("version"))
    return document, arrays


def _broken(path: Path, error: Exception) -> ModelFormatError:
    return ModelFormatError(f"the state in {path} is broken: {error}", value=str(path), hint="save it again")


def _of_version(version: object) -> ModelFormatError:
    message = f"the state has version {version!r} and this release reads version {_VERSION}"
    return ModelFormatError(message, value=version, limit=_VERSION, hint="save it again with this release")


def _check_model(engine: Engine, model: Mapping[str, Any], path: Path) -> None:
    spec = engine.spec
    if (model["architecture"], model["vocab_size"], model["name"]) != (spec.architecture, spec.vocab_size, spec.name):
        raise UnsupportedModelError(
            f"the state in {path} is of model {model['name']}, the engine has {spec.name}",
            value=model["name"],
            limit=spec.name,
            hint="load the model that the state was saved with",
        )
