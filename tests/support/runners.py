"""Runners of each kind, as the contract suite and others build them. A missing model is a ModelNotFoundError."""

from __future__ import annotations

from functools import partial

from shoal.config import EngineConfig
from shoal.engine.loading import ModelCodec, make_runner
from shoal.models import Store, load_tokenizer
from shoal.runners.base import Runner

MODEL = "smollm2-135m"


def real_runner(kind: str, **settings: object) -> Runner:
    """The default model on one backend; it must be in the store already."""
    store = Store()
    config = EngineConfig.of(**{"runner": kind, "kv_memory": "128MiB", **settings})
    return make_runner(store.resolve(MODEL, pull=False), config, store)


def real_codec() -> ModelCodec:
    """The default model's tokenizer."""
    return ModelCodec(load_tokenizer(Store().resolve(MODEL, pull=False)))


openvino_runner = partial(real_runner, "openvino")
