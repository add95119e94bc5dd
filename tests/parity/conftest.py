"""The default model, its tokens and a runner over it, made once for all parity tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shoal.bench.workloads import TEXT
from shoal.errors import ModelNotFoundError
from shoal.models import ModelFiles, Store, load_tokenizer
from shoal.runners.openvino.runner import OpenVINORunner, Precision

LoadRunner = Callable[[Precision], OpenVINORunner]


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    try:
        return Store().resolve("smollm2-135m", pull=False)
    except ModelNotFoundError as error:
        pytest.skip(f"no model: {error}")


@pytest.fixture(scope="session")
def text_tokens(model_files: ModelFiles) -> list[int]:
    """The first 512 tokens of the text that fidelity is measured on."""
    text = TEXT.read_text("utf-8")
    return load_tokenizer(model_files).encode(text, add_special=False)[:512]


@pytest.fixture(scope="session")
def load_runner(model_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadRunner]:
    """The default model at a precision; converted once, one runner per precision."""
    cache, made = tmp_path_factory.mktemp("converted"), dict[Precision, OpenVINORunner]()

    def load(precision: Precision) -> OpenVINORunner:
        if precision not in made:
            made[precision] = OpenVINORunner.load(
                model_files.path, kv_bytes=512 << 20, cache_dir=cache, precision=precision
            )
        return made[precision]

    yield load
    for runner in made.values():
        runner.close()
