"""Which runners there are, in order of preference, and which of them takes a model on this machine.

One more backend is one more folder whose `backend.py` has what `Backend` lists, and one more line in `RUNNERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.config import EngineConfig
from shoal.errors import BackendError, ConfigError, UnsupportedModelError
from shoal.models.decoder import Decoder
from shoal.models.files import ModelFiles, Progress
from shoal.models.gguf import GgufModel, read_gguf
from shoal.names import did_you_mean
from shoal.runners.base import Runner

RUNNERS = {
    "mlx": "shoal.runners.mlx.backend",
    "cuda": "shoal.runners.cuda.backend",
    "native": "shoal.runners.native.backend",
    "openvino": "shoal.runners.openvino.backend",
}
"""Name to module, the preferred first. A module is imported when it is asked, its library when it loads a model."""

SETTINGS = ("threads", "pin_threads", "kv_precision", "kv_host", "kv_cache")
"""Settings of `EngineConfig` that only some runners honour; a runner that was chosen and does not, refuses them."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: its files and, of a GGUF file, what its header says (parsed once, no weight is read)."""

    files: ModelFiles
    gguf: GgufModel | None = None

    @classmethod
    def read(cls, files: ModelFiles) -> LocalModel:
        """Parse what has a header. Raises the `ModelError` that says what is wrong with it."""
        return cls(files, read_gguf(files.path) if files.kind == "gguf" else None)

    def decoder(self) -> Decoder:
        """The description of a GGUF file or of a directory with safetensors; looks at no weight.

        Raises `UnsupportedModelError` for other files and for a family without a page, `ModelFormatError` for damage.
        """
        from shoal.models import families
        from shoal.models.safetensors import read_safetensors

        if self.gguf is not None:
            return families.describe(self.gguf)
        if self.files.kind != "safetensors":
            raise UnsupportedModelError(f"{self.files.name} has files of kind {self.files.kind}", value=self.files.kind)
        return families.describe(read_safetensors(self.files.path))

    @property
    def file_bytes(self) -> int:
        """Bytes of weights as the files hold them."""
        return sum(file.stat().st_size for file in self.files.weights)


@dataclass(frozen=True, slots=True)
class RunnerCard:
    """What a runner would be on this machine, for people: `shoal doctor` prints it.

    `precision` is what "auto" comes to, and `why`. `kv` are the precisions of KV it has. `isa` are instruction sets or
    capabilities that it uses here, the best first. `file_bytes` are the weights in the model's files, `packed_bytes` in
    the form that is computed with: None without a model, or where that form is not made yet, or equal by nature.
    """

    devices: tuple[str, ...]
    precision: str
    why: str
    kv: tuple[str, ...] = ()
    isa: tuple[str, ...] = ()
    file_bytes: int | None = None
    packed_bytes: int | None = None


