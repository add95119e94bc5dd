"""The choice of a runner: the first that takes the model and honours what was set, or an error that says why none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from shoal.config import EngineConfig
from shoal.engine.loading import make_runner
from shoal.errors import BackendError, ConfigError, UnsupportedModelError
from shoal.models import Store
from shoal.models.files import ModelFiles, Progress
from shoal.runners import registry
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from shoal.runners.registry import LocalModel, RunnerCard, backend, choose_runner, describe_runner

MODEL = LocalModel(ModelFiles("m", "safetensors", Path("m"), "m-1"))


class Toy(ModuleType):
    """A backend, as a folder of `runners/` would bring one: over the toy runner."""

    WHY = "it is a toy"
    INSTALL = "buy one"
    HONOURS = ("threads",)
    PRECISIONS = ("q8_0",)
    OPTIONS = ("colour",)

    def __init__(self, name: str) -> None:
        super().__init__(f"tests.{name}")
        self.machine: str | None = None
        self.model: str | None = None

    def refuses(self, model: LocalModel | None, config: EngineConfig) -> str | None:
        return self.machine or (self.model if model is not None else None)

    def load(
        self, model: LocalModel, config: EngineConfig, cache_dir: Path, progress: Progress | None = None
    ) -> Runner:
        assert cache_dir.is_dir()
        return FakeRunner(num_blocks=len(str(config.runner_options.get("colour", "red"))))

    def describe(self, model: LocalModel | None, config: EngineConfig, cache_dir: Path | None) -> RunnerCard:
        return RunnerCard((f"{config.threads} wheels",), "wood", "it floats")


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> tuple[Toy, Toy]:
    """Two backends in the registry, and no other."""
    first, second = Toy("first"), Toy("second")
    second.HONOURS = ("kv_precision",)
    second.OPTIONS = ("size",)
    for toy in (first, second):
        monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setattr(registry, "RUNNERS", {"first": "tests.first", "second": "tests.second"})
    return first, second


def test_a_backend_is_one_module_and_one_line(toys: tuple[Toy, Toy], tmp_path: Path) -> None:
    config = EngineConfig(runner_options={"colour": "green"}, threads=3)
    assert choose_runner(config, MODEL) == ("first", "it is a toy")
    assert describe_runner("first", None, config).devices == ("3 wheels",)
    made = make_runner(MODEL.files, config, Store(tmp_path))
    assert made.spec.num_blocks == len("green")


def test_auto_takes_the_first_that_can_and_says_why_not_the_others(toys: tuple[Toy, Toy]) -> None:
    first, second = toys
    first.model = "three layers too many"
    assert choose_runner(EngineConfig()) == ("first", "it is a toy")
    assert choose_runner(EngineConfig(), MODEL) == ("second", "it is a toy; not first: three layers too many")
    assert choose_runner(EngineConfig(kv_precision="u8"))[0] == "second"
    assert choose_runner(EngineConfig(runner_options={"size": 3}))[0] == "second"
    second.model = "too wide"
    with pytest.raises(UnsupportedModelError, match="not first: three layers too many; not second: too wide"):
        choose_runner(EngineConfig(), MODEL)
    first.machine = second.machine = "no hands"
    with pytest.raises(BackendError, match=r"not first: no hands.*buy one"):
        choose_runner(EngineConfig(), MODEL)


def test_a_setting_that_no_usable_runner_honours_is_an_error(toys: tuple[Toy, Toy]) -> None:
    toys[0].machine = "no hands"
    with pytest.raises(ConfigError, match="not first: no hands; not second: threads is 2"):
        choose_runner(EngineConfig(threads=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "first", "kv_precision": "u8"}, r"kv_precision is 'u8', and the runner is first \(asked for\)"),
        ({"runner": "second", "runner_options": {"colour": "red"}}, "colour is 'red', and the runner is second"),
        ({"runner": "secnd"}, "did you mean second"),
        ({"runner_options": {"color": "red"}}, "unknown runner option 'color': did you mean colour"),
    ],
)
def test_what_the_chosen_runner_does_not_read_is_refused_by_name(
    toys: tuple[Toy, Toy], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_runner(EngineConfig.of(**settings), MODEL)


def test_a_runner_that_was_asked_for_is_never_exchanged(toys: tuple[Toy, Toy]) -> None:
    first, _ = toys
    first.model = "three layers too many"
    with pytest.raises(
        UnsupportedModelError, match="first runner cannot be used for m: three layers too many: use runner='second'"
    ):
        choose_runner(EngineConfig(runner="first"), MODEL)
    first.machine = "no hands"
    with pytest.raises(BackendError, match="first runner cannot be used: no hands: buy one"):
        choose_runner(EngineConfig(runner="first"), MODEL)


def test_every_registered_backend_has_what_the_protocol_lists() -> None:
    listed = {name for name in dir(registry.Backend) if not name.startswith("_")} | set(
        registry.Backend.__annotations__
    )
    for name in registry.RUNNERS:
        assert not {what for what in listed if not hasattr(backend(name), what)}
        assert set(backend(name).HONOURS) <= set(registry.SETTINGS)
