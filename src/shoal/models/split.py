"""GGUF models in several files: their names, and what their headers say of each other.

`X-00001-of-00003.gguf` is the first of three: it has the metadata, all have tensors, and each says in `split.no` which
it is (from 0), in `split.count` of how many, in `split.tensors.count` how many tensors all of them have together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ModelFormatError

_NAME = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)")


def part_names(name: str) -> list[str]:
    """The names of all parts of the model of which the file `name` is one; only `name` where it is whole."""
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['base']}-{number:05}-of-{count:05}{match['end']}" for number in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """The files of the model of which `path` is one, the first part first.

    Raises `ModelFormatError` where one is missing, or where the name counts what cannot be.
    """
    names = part_names(path.name)
    if path.name not in names:
        raise ModelFormatError(f"{path.name} is no part of {len(names)}", value=path.name, limit=len(names))
    missing = next((name for name in names if not (path.parent / name).is_file()), None)
    if missing is not None and len(names) > 1 and path.exists():
        raise ModelFormatError(
            f"{path} is part {names.index(path.name) + 1} of {len(names)}, and {missing} is not beside it",
            value=missing,
            limit=len(names),
            hint="fetch all parts into one directory",
        )
    return [path.parent / name for name in names]


def check_part(path: Path, number: int, count: int, metadata: Mapping[str, Any]) -> None:
    """Raise `ModelFormatError` unless the metadata of `path` says that it is part `number` (from 0) of `count`."""
    said = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if said == (count, number) or (count == 1 and said[0] in (0, 1) and said[1] == 0):
        return
    if count == 1 and isinstance(said[0], int) and isinstance(said[1], int):
        raise ModelFormatError(
            f"{path} is part {said[1] + 1} of {said[0]}",
            value=path.name,
            limit=f"a name as {path.stem}-{said[1] + 1:05}-of-{said[0]:05}.gguf",
            hint="give the parts the names they were published under, in one directory",
        )
    raise ModelFormatError(
        f"{path} is part {number + 1} of {count} by its name, and split.no {said[1]!r} of {said[0]!r} by its header",
        value=said,
        limit=(count, number),
        hint="the files are mixed up or damaged; fetch them again",
    )


def check_total(path: Path, found: int, metadata: Mapping[str, Any]) -> None:
    """Raise `ModelFormatError` unless all parts together have as many tensors as the first one says."""
    total = metadata.get("split.tensors.count", found)
    if total != found:
        raise ModelFormatError(
            f"{path}: the parts have {found:,} tensors, and split.tensors.count is {total!r}",
            value=found,
            limit=total,
            hint="the files are mixed up or damaged; fetch them again",
        )
