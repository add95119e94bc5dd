"""mlx-lm's batch generator, over the model as this package's MLX runner reads it from the GGUF."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, ClassVar

import numpy as np

from shoal.bench.systems.base import Logits, Measured, Setup, drive
from shoal.bench.timeline import RunTimes
from shoal.bench.workloads import Job
from shoal.models.files import local_files

_READER = "shoal.runners.mlx"


class MlxLm:
    """`mlx_lm.generate.BatchGenerator`, stepped from outside; everything on the one thread that loaded the model."""

    VARIANTS: ClassVar[dict[str, str]] = {"": "batch generator"}

    def __init__(self, source: Measured) -> None:
        self._source = source
        self._generate = importlib.import_module("mlx_lm.generate")
        files = local_files(source.model, source.path)
        self._model: Any = importlib.import_module(f"{_READER}.loading").read_model(files, "auto").model
        self._streams = 1
        self._generator: Any = None
        self._numbers: dict[int, int] = {}

    @staticmethod
    def missing() -> str | None:
        """Whether mlx-lm and the runner that reads files for it are here."""
        if importlib.util.find_spec("mlx_lm") is None:
            return "mlx-lm is not installed"
        return None if importlib.util.find_spec(_READER) else "this version has no MLX runner"

    @property
    def pid(self) -> int:
        """It runs in this process."""
        return os.getpid()

    def prepare(self, setup: Setup) -> None:
        """Note the streams; there is nothing to allocate."""
        self._streams = setup.streams

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {
            "version": f"mlx-lm {metadata.version('mlx-lm')}, mlx {metadata.version('mlx')}",
            "device": str(importlib.import_module("mlx.core").default_device()),
            "completion_batch_size": "the level's streams",
            "others": "its defaults",
        }

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Drive the generator."""
        return drive(self, jobs)

    def drop(self) -> None:
        """A generator of its own for each run."""
        self._numbers = {}
        self._generator = self._generate.BatchGenerator(self._model, completion_batch_size=self._streams)

    def add(self, number: int, job: Job) -> None:
        """Insert a prompt; without stop tokens it writes all it may."""
        (uid,) = self._generator.insert([list(job.prompt)], [job.max_tokens])
        self._numbers[uid] = number

    def step(self) -> Iterator[tuple[int, list[int]]]:
        """One step of its scheduler."""
        for response in self._generator.next_generated():
            yield self._numbers[response.uid], [int(response.token)]

    def logits(self, tokens: Sequence[int]) -> Logits:
        """One pass over all tokens."""
        mx = importlib.import_module("mlx.core")
        rows = self._model(mx.array([list(tokens)]))[0].astype(mx.float32)
        found: Logits = np.array(rows)
        return found

    def close(self) -> None:
        """Let the model go."""
        self._generator = self._model = None
