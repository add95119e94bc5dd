"""Models on disk: the store, GGUF metadata, tokenizer, chat template.

files = load_model_files("smollm2-135m")
tokenizer = load_tokenizer(files)
ids = tokenizer.encode_chat(tokenizer.chat_template.render([{"role": "user", "content": "Hello"}]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.models.files import ModelFiles
from shoal.models.store import DEFAULT_MODEL, Store, StoredModel

if TYPE_CHECKING:
    from shoal.models.gguf import GgufModel
    from shoal.models.tokenizer import Tokenizer

__all__ = ["DEFAULT_MODEL", "ModelFiles", "Store", "StoredModel", "load_model_files", "load_tokenizer"]


def load_model_files(name: str = DEFAULT_MODEL, *, pull: bool = True) -> ModelFiles:
    """Files of the model `name` (a store name, a path or a hub id), fetched into the default store if need be.

    Raises `ModelNotFoundError`, `DownloadError`, `StoreError` or `ModelFormatError`.
    """
    return Store().resolve(name, pull)


def load_tokenizer(files: ModelFiles, gguf: GgufModel | None = None) -> Tokenizer:
    """The tokenizer of `files`, its chat template as `.chat_template`.

    A caller that has parsed the GGUF already hands it in as `gguf` and saves the second parse. Raises
    `ModelFormatError` or `UnsupportedModelError`.
    """
    from shoal.models.gguf import read_gguf
    from shoal.models.tokenizer import tokenizer_from_directory, tokenizer_from_gguf

    if files.kind == "gguf":
        return tokenizer_from_gguf(gguf if gguf is not None else read_gguf(files.path))
    return tokenizer_from_directory(files.path)
