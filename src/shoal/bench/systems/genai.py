"""OpenVINO GenAI's continuous-batching pipeline on the same GGUF."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, ClassVar

import numpy as np

from shoal.bench.systems.base import Logits, Measured, Setup, drive
from shoal.bench.timeline import RunTimes
from shoal.bench.workloads import Job

_GB = 1 << 30


class GenAI:
    """`ContinuousBatchingPipeline` with prefix caching on, or `unshared` with it off, stepped from outside."""

    VARIANTS: ClassVar[dict[str, str]] = {"": "prefix caching on", "unshared": "prefix caching off"}

    def __init__(self, source: Measured) -> None:
        self._source = source
        self._pipeline: Any = None
        self._made: tuple[int, bool] | None = None
        self._handles: dict[int, Any] = {}
        self._next = 0

    @staticmethod
    def missing() -> str | None:
        """Whether openvino-genai is here."""
        found = importlib.util.find_spec("openvino_genai") is not None
        return None if found else "openvino-genai is not installed"

    @property
    def pid(self) -> int:
        """It runs in this process."""
        return os.getpid()

    def prepare(self, setup: Setup) -> None:
        """Make the pipeline, unless one of the same settings is there."""
        import openvino_genai as genai

        cache_gb = max(1, -(-5 * setup.kv_bytes // (4 * _GB)))
        wanted = (cache_gb, setup.variant != "unshared")
        if wanted == self._made:
            return
        self._pipeline = None
        config = genai.SchedulerConfig()
        config.cache_size, config.enable_prefix_caching = wanted
        config.max_num_batched_tokens = self._batched_tokens
        properties = {"INFERENCE_NUM_THREADS": self._source.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(str(self._source.path), config, "CPU", properties)
        self._made = wanted

    @property
    def _batched_tokens(self) -> int:
        return int(self._source.options.get("max_num_batched_tokens", "256"))

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {
            "version": f"openvino-genai {metadata.version('openvino-genai')}",
            "cache_size": "1 GB, or what the level's KV needs and a quarter more",
            "max_num_seqs": 256,
            "max_num_batched_tokens": self._batched_tokens,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": "on; off where said",
            "INFERENCE_NUM_THREADS": self._source.threads,
            "precision": "its defaults",
        }

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Drive the pipeline."""
        return drive(self, jobs)

    def drop(self) -> None:
        """Its cache stays; prompts of each run are new to it."""
        self._handles = {}

    def add(self, number: int, job: Job) -> None:
        """Add a request by its token ids."""
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = job.max_tokens, True, False
        tokens = ov.Tensor(np.array([job.prompt], np.int64))
        self._handles[number] = self._pipeline.add_request(self._next, tokens, config)
        self._next += 1

    def step(self) -> Iterator[tuple[int, list[int]]]:
        """One step of its scheduler."""
        self._pipeline.step()
        for number, handle in self._handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    yield number, list(output.generated_ids)

    def logits(self, tokens: Sequence[int]) -> Logits:
        """The pipeline tells no logits: those of the model that it makes of the GGUF, run by OpenVINO beside it."""
        import openvino as ov

        directory = self._converted()
        properties = {"INFERENCE_NUM_THREADS": self._source.threads}
        compiled = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", properties)
        ids = np.array([tokens], np.int64)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        rows: Logits = compiled.create_infer_request().infer(feed)[0][0].copy()
        return rows

    def _converted(self) -> Any:
        """The directory with its conversion; GenAI writes it beside the file, so beside a copy of it."""
        import openvino_genai as genai

        directory = self._source.cache_dir / f"genai-{self._source.path.stem}"
        if not (directory / "openvino_model.xml").exists():
            directory.mkdir(parents=True, exist_ok=True)
            copy = directory / "model.gguf"
            shutil.copyfile(self._source.path, copy)
            config = genai.SchedulerConfig()
            config.cache_size = 1
            genai.ContinuousBatchingPipeline(str(copy), config, "CPU", {"enable_save_ov_model": True})
            copy.unlink()
        return directory

    def close(self) -> None:
        """Let the pipeline go."""
        self._pipeline = None