class Backend(Protocol):
    """What the `backend.py` of a folder of `runners/` offers. Importing it imports no library of the backend.

    `WHY` tells why it is chosen where nothing was asked for; `INSTALL` how to get it. `HONOURS` are those of `SETTINGS`
    that it honours, `PRECISIONS` the values of `EngineConfig.precision` that it has beside "auto", `OPTIONS` the names
    that it reads in `EngineConfig.runner_options`.
    """

    WHY: str
    INSTALL: str
    HONOURS: Collection[str]
    PRECISIONS: Collection[str]
    OPTIONS: Collection[str]

    def refuses(self, model: LocalModel | None, config: EngineConfig) -> str | None:
        """Why this machine (with None) or this model cannot have this runner; None when it can. Looks at no weight."""
        ...

    def load(
        self, model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None
    ) -> Runner:
        """Load the weights, on the calling thread. `cache_dir` is for forms derived from them.

        A backend that makes such a form tells `progress` of it, now and then, on the same thread.
        """
        ...

    def describe(self, model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
        """What it is here, for a model or for any; only called where `refuses` gives None."""
        ...


def backend(name: str) -> Backend:
    """What is registered under a name of `RUNNERS`."""
    return cast(Backend, importlib.import_module(RUNNERS[name]))


def choose_runner(config: EngineConfig, model: LocalModel | None = None) -> tuple[str, str]:
    """The runner to use for a model (or, without one, for models that any runner knows) on this machine, and why.

    "auto" is the first that honours every setting and takes the model. `ConfigError` for an unknown runner or option
    and for a setting that no runner left honours, `BackendError` when a runner cannot run here, `UnsupportedModelError`
    when it could and does not take the model.
    """
    _check_names(config)
    if config.runner != "auto":
        _check_asked(config.runner, config, model)
        return config.runner, "asked for"
    refused: dict[str, str] = {}
    not_honoured = False
    for name in RUNNERS:
        setting = _not_honoured(name, config)
        reason = f"{setting} is {_value(config, setting)!r}" if setting else backend(name).refuses(model, config)
        if reason is None:
            return name, "; ".join([backend(name).WHY, *_told(refused)])
        refused[name] = reason
        not_honoured = not_honoured or setting is not None
    message = f"no runner can be used: {'; '.join(_told(refused))}"
    if not_honoured:
        raise ConfigError(message, value=refused, hint="leave the setting out")
    if model is not None and any(backend(name).refuses(None, config) is None for name in RUNNERS):
        raise UnsupportedModelError(message, value=refused, hint="use other files of the model, or another model")
    raise BackendError(message, value=refused, hint=" or ".join(backend(name).INSTALL for name in RUNNERS))


def load_runner(
    name: str, model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None
) -> Runner:
    """Load a model's weights into the runner `name`. Raises `ModelError`s, `BackendError`, `ConfigError`."""
    return backend(name).load(model, config, cache_dir, progress)


def describe_runner(
    name: str, model: LocalModel | None, config: EngineConfig, cache_dir: Path | None = None
) -> RunnerCard:
    """The card of a runner that `choose_runner` gave."""
    return backend(name).describe(model, config, cache_dir)


def _check_names(config: EngineConfig) -> None:
    """`ConfigError` for a runner that is not registered, or an option that none of them reads."""
    if config.runner not in ("auto", *RUNNERS):
        known = ("auto", *RUNNERS)
        raise ConfigError(
            f"runner is {config.runner!r}", value=config.runner, limit=known, hint=did_you_mean(config.runner, known)
        )
    options = sorted({option for name in RUNNERS for option in backend(name).OPTIONS})
    for option in config.runner_options:
        if option not in options:
            message = f"unknown runner option {option!r}"
            raise ConfigError(message, value=option, limit=options, hint=did_you_mean(option, options))


def _check_asked(name: str, config: EngineConfig, model: LocalModel | None) -> None:
    """Raise what keeps the runner that was asked for from being used."""
    asked = backend(name)
    setting = _not_honoured(name, config)
    if setting is not None:
        value = _value(config, setting)
        has = "no such setting" if setting != "precision" else f"{', '.join(['auto', *asked.PRECISIONS])}"
        hint = f"{name} has {has}: leave it out, or leave runner at 'auto'"
        raise ConfigError(f"{setting} is {value!r}, and the runner is {name} (asked for)", value=value, hint=hint)
    reason = asked.refuses(None, config)
    if reason is not None:
        raise BackendError(f"the {name} runner cannot be used: {reason}", value=reason, hint=asked.INSTALL)
    reason = asked.refuses(model, config) if model is not None else None
    if reason is not None and model is not None:
        able = [o for o in RUNNERS if _not_honoured(o, config) is None and backend(o).refuses(model, config) is None]
        hint = (
            " or ".join(f"use runner={other!r}" for other in able) or "use other files of the model, or another model"
        )
        message = f"the {name} runner cannot be used for {model.files.name}: {reason}"
        raise UnsupportedModelError(message, value=reason, hint=hint)


def _not_honoured(name: str, config: EngineConfig) -> str | None:
    """A setting or option that was given and that this runner does not read, or None."""
    asked = backend(name)
    given = [setting for setting in SETTINGS if getattr(config, setting) not in (getattr(_DEFAULTS, setting), "auto")]
    left = [setting for setting in given if setting not in asked.HONOURS]
    if config.precision not in ("auto", *asked.PRECISIONS):
        left.append("precision")
    return next(iter([*left, *(option for option in config.runner_options if option not in asked.OPTIONS)]), None)


def _value(config: EngineConfig, setting: str) -> Any:
    return config.runner_options[setting] if setting in config.runner_options else getattr(config, setting)


def _told(refused: dict[str, str]) -> list[str]:
    return [f"not {name}: {reason}" for name, reason in refused.items()]


_DEFAULTS = EngineConfig()
