"""The runner over this package's own kernels: one call of the extension is one step."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BackendError, ConfigError, ModelFormatError, RunnerError
from shoal.models.files import ModelFiles
from shoal.models.gguf import read_gguf
from shoal.runners.base import kv_budget
from shoal.runners.native import describe, pack
from shoal.runners.plan import ModelSpec, SeqId, StepOutput, StepPlan, Want

KvPrecision: TypeAlias = Literal["auto", "bf16", "u8"]

BLOCK_SIZE = 32
MAX_CHAIN = 16
MAX_TOP = 128  # a longer list is kept in order by the kernels more slowly than numpy finds it
_WANTS = {Want.NOTHING: 0, Want.ARGMAX: 1, Want.LOGITS: 2, Want.TOP: 3}
_ROWS = 64  # rows of logits that the estimate of a step's memory counts


def load_core() -> Any:
    """The compiled extension. `BackendError` when this installation has none."""
    try:
        return importlib.import_module("shoal.runners.native._core")
    except ImportError as error:
        raise BackendError(
            f"the native kernels are not built ({error})",
            hint="install a C++ compiler and reinstall shoal, or use runner='openvino'",
        ) from error


class NativeRunner:
    """Maps the core's block ids to one array of KV blocks, all layers of a block together.

    Invariant: what a pass computes for a sequence depends on its tokens and its blocks only, to the last bit, on one
    machine. Leaves scheduling, sampling and the contents of block tables to the caller.
    """

    def __init__(self, core: Any, spec: ModelSpec) -> None:
        """Over a loaded extension; use `load`."""
        self._core: Any = core
        self._spec = spec
        self._logits: NDArray[np.float32] = np.empty((0, spec.vocab_size), np.float32)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        kv_bytes: int,
        cache_dir: Path,
        memory_bytes: int | None = None,
        threads: int | None = None,
        pin_threads: bool = False,
        kv_precision: KvPrecision = "auto",
        max_step_tokens: int = 1024,
    ) -> NativeRunner:
        """Load a GGUF for this machine's CPU.

        Its weights are repacked once and kept in `cache_dir`. `kv_bytes` is the most that KV may take,
        `memory_bytes` what weights, KV and the transient of a step may take together; pages of KV are taken when first
        written. `threads` None is one per CPU this process may use; with `pin_threads` each but the caller's
        stays on a CPU of its own, counted from the first one allowed (Linux only). `kv_precision` "u8" keeps K and V in
        8 bits with a scale per token and head; "auto" is bf16. The environment variable SHOAL_ISA forces an instruction
        set. Raises `ModelError`s for what is wrong with the files, `BackendError` when
        the extension is missing or memory does not suffice, `ConfigError` for a budget below one block.
        """
        core = load_core()
        path = packed_path(files, cache_dir)
        try:
            facts, entries = pack.read_header(path)
        except ModelFormatError:
            write_packed(files, path)
            facts, entries = pack.read_header(path)
        spec = _spec(core, facts, path, kv_bytes, memory_bytes, kv_precision, max_step_tokens)
        config = {name: value for name, value in facts.items() if name not in ("name", "architecture")}
        config |= {"blocks": spec.num_blocks, "kv_bits": _kv_bits(kv_precision), "threads": threads or core.cpus()}
        config["pin"] = pin_threads
        config["isa"] = isa = os.environ.get("SHOAL_ISA", "auto")
        try:
            return cls(core.Core(config, str(path), entries), spec)
        except core.FormatError as error:
            raise ModelFormatError(f"{path}: {error}", value=isa, hint="check SHOAL_ISA, or delete the file") from error
        except (MemoryError, RuntimeError) as error:
            hint = "lower kv_memory or threads, or free some memory"
            raise BackendError(
                f"not enough memory or threads for {spec.name} ({error})", value=kv_bytes, hint=hint
            ) from error

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
        return self._spec

    @property
    def peak_bytes(self) -> int | None:
        """None: not counted."""
        return None

    @property
    def isa(self) -> str:
        """The instruction set in use, as "avx512bf16"."""
        return str(self._loaded().isa)

    def profile(self) -> dict[str, float]:
        """Seconds spent in each phase of a step since loading, barriers included, and the number of `steps`."""
        return dict(self._loaded().profile())

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass, or `plan.chain` of them. `StepOutput.logits` is valid until the next call.

        Raises `RunnerError`, before anything is computed or copied, for a plan with blocks, tokens or positions out of
        range, that reads slots nothing wrote, or that writes one twice.
        """
        core = self._loaded()
        if plan.chain > self._spec.max_chain:
            raise RunnerError(f"chain is {plan.chain}", value=plan.chain, limit=self._spec.max_chain)
        wanted = [s.seq_id for s in plan.sequences if s.want is Want.ARGMAX]
        rows = sum(s.want is Want.LOGITS for s in plan.sequences)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._spec.vocab_size), np.float32)
        sequences = [(s.tokens, s.start, s.block_table, _WANTS[s.want], s.top) for s in plan.sequences]
        try:
            tokens, tops = core.step(sequences, plan.copies, plan.chain, self._logits)
        except (ValueError, TypeError, RuntimeError) as error:
            raise RunnerError(f"step {plan.step}: {error}", value=plan.step) from error
        except MemoryError as error:
            raise RunnerError(f"step {plan.step}: out of memory", value=plan.num_tokens) from error
        argmax = {seq_id: tuple(row) for seq_id, row in zip(wanted, tokens, strict=True)}
        few = [s.seq_id for s in plan.sequences if s.want is Want.TOP]
        return StepOutput(
            argmax, self._logits[:rows] if rows else None, dict(zip(few, map(_by_token, tops), strict=True))
        )

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Nothing is kept per sequence."""

    def close(self) -> None:
        """Free weights, KV and threads. Idempotent."""
        self._core = None

    def _loaded(self) -> Any:
        if self._core is None:
            raise RunnerError("the runner is closed", hint="load the model again")
        return self._core


def packed_path(files: ModelFiles, cache_dir: Path) -> Path:
    """Where the packed form of a model lies. One layout serves all instruction sets."""
    return cache_dir / f"{files.key}.native-{pack.LAYOUT_VERSION}.pack"


def write_packed(files: ModelFiles, path: Path) -> None:
    """Pack a GGUF. Raises the `ModelError` that says why it cannot be."""
    model = read_gguf(files.path)
    reason = describe.supports(model)
    if reason is not None:
        raise BackendError(
            f"the native runner does not take {files.name}: {reason}", value=reason, hint="use runner='openvino'"
        )
    pack.write_packed(path, describe.facts_of(model), describe.tensors_of(model), describe.orders_of(model))


def _row_bytes(facts: dict[str, Any]) -> int:
    """Memory of one row in a step: residual, queries, and the quantised inputs of the three products, twice."""
    width = facts["embd"] + facts["ff"] + facts["heads"] * facts["dim"]
    return int(2 * (facts["embd"] * 4 + width * 2) + facts["heads"] * facts["dim"] * 2)


def _by_token(top: list[tuple[float, int]]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    top.sort(key=itemgetter(1))
    return np.array([token for _, token in top], np.int64), np.array([logit for logit, _ in top], np.float32)


def _kv_bits(precision: KvPrecision) -> int:
    return 8 if precision == "u8" else 16


def _spec(
    core: Any,
    facts: dict[str, Any],
    path: Path,
    kv_bytes: int,
    memory_bytes: int | None,
    kv_precision: KvPrecision,
    max_step_tokens: int,
) -> ModelSpec:
    """Facts of a packed model, and how many blocks of KV fit the budget. `ConfigError` when none does."""
    block_bytes = core.block_bytes(facts["layers"], facts["kv_heads"], facts["dim"], _kv_bits(kv_precision))
    weight_bytes = path.stat().st_size
    step_bytes = max_step_tokens * _row_bytes(facts) + _ROWS * facts["vocab"] * 4
    blocks = min(kv_budget(kv_bytes, memory_bytes, weight_bytes + step_bytes) // block_bytes, 2**31 - 1)
    if blocks < 1:
        raise ConfigError(
            f"kv_memory is {kv_bytes:,} bytes",
            value=kv_bytes,
            limit=block_bytes,
            hint=f"one block of KV takes {block_bytes:,} bytes: raise it to at least that",
        )
    return ModelSpec(
        name=facts["name"],
        architecture=facts["architecture"],
        runner="native",
        precision="int8",
        vocab_size=facts["vocab"],
        context_length=facts["context"],
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        kv_bytes_per_token=block_bytes // BLOCK_SIZE,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        max_chain=MAX_CHAIN,
        max_top=MAX_TOP,
        exact=True,
    )
