"""From a model's name to what an engine needs: a tokenizer, and a way to make the runner."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.config import EngineConfig
from shoal.engine.inputs import Codec
from shoal.errors import BackendError, ConfigError, UnsupportedModelError
from shoal.runners.base import Runner
from shoal.types import Message

if TYPE_CHECKING:
    from shoal.models import ModelFiles, Store
    from shoal.models.gguf import GgufModel
    from shoal.models.tokenizer import Tokenizer

RUNNERS = ("native", "openvino", "mlx")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model on disk whose tokenizer is loaded. `make_runner` loads the weights, on the engine's thread."""

    codec: Codec
    make_runner: Callable[[], Runner]


class ModelCodec:
    """A model's tokenizer and chat template as the engine's `Codec`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tokenizer.eos_ids
        self.token_bytes = tokenizer.token_bytes

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; special tokens spelt out in it are parsed."""
        return self.tokenizer.encode(text, add_special=add_special)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat in the model's own template."""
        return self.tokenizer.encode_chat(self.tokenizer.chat_template.render(messages))


def choose_runner(
    config: EngineConfig, files: ModelFiles | None = None, gguf: GgufModel | None = None
) -> tuple[str, str]:
    """The runner to use for a model (or, without `files`, for models this package knows) on this machine, and why.

    A caller that has parsed the GGUF already hands it in as `gguf` and saves the second parse.
    ConfigError for an unknown one or one that cannot do what the config asks, BackendError when it is not installed.
    """
    wanted = config.runner
    if wanted not in ("auto", *RUNNERS):
        known = ", ".join(("auto", *RUNNERS))
        raise ConfigError(f"runner is {wanted!r}", value=wanted, limit=known, hint=f"known are {known}")
    if wanted == "native" and config.precision != "auto":
        raise ConfigError(
            f"precision is {config.precision!r}", value=config.precision, limit="auto", hint="native has one precision"
        )
    if config.cache_limit is not None and wanted not in ("auto", "mlx"):
        raise ConfigError(
            "cache_limit is set", value=config.cache_limit, hint=f"{wanted} has no such cache: leave it out"
        )
    if wanted == "mlx" or (wanted == "auto" and on_apple_silicon()):
        return _choose_mlx(config, files, gguf)
    if wanted != "openvino":
        reason = _why_not_native(config, files, gguf)
        if reason is None:
            return "native", "kernels of our own for this CPU and model"
        if wanted == "native":
            message = f"the native runner cannot be used: {reason}"
            raise BackendError(message, value=reason, hint="use runner='openvino'")
        why = f"not native: {reason}"
    else:
        why = "asked for"
    if config.kv_precision != "auto":
        raise ConfigError(
            f"kv_precision is {config.kv_precision!r}, and the runner is openvino ({why})",
            value=config.kv_precision,
            limit="auto",
            hint="OpenVINO keeps KV in the precision it computes in; leave kv_precision at 'auto'",
        )
    if importlib.util.find_spec("openvino") is None:
        raise BackendError(
            f"openvino is not installed for {sys.executable}", value="openvino", hint="pip install openvino"
        )
    return "openvino", why


def on_apple_silicon() -> bool:
    """Whether this process runs natively on one of Apple's own processors."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _choose_mlx(config: EngineConfig, files: ModelFiles | None, gguf: GgufModel | None) -> tuple[str, str]:
    missing = [module for module in ("mlx", "mlx_lm") if importlib.util.find_spec(module) is None]
    if missing:
        raise BackendError(
            f"{' and '.join(missing)} not installed for {sys.executable}",
            value=missing,
            hint="pip install 'shoal[mlx]', or use runner='openvino'",
        )
    if config.threads is not None:
        raise ConfigError(
            f"threads is {config.threads}", value=config.threads, hint="MLX has no such setting: leave it out"
        )
    if files is not None and files.kind == "openvino":
        raise BackendError(
            f"{files.name} is an OpenVINO model", value=files.kind, hint="use runner='openvino', or other files of it"
        )
    if gguf is not None:
        reason = import_mlx("gguf").refusal(gguf)
        if reason is not None:
            raise UnsupportedModelError(
                f"the MLX runner does not take {gguf.path}: {reason}", value=reason, hint="use runner='openvino'"
            )
    return "mlx", "Apple silicon" if config.runner == "auto" else "asked for"


def import_mlx(module: str) -> Any:
    """A module of the MLX runner. `BackendError` when MLX is not installed, or does not run on this machine."""
    try:
        return importlib.import_module(f"shoal.runners.mlx.{module}")
    except ImportError as error:
        raise BackendError(f"MLX cannot be imported ({error})", hint="pip install 'shoal[mlx]'") from error


def _why_not_native(config: EngineConfig, files: ModelFiles | None, gguf: GgufModel | None) -> str | None:
    from shoal.runners.native.core import load_core
    from shoal.runners.native.runner import supports

    if config.precision != "auto":
        return f"precision {config.precision} was asked for"
    if files is not None:
        return supports(files, gguf)
    try:
        load_core()
    except BackendError as error:
        return error.message
    return None


def open_model(model: str, config: EngineConfig, store: Store | None = None) -> OpenedModel:
    """Find a model, fetching it if need be, and load its tokenizer. Raises any `ModelError`, `BackendError`."""
    from shoal.models import Store, load_tokenizer

    store = store or Store()
    files = store.resolve(model)
    gguf = None
    if files.kind == "gguf":  # parsed once, for the choice and for the tokenizer
        from shoal.models.gguf import read_gguf

        gguf = read_gguf(files.path)
    name, _ = choose_runner(config, files, gguf)  # what cannot run is refused before anything is loaded
    return OpenedModel(ModelCodec(load_tokenizer(files, gguf)), partial(make_runner, files, config, store, name))


def make_runner(files: ModelFiles, config: EngineConfig, store: Store, name: str | None = None) -> Runner:
    """Load a model's weights into the runner `name`, or the one that `choose_runner` takes for it."""
    kv_bytes = config.bytes_of("kv_memory")
    assert kv_bytes is not None
    name = name or choose_runner(config, files)[0]
    memory_bytes = config.bytes_of("memory")
    cache_dir = store.cache_dir(files.key)
    if name == "native":
        from shoal.runners.native.runner import NativeRunner

        return NativeRunner.load(
            files,
            kv_bytes=kv_bytes,
            memory_bytes=memory_bytes,
            cache_dir=cache_dir,
            threads=config.threads,
            pin_threads=config.pin_threads,
            kv_precision=config.kv_precision,
            max_step_tokens=config.max_step_tokens,
        )
    if name == "mlx":
        runner: Runner = import_mlx("runner").MLXRunner.load(
            files,
            kv_bytes=kv_bytes,
            memory_bytes=memory_bytes,
            precision=config.precision,
            max_step_tokens=config.max_step_tokens,
            cache_limit=config.bytes_of("cache_limit"),
        )
        return runner
    from shoal.runners.openvino.runner import OpenVINORunner

    return OpenVINORunner.load(
        files.path,
        kv_bytes=kv_bytes,
        memory_bytes=memory_bytes,
        cache_dir=cache_dir,
        threads=config.threads,
        pin_threads=config.pin_threads,
        precision=config.precision,
        max_step_tokens=config.max_step_tokens,
    )
