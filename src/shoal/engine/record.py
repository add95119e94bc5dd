"""A log of everything a scheduler was told, and the replay that lets another decide on it again.

One JSON document per line: first the model's facts and the settings, then each command in order. A schedule depends on
nothing else, so a replay must plan every step the same; where it does not, the scheduler has changed since, and the
replay says at which step.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from shoal.config import EngineConfig
from shoal.core.commands import Command, Commit, Schedule
from shoal.core.scheduler import Scheduler
from shoal.errors import ModelFormatError, ShoalError, StoreError
from shoal.runners.plan import ModelSpec, SeqId, StepPlan
from shoal.wire import from_json, to_json

log = logging.getLogger(__name__)

_VERSION = 2
_KINDS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(Command)}


class Recorder:
    """Writes a scheduler's commands to a file, each before it is carried out. StoreError when it cannot be opened.

    One that cannot be written any more (a full disk) ends, and the engine goes on without.
    """

    def __init__(self, path: Path, spec: ModelSpec, config: EngineConfig) -> None:
        self._path = path
        try:
            self._file: TextIO = path.open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        self._write({"kind": "begin", "version": _VERSION, "spec": to_json(spec), "config": to_json(config)})

    def __call__(self, command: Command) -> None:
        """Take note of a command."""
        self._write({"kind": type(command).__name__, **to_json(command)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("%s; the engine goes on without", self._unwritable(error))
            self.close()

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(f"the record cannot be written: {error}", value=str(self._path), hint="give another path")

    def close(self) -> None:
        """Nothing follows."""
        with contextlib.suppress(OSError):  # what is in its buffer still does not fit
            self._file.close()


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step as it was planned then, and whether it is planned so now.

    `joined` and `left` are the sequences that entered and ended around this step.
    """

    now: float
    ms: float
    plan: StepPlan
    same: bool
    joined: tuple[SeqId, ...]
    left: tuple[tuple[SeqId, str], ...]


def replay(path: Path) -> Iterator[ReplayedStep]:
    """Run a log's schedule again, step by step.

    StoreError if it cannot be read, ModelFormatError if it is broken or of another version.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise StoreError(f"no record can be read: {error}", value=str(path), hint="give what `record` wrote") from error
    try:
        begin = json.loads(lines[0])
        version = begin.get("version", 1)
        if version != _VERSION:
            raise _of_version(path, version)
        config = from_json({**begin["config"], "record": None}, EngineConfig)
        yield from _replayed(Scheduler(from_json(begin["spec"], ModelSpec), config), map(_command, lines[1:]))
    except ModelFormatError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ShoalError) as error:
        raise ModelFormatError(f"the record {path} is broken: {error!r}", value=str(path)) from error


def _of_version(path: Path, version: object) -> ModelFormatError:
    message = f"the record {path} has version {version!r} and this release reads version {_VERSION}"
    return ModelFormatError(message, value=version, limit=_VERSION, hint="record it again with this release")


def _command(line: str) -> Any:
    entry = json.loads(line)
    return from_json(entry, _KINDS[entry.pop("kind")])


def _replayed(scheduler: Scheduler, commands: Iterable[Command]) -> Iterator[ReplayedStep]:
    known: set[SeqId] = set()
    now, planned = 0.0, None
    for command in commands:
        plan = scheduler.apply(command)
        if isinstance(command, Schedule):
            now, planned = command.now, plan
        elif isinstance(command, Commit):
            joined = tuple(item.seq_id for item in command.plan.sequences if item.seq_id not in known)
            known.update(joined)
            left = tuple((ended.seq.seq_id, str(ended.finish)) for ended in scheduler.take_ended())
            scheduler.take_released()
            yield ReplayedStep(now, command.ms, command.plan, planned == command.plan, joined, left)
