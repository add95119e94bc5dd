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

    A caller that has parsed the GGUF already hands it in as `gguf` and saves the second parse. A GGUF may hold a
    vocabulary only, or a model that nothing here runs. Raises `ModelFormatError` or `UnsupportedModelError`.
    """
    from shoal.models.gguf import read_metadata
    from shoal.models.tokenizer_json import tokenizer_from_directory
    from shoal.models.vocabulary import tokenizer_from_metadata

    if files.kind == "gguf":
        metadata = gguf.metadata if gguf is not None else read_metadata(files.path)
        return tokenizer_from_metadata(metadata, files.path)
    return tokenizer_from_directory(files.path)
