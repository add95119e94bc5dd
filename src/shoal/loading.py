"""From a model's name to what an engine needs: a tokenizer, and a way to make the runner."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shoal.config import EngineConfig
from shoal.errors import BackendError, ConfigError
from shoal.intake import Codec
from shoal.runners.base import Runner
from shoal.types import Message

if TYPE_CHECKING:
    from shoal.models import ModelFiles, Store
    from shoal.models.tokenizer import Tokenizer

RUNNERS = ("openvino",)


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


def choose_runner(wanted: str) -> tuple[str, str]:
    """The runner to use on this machine, and why. ConfigError for an unknown one, BackendError if not installed."""
    if wanted == "auto":
        name, why = "openvino", f"the backend for {platform.machine()} CPUs"
    elif wanted in RUNNERS:
        name, why = wanted, "asked for"
    else:
        known = ", ".join(("auto", *RUNNERS))
        raise ConfigError(f"runner is {wanted!r}", value=wanted, limit=known, hint=f"known are {known}")
    if importlib.util.find_spec(name) is None:
        hint = f"pip install 'shoal[{name}]'"
        raise BackendError(f"{name} is not installed for {sys.executable}", value=name, hint=hint)
    return name, why


def open_model(model: str, config: EngineConfig, store: Store | None = None) -> OpenedModel:
    """Find a model, fetching it if need be, and load its tokenizer. Raises any `ModelError`, `BackendError`."""
    choose_runner(config.runner)
    from shoal.models import Store, load_tokenizer

    store = store or Store()
    files = store.resolve(model)
    return OpenedModel(ModelCodec(load_tokenizer(files)), partial(make_runner, files, config, store))


def make_runner(files: ModelFiles, config: EngineConfig, store: Store) -> Runner:
    """Load a model's weights into the runner that the config asks for."""
    from shoal.runners.openvino.runner import OpenVINORunner

    kv_bytes = config.bytes_of("kv_memory")
    assert kv_bytes is not None
    return OpenVINORunner.load(
        files.path,
        kv_bytes=kv_bytes,
        memory_bytes=config.bytes_of("memory"),
        cache_dir=store.cache_dir(files.key),
        threads=config.threads,
        precision=config.precision,  # type: ignore[arg-type] - checked by the config
        max_step_tokens=config.max_step_tokens,
    )
