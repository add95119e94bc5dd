"""Files whose keys lie, by the thousand: each is described or a `ModelError`, and nothing is made by what they say."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from shoal.errors import ModelError, ModelFormatError
from shoal.models.families import describe
from shoal.models.gguf import GgufModel, read_gguf
from shoal.models.needs import needs
from shoal.models.safetensors import SafetensorsModel, read_safetensors
from shoal.runners.native import describe as describe_native
from tests.support.tiny_hub import unfolded, write_directory
from tests.support.tiny_models import write_model

LIES: tuple[Any, ...] = (0, 1, -1, 3, 2**30, 2**31, 2**63, 1e30, 1e-300, float("nan"), float("inf"), 0.5, "x", True)
GGUF_LIES = (*LIES, (), ("a", "b"), np.array([]), np.array([1, 2**30] * 50), np.array([-1] * 64))
HUB_LIES = (*LIES, 10**400, None, [], ["a"], {}, {"a": 1}, [1, 2**30] * 50, [None] * 64, [{}] * 64)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No more than 2 GiB beside what the process has: a size that is believed fails here, and not the machine."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (held + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def take(model: GgufModel | SafetensorsModel) -> None:
    """All that is done with a description before a weight is read."""
    try:
        decoder = describe(model)
        needs(decoder, 2)
        if describe_native.refuses(decoder) is None:
            list(describe_native.tensors_of(decoder))
    except ModelError:
        pass


@pytest.mark.parametrize("name", ["mixtral", "mistral3", "gemma4-small", "gpt-oss", "granitehybrid", "qwen35moe"])
def test_metadata_that_lies_is_a_model_error(name: str, tmp_path: Path) -> None:
    model = read_gguf(write_model(tmp_path / "m.gguf", name))
    keys = [key for key in model.metadata if key.startswith(model.architecture)]
    for key, lie in random.Random(name).sample([(key, lie) for key in keys for lie in GGUF_LIES], 100):
        take(replace(model, metadata={**model.metadata, key: lie}))


@pytest.mark.parametrize("name", ["llama-3.1", "gpt-oss", "phi3-long", "lfm2", "glm4", "gemma4", "nemotron_h"])
def test_a_config_that_lies_is_a_model_error(name: str, tmp_path: Path) -> None:
    model = read_safetensors(write_directory(tmp_path / "m", unfolded(name)))
    rope = model.config.get("rope_parameters") or {}
    lies = [(key, lie) for key in model.config for lie in HUB_LIES]
    lies += [("rope_parameters", {**rope, key: lie}) for key in rope for lie in HUB_LIES]
    for key, lie in random.Random(name).sample(lies, 100):
        take(replace(model, config=MappingProxyType({**model.config, key: lie})))


@pytest.mark.parametrize(
    ("name", "key", "lie"),
    [
        ("mistral3", "rope.freq_base", 1),
        ("mistral3", "rope.scaling.yarn_beta_fast", -1),
        ("llama", "attention.layer_norm_rms_epsilon", ()),
        ("mixtral", "expert_count", np.array([])),
        ("mixtral", "expert_count", 2**30),
        ("llama", "rope.dimension_count", 2**30),
        ("qwen35moe", "ssm.state_size", 2**30),
        ("granitehybrid", "rope.scaling.finetuned", np.array([])),
    ],
)
def test_what_once_was_believed(name: str, key: str, lie: Any, tmp_path: Path) -> None:
    model = read_gguf(write_model(tmp_path / "m.gguf", name))
    with pytest.raises(ModelFormatError):
        describe(replace(model, metadata={**model.metadata, f"{model.architecture}.{key}": lie}))


@pytest.mark.parametrize(
    ("name", "lies"),
    [
        ("lfm2", {"block_multiple_of": 0}),
        ("lfm2", {"intermediate_size": float("inf")}),
        ("gpt-oss", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": "x"}}),
        ("phi3-long", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": {}}}),
    ],
)
def test_a_config_that_once_was_believed(name: str, lies: dict[str, Any], tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", unfolded(name))
    (path / "config.json").write_text(json.dumps({**unfolded(name)["config"], **lies}))
    with pytest.raises(ModelFormatError):
        describe(read_safetensors(path))
