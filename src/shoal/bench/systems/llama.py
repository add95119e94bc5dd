"""llama.cpp through llama-cpp-python's low-level API, in the way its own server batches slots, without the HTTP."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.bench.systems.base import Logits, Measured, Setup, drive
from shoal.bench.timeline import RunTimes
from shoal.bench.workloads import Job
from shoal.errors import RunnerError

_N_BATCH, _N_UBATCH = 2048, 512  # its server's defaults
_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}  # LLAMA_FTYPE_MOSTLY_...
_quiet: Any = None


@dataclass(slots=True)
class _Slot:
    number: int
    job: Job
    seq: int
    fed: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCpp:
    """One GGUF in llama.cpp. A pass takes the next token of each decoding slot, then prompts up to `n_batch`.

    As in its server every slot computes its own prompt. `copied` lets the others take the KV of a shared trunk from the
    first by `llama_memory_seq_cp`, which a caller who knows the trunk can do; that wants the unified cache.
    """

    VARIANTS: ClassVar[dict[str, str]] = {"": "slots, as its server", "copied": "trunk copied by hand"}

    def __init__(self, source: Measured) -> None:
        api = self._api = self.load_api()
        self._source = source
        _be_quiet(api)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(source.path).encode(), self.model_params(api))
        if not self._model:
            raise RunnerError(f"it cannot load {source.path.name}", value=str(source.path))
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(_N_BATCH, 0, 1)
        self._context: Any = None
        self._setup: Setup | None = None
        self._slots: list[_Slot] = []
        self._waiting: list[tuple[int, Job]] = []

    @staticmethod
    def missing() -> str | None:
        """Whether llama-cpp-python is here."""
        found = importlib.util.find_spec("llama_cpp") is not None
        return None if found else "llama-cpp-python is not installed"

    @staticmethod
    def load_api() -> Any:
        """The library's functions."""
        import llama_cpp

        return llama_cpp

    @staticmethod
    def model_params(api: Any) -> Any:
        """Its defaults."""
        return api.llama_model_default_params()

    def context_params(self, setup: Setup) -> Any:
        """Its defaults."""
        params = self._api.llama_context_default_params()
        params.kv_unified = setup.variant == "copied"
        return params

    def version(self) -> dict[str, Any]:
        """The bindings' version."""
        return {"version": f"llama-cpp-python {metadata.version('llama-cpp-python')}"}

    @property
    def pid(self) -> int:
        """It runs in this process."""
        return os.getpid()

    def prepare(self, setup: Setup) -> None:
        """Make a context for the workload."""
        if setup == self._setup:
            return
        self._close_context()
        self._setup = setup
        params = self.context_params(setup)
        params.n_ctx = setup.streams * setup.length
        params.n_batch, params.n_ubatch, params.n_seq_max = _N_BATCH, _N_UBATCH, setup.streams
        params.n_threads = params.n_threads_batch = self._source.threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RunnerError("it cannot make a context", value=params.n_ctx)

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        info = self._api.llama_print_system_info().decode()
        return {
            "n_batch": _N_BATCH,
            "n_ubatch": _N_UBATCH,
            "n_threads": self._source.threads,
            "n_seq_max": "the level's streams",
            "kv": "f16, one stream of cache per sequence; unified where the trunk is copied",
            "flash_attn": "auto",
            **self.version(),
            "sampling": "arg-max in numpy",
            "built": info.strip(),
        }

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Drive the slots."""
        return drive(self, jobs)

    def drop(self) -> None:
        """Empty the cache."""
        self._slots, self._waiting = [], []
        self._api.llama_memory_clear(self._memory, True)

    def add(self, number: int, job: Job) -> None:
        """Queue a request for the next free slot."""
        self._waiting.append((number, job))

    def step(self) -> Iterator[tuple[int, list[int]]]:
        """One `llama_decode`."""
        self._fill_slots()
        items: list[tuple[int, int, int, bool]] = []
        wanted: list[tuple[int, _Slot]] = []
        for slot in self._slots:
            if slot.output:
                wanted.append((len(items), slot))
                items.append((slot.output[-1], slot.fed, slot.seq, True))
                slot.fed += 1
        for slot in self._slots:
            if not slot.output and self._may_start(slot):
                self._feed_prompt(slot, items, wanted)
        self._decode(items)
        for row, slot in wanted:
            token = self._best(row)
            slot.output.append(token)
            yield slot.number, [token]
        self._free_slots()

    def logits(self, tokens: Sequence[int]) -> Logits:
        """All rows of one batch."""
        self.prepare(Setup(1, len(tokens), 0, 0))
        self.drop()
        self._decode([(token, at, 0, True) for at, token in enumerate(tokens)])
        return np.stack([self._row(i).copy() for i in range(len(tokens))])

    def close(self) -> None:
        """Free batch, context and model."""
        self._close_context()
        self._api.llama_batch_free(self._batch)
        self._api.llama_model_free(self._model)

    # -- slots --------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> Any:
        return self._api.llama_get_memory(self._context)

    def _fill_slots(self) -> None:
        assert self._setup is not None
        free = sorted(set(range(self._setup.streams)) - {slot.seq for slot in self._slots})
        while free and self._waiting:
            number, job = self._waiting.pop(0)
            self._slots.append(_Slot(number, job, free.pop(0)))

    def _may_start(self, slot: _Slot) -> bool:
        """With `copied`, the others wait for the first to have the trunk, and take it over."""
        assert self._setup is not None
        trunk = self._setup.trunk
        if self._setup.variant != "copied" or slot.number == 0 or slot.fed >= trunk:
            return True
        leader = next(other for other in self._slots if other.number == 0)
        if leader.fed < trunk:
            return False
        self._api.llama_memory_seq_cp(self._memory, leader.seq, slot.seq, 0, trunk)
        slot.fed = trunk
        return True

    def _feed_prompt(
        self, slot: _Slot, items: list[tuple[int, int, int, bool]], wanted: list[tuple[int, _Slot]]
    ) -> None:
        prompt = slot.job.prompt
        for at in range(slot.fed, min(len(prompt), slot.fed + _N_BATCH - len(items))):
            last = at == len(prompt) - 1
            if last:
                wanted.append((len(items), slot))
            items.append((prompt[at], at, slot.seq, last))
            slot.fed += 1

    def _free_slots(self) -> None:
        ended = [slot for slot in self._slots if len(slot.output) >= slot.job.max_tokens]
        for slot in ended:
            self._slots.remove(slot)
            self._api.llama_memory_seq_rm(self._memory, slot.seq, -1, -1)

    def _decode(self, items: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        for i, (token, position, sequence, logits) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, logits
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(items)
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise RunnerError(f"llama_decode returned {code}", value=code)

    def _row(self, i: int) -> Logits:
        pointer = self._api.llama_get_logits_ith(self._context, i)
        row: Logits = np.ctypeslib.as_array(pointer, (self._vocab,))
        return row

    def _best(self, i: int) -> int:
        return int(self._row(i).argmax())

    def _close_context(self) -> None:
        if self._context is not None:
            self._api.llama_free(self._context)
            self._context = None


def _be_quiet(api: Any) -> None:
    global _quiet
    _quiet = api.llama_log_callback(_no_log)
    api.llama_log_set(_quiet, ctypes.c_void_p(0))


def _no_log(level: int, text: bytes, data: object) -> None:  # noqa: ARG001 - the face of its callback
    return


def requantised(path: Path, target: Path, flavour: str) -> Path:
    """The same model in the format of a flavour, by llama.cpp's own tool. RunnerError when it fails."""
    import llama_cpp

    api: Any = llama_cpp
    _be_quiet(api)
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _FILE_TYPES[flavour], True
    half = target.with_suffix(".part")
    if api.llama_model_quantize(str(path).encode(), str(half).encode(), ctypes.byref(params)):
        with contextlib.suppress(FileNotFoundError):
            half.unlink()
        raise RunnerError(f"llama.cpp cannot requantise {path.name}", value=str(path))
    half.rename(target)
    return target
