"""From a model's name to what an engine needs: a tokenizer, and a way to make the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shoal.config import EngineConfig
from shoal.engine.inputs import Codec
from shoal.runners.base import Runner
from shoal.runners.registry import LocalModel, choose_runner, load_runner
from shoal.types import Message

if TYPE_CHECKING:
    from shoal.models import ModelFiles, Store
    from shoal.models.files import Progress
    from shoal.models.tokenizer import Tokenizer


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


def open_model(
    model: str, config: EngineConfig, store: Store | None = None, progress: Progress | None = None
) -> OpenedModel:
    """Find a model, fetching it if need be, and load its tokenizer; `progress` hears of what takes long.

    Raises any `ModelError`, `BackendError`.
    """
    from shoal.models import Store, load_tokenizer

    store = store or Store()
    files = store.resolve(model, progress=progress)
    local = LocalModel.read(files)  # parsed once, for the choice, the tokenizer and the weights
    name, _ = choose_runner(config, local)  # what cannot run is refused before anything is loaded
    cache_dir = store.cache_dir(files.key)
    return OpenedModel(
        ModelCodec(load_tokenizer(files, local.gguf)), partial(load_runner, name, local, config, cache_dir, progress)
    )


def make_runner(files: ModelFiles, config: EngineConfig, store: Store) -> Runner:
    """Choose a runner for a model, and load its weights into it. Raises as `choose_runner` and `load_runner`."""
    local = LocalModel.read(files)
    return load_runner(choose_runner(config, local)[0], local, config, store.cache_dir(files.key))
