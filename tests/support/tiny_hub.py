"""Directories as the hub has them, tiny and random: numbers drawn by the names of tensors, in numpy alone.

What a family's directory holds (config.json, names, shapes) was written by `transformers`, and lies in
`tests/data/families`; its numbers are drawn again here, the same ones everywhere.
"""

from __future__ import annotations

import copy
import json
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

HUB: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/families/hub.json").read_text())
"""By the name of a tiny model: its config, its tensors in a short form, and what `transformers` gave."""


def unfolded(name: str) -> dict[str, Any]:
    """What `write_directory` takes, from the short form of the data."""
    tensors = {}
    for pattern, shape, axes in HUB[name]["tensors"]:
        for numbers in product(*axes):
            left = list(numbers)
            full = ".".join(str(left.pop(0)) if part == "#" else part for part in pattern.split("."))
            tensors[full] = shape
    return {"config": copy.deepcopy(HUB[name]["config"]), "tensors": tensors}  # for the test to change


def drawn(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The numbers of the tensor `name`."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    noise = rng.standard_normal(shape)
    if name.endswith("A_log"):
        values = rng.uniform(-3, 1, shape)
    elif name.endswith("layer_scalar"):
        values = np.full(shape, 0.9)
    elif name.endswith("router.scale"):
        values = 8 + noise
    elif name.endswith(("sinks", "per_expert_scale")):
        values = 1 + 0.3 * noise
    elif "conv" in name and len(shape) == 3:
        values = 0.5 * noise
    elif len(shape) == 1:
        values = (0.5 if "norm" in name else 0) + 0.3 * noise
    else:
        values = noise * (1.5 / np.sqrt(shape[-1]))
    return values.astype(np.float32)


def write_directory(path: Path, about: dict[str, Any], shards: int = 1) -> Path:
    """A directory with `about`'s config and tensors, in `shards` files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(about["config"]))
    (path / "tokenizer.json").write_text("{}")
    tensors = {name: drawn(name, tuple(shape)) for name, shape in about["tensors"].items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, path / file)
        where |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path
