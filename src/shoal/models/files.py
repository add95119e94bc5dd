"""What a model on disk consists of, wherever it lies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from shoal.errors import ModelFormatError
from shoal.models.split import part_paths

Kind: TypeAlias = Literal["gguf", "openvino", "safetensors"]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Hears of work on a model that takes long: what is done ("fetch", "pack"), bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk, checked to be complete. `path` is the (first) file of a GGUF, the directory of any other kind.

    `key` changes whenever the files do; start the names of derived caches with it.
    """

    name: str
    kind: Kind
    path: Path
    key: str

    @property
    def weights(self) -> list[Path]:
        """The files that hold the weights."""
        if self.kind == "gguf":
            return part_paths(self.path)
        return sorted(self.path.glob("*.bin" if self.kind == "openvino" else "*.safetensors"))


def existing_path(name: str) -> Path | None:
    """The path that `name` is, when there is something under it."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # too long for a file name; "~nobody"
        return None


def local_files(name: str, path: Path) -> ModelFiles:
    """The model at `path`: a .gguf file or a part of one, or a directory with an OpenVINO IR or safetensors.

    Raises `ModelFormatError` when it is neither, or when files it needs are missing.
    """
    if path.is_file():
        path = path.absolute()  # not resolved: what a link is called says which part it is
        if path.suffix != ".gguf":
            raise ModelFormatError(f"{path} is not a .gguf file", value=str(path), hint="give a .gguf or a directory")
        parts = part_paths(path)
        return ModelFiles(name, "gguf", parts[0], _path_key(parts[0].resolve(), parts))
    path = path.resolve()
    kind: Kind = "openvino" if (path / "openvino_model.xml").exists() else "safetensors"
    weights = sorted(path.glob("*.safetensors"))
    if kind == "safetensors" and not weights:
        raise ModelFormatError(
            f"{path} holds no model", value=str(path), hint="it needs openvino_model.xml and .bin, or *.safetensors"
        )
    needed = ["openvino_model.bin", "tokenizer.json"] if kind == "openvino" else ["config.json", "tokenizer.json"]
    missing = [file for file in needed if not (path / file).is_file()]
    if missing:
        raise ModelFormatError(f"{path} lacks {', '.join(missing)}", value=missing, limit=needed, hint="fetch it again")
    main = [path / "openvino_model.xml", path / "openvino_model.bin"] if kind == "openvino" else weights
    return ModelFiles(name, kind, path, _path_key(path, main))


def _path_key(path: Path, files: list[Path]) -> str:
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(path), stats)).encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]", "-", path.stem).lstrip(".") or "model"
    return f"{stem[:80]}-{digest}"
