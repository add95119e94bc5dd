"""A cluster's file: what the toy model takes beside an engine's settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from shoal.cluster.config import read_config
from shoal.cluster.door import codec_of, load_replica
from shoal.config import EngineConfig
from shoal.errors import ConfigError


def test_a_file_says_how_slow_the_toy_is(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: toy\nengine: {max_batch: 4, step_s: 0.01, fail_every: 100}")
    config = read_config(file)
    assert config.engine_config() == EngineConfig(max_batch=4)
    assert codec_of(config).encode("a", add_special=False) == [97]
    with load_replica(config.model, config.engine) as engine:
        assert engine.config.max_batch == 4


@pytest.mark.parametrize(("model", "value"), [("smollm2-135m", "0.01"), ("toy", "-1"), ("toy", "soon")])
def test_what_is_no_such_setting_is_refused_by_name(model: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {model}\nengine: {{step_s: {value}}}")
    with pytest.raises(ConfigError, match="step_s"):
        read_config(file)
