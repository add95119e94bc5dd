"""The runner over this package's own kernels: one call of the extension is one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.config import Precision
from shoal.errors import BackendError, ConfigError, ModelFormatError, RunnerError
from shoal.models.files import ModelFiles, Progress
from shoal.models.precision import quantised
from shoal.runners.base import kv_budget
from shoal.runners.native import describe, pack
from shoal.runners.native.core import core_hash, load_core
from shoal.runners.plan import BlockId, ModelSpec, SeqId, StepOutput, StepPlan, Want, WindowId
from shoal.runners.registry import LocalModel

KvPrecision: TypeAlias = Literal["auto", "bf16", "u8"]

BLOCK_SIZE = 32
MAX_CHAIN = 16
MAX_CHECKPOINTS = 64
MAX_TOP = 128  # a longer list is kept in order by the kernels more slowly than numpy finds it
_WANTS = {Want.NOTHING: 0, Want.ARGMAX: 1, Want.LOGITS: 2, Want.TOP: 3}
_BLOCKS_A_WINDOW = 8  # blocks for each window block: a cached prefix of that many windows keeps the last one whole
_ROWS = 64  # rows of logits that the estimate of a step's memory counts


class NativeRunner:
    """Maps the core's block ids to one array of KV blocks, all layers of a block together; window blocks to another.

    Invariant: what a pass computes for a sequence depends on its tokens and its blocks only, to the last bit, on one
    machine. Leaves scheduling, sampling and the contents of block tables to the caller.
    """

    def __init__(self, core: Any, spec: ModelSpec, identity: str) -> None:
        """Over a loaded extension; use `load`."""
        self._core: Any = core
        self._spec = spec
        self._identity = identity
        self._logits: NDArray[np.float32] = np.empty((0, spec.vocab_size), np.float32)

    @classmethod
    def load(
        cls,
        model: LocalModel,
        *,
        kv_bytes: int,
        cache_dir: Path,
        memory_bytes: int | None = None,
        threads: int | None = None,
        pin_threads: bool = False,
        kv_precision: KvPrecision = "auto",
        max_step_tokens: int = 1024,
        max_batch: int = 8,
        mmap: bool = False,
        window_blocks: bool = False,
        precision: Precision = "auto",
        progress: Progress | None = None,
    ) -> NativeRunner:
        """Load a model for this machine's CPU.

        Its weights are repacked once and kept in `cache_dir`. `kv_bytes` is the most that KV and checkpoints of
        recurrent state may take, `memory_bytes` what weights, these and the transient of a step may take together, of
        which the states of `max_batch` sequences are a part; pages are taken when first written. `threads` None is one
        per CPU this process may use; with `pin_threads` each but the caller's stays on a CPU of its own, counted from
        the first one allowed (Linux only). `kv_precision` "u8" keeps K and V in 8 bits with a scale per token and head;
        "auto" is bf16. With `mmap` the weights stay in the packed file and are read as they are needed, so that a model
        larger than memory runs; they do not count as memory then, and are not checked for damage. With
        `window_blocks` KV of layers with a window lies apart, where that saves memory, and plans must say where
        (`ScheduledSequence.windows`): the core frees what lies behind the window. `precision`, one of
        `AT_LOAD`, quantises matrices of more bits when they are packed; "auto" leaves them as they are. `progress`
        hears of packing. The environment variable SHOAL_ISA forces an instruction set. Raises `ModelError`s for what
        is wrong with the files, `BackendError` when the extension is missing or memory does not suffice, `ConfigError`
        for a budget below one block.
        """
        core = load_core()
        path = packed_path(model.files, cache_dir, precision)
        isa = os.environ.get("SHOAL_ISA", "auto")

        def made(packed: pack.Packed) -> NativeRunner:
            facts = {**packed.facts, "kv_bits": 8 if kv_precision == "u8" else 16}
            weight_bytes = 0 if mmap else packed.start + sum(length for length, _ in packed.pieces)
            spec = _spec(
                core,
                facts,
                weight_bytes,
                kv_bytes,
                memory_bytes,
                max_step_tokens,
                max_batch,
                window_blocks=window_blocks,
            )
            spec = spec if precision == "auto" else replace(spec, precision=precision)
            settings: dict[str, Any] = {"blocks": spec.num_blocks, "checkpoints": spec.num_checkpoints}
            settings["windows"] = spec.num_windows
            settings |= {"threads": threads or core.cpus(), "pin": pin_threads, "isa": isa, "map": mmap}
            loaded = core.Core(facts, settings, str(path), packed.start, packed.tensors, packed.pieces)
            if precision == "auto":
                spec = replace(spec, precision=activations(loaded.isa))
            apart = " windows" if spec.window else ""
            return cls(loaded, spec, f"{path.name} {facts['kv_bits']} {loaded.isa} {core_hash()}{apart}")

        try:
            return _of_packed(path, made, lambda: _pack_again(model, path, precision, progress))
        except core.FormatError as error:
            raise ModelFormatError(f"{path}: {error}", value=isa, hint="check SHOAL_ISA, or delete the file") from error
        except (MemoryError, RuntimeError) as error:
            hint = "lower kv_memory or threads, or free some memory"
            raise BackendError(
                f"not enough memory or threads for {model.files.name} ({error})", value=kv_bytes, hint=hint
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

    @property
    def access(self) -> NativeRunner:
        """This runner itself."""
        return self

    @property
    def identity(self) -> str:
        """The model's files, the precision of KV, the instruction set, and these very kernels."""
        return self._identity

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together, its window block behind it."""
        return int(self._loaded().stored_bytes)

    def read_block(self, block: BlockId, out: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Copy one block to `out`."""
        self._asked(self._loaded().read_block, block, _or_none(window), out)

    def write_block(self, block: BlockId, data: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Put back what `read_block` gave."""
        self._asked(self._loaded().write_block, block, _or_none(window), data)

    def discard_blocks(self, blocks: Sequence[BlockId], windows: Sequence[WindowId] = ()) -> None:
        """Give the pages of these blocks back to the system, as far as no other block is on them."""
        self._asked(self._loaded().discard_blocks, list(blocks), list(windows))

    def read_checkpoint(self, checkpoint: int) -> NDArray[np.uint8]:
        """A copy of the recurrent state that was saved there."""
        out = np.empty(self._spec.checkpoint_bytes, np.uint8)
        self._asked(self._loaded().read_checkpoint, checkpoint, out)
        return out

    def write_checkpoint(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_checkpoint` gave: the state after that many tokens."""
        self._asked(self._loaded().write_checkpoint, checkpoint, tokens, data)

    @staticmethod
    def _asked(function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except (ValueError, TypeError, MemoryError) as error:
            raise RunnerError(f"blocks cannot be read or written: {error}", value=arguments[0]) from error

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass, or `plan.chain` of them. `StepOutput.logits` is valid until the next call.

        Raises `RunnerError`, before anything is computed or copied, for a plan with blocks, tokens or positions out of
        range, that reads slots nothing wrote, or that writes one twice.
        """
        core = self._loaded()
        if plan.chain > self._spec.max_chain:
            raise RunnerError(f"chain is {plan.chain}", value=plan.chain, limit=self._spec.max_chain)
        wanted = [s.seq_id for s in plan.sequences if s.want is Want.ARGMAX]
        rows = sum(s.rows for s in plan.sequences if s.want is Want.LOGITS)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._spec.vocab_size), np.float32)
        sequences = [
            (
                s.tokens,
                s.start,
                s.block_table,
                _WANTS.get(s.want, -1),  # refused by the core
                s.top,
                s.rows,
                s.seq_id,
                _or_none(s.load),
                _or_none(s.save),
                s.windows,
            )
            for s in plan.sequences
        ]
        try:
            tokens, tops = core.step(sequences, plan.copies, plan.window_copies, plan.chain, self._logits)
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
        """Drop the recurrent state of these sequences."""
        if self._core is not None and self._spec.recurrent:
            self._core.release(list(seq_ids))

    def close(self) -> None:
        """Free weights, KV and threads. Idempotent."""
        self._core = None

    def _loaded(self) -> Any:
        if self._core is None:
            raise RunnerError("the runner is closed", hint="load the model again")
        return self._core


def activations(isa: str) -> str:
    """What activations are to the kernels of this instruction set: bf16 on matrix registers, else 8 bits."""
    return "bf16" if isa == "amx" else "int8"


def packed_path(files: ModelFiles, cache_dir: Path, precision: Precision = "auto") -> Path:
    """Where the packed form of a model lies. One layout serves all instruction sets."""
    kind = "" if precision == "auto" else f"-{precision}"
    return cache_dir / f"{files.key}{kind}.native-{pack.LAYOUT_VERSION}.pack"


def _of_packed(path: Path, make: Callable[[pack.Packed], NativeRunner], pack_again: Callable[[], None]) -> NativeRunner:
    """What `make` makes of the packed file, which is packed again when it is missing, damaged or of another version.

    Twice at most: a process with a later layout that packs the same model just then removes the file.
    """
    for _ in range(2):
        try:
            return make(pack.read_header(path))
        except (ModelFormatError, load_core().DamagedError):
            pack_again()
    return make(pack.read_header(path))


def _pack_again(model: LocalModel, path: Path, precision: Precision, progress: Progress | None) -> None:
    """Pack, and remove what earlier versions of this package packed of the same model."""
    write_packed(model, path, precision, progress)
    stem = path.name.removesuffix(f"{pack.LAYOUT_VERSION}.pack")
    for old in path.parent.glob(f"{stem}*.pack"):
        version = old.name.removeprefix(stem).removesuffix(".pack")
        if version.isdecimal() and int(version) < pack.LAYOUT_VERSION:
            with contextlib.suppress(OSError):
                old.unlink()


def write_packed(
    model: LocalModel, path: Path, precision: Precision = "auto", progress: Progress | None = None
) -> None:
    """Pack a model's weights. Raises the `ModelError` that says why it cannot be."""
    decoder = model.decoder()
    if precision != "auto":
        decoder = quantised(decoder, precision)
    reason = describe.refuses(decoder)
    if reason is not None:
        raise BackendError(
            f"the native runner does not take {model.files.name}: {reason}", value=reason, hint="use runner='openvino'"
        )
    describe.check(decoder, load_core())
    pack.write_packed(path, describe.facts_of(decoder), describe.tensors_of(decoder), progress)


def _row_bytes(facts: dict[str, Any]) -> int:
    """Memory of one row in a step: what `Step` in csrc/step.h keeps of it, with 8-bit inputs of the products twice."""
    heads = inner = feed = columns = pairs = width = 0
    for layer in facts["layers"]:
        mixed, ff, used = layer.get("heads", 0) * layer.get("v_dim", 0), layer.get("ff", 0), layer.get("used", 0)
        keys = layer.get("kv_heads", 0) * layer.get("dim", 0)
        heads = max(heads, layer.get("heads", 0) * layer.get("dim", 0))
        inner, feed = max(inner, mixed), max(feed, layer.get("shared", 0) if used else ff)
        columns = max(columns, 3 * mixed + 2 * keys if layer.get("mixer", 0) > 1 else 0)
        pairs, width = max(pairs, used), max(width, ff if used else 0)
    embd = facts["embd"]
    embd_parts = facts["inputs"].get("size", 0) * len(facts["layers"])
    mixture = pairs * (embd * 4 + 2 * (embd + width))
    return int(
        2 * (embd * 8 + (embd + feed + inner) * 2) + heads * 2 + inner * 4 + columns * 4 + embd_parts * 4 + mixture
    )


def _or_none(place: int | None) -> int:
    return -1 if place is None else place


def _by_token(top: list[tuple[float, int]]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    top.sort(key=itemgetter(1))
    return np.array([token for _, token in top], np.int64), np.array([logit for logit, _ in top], np.float32)


def _spec(
    core: Any,
    facts: dict[str, Any],
    weight_bytes: int,
    kv_bytes: int,
    memory_bytes: int | None,
    max_step_tokens: int,
    max_batch: int,
    *,
    window_blocks: bool,
) -> ModelSpec:
    """Facts of a packed model, and how many blocks of KV fit the budget. `ConfigError` when none does.

    A quarter of the budget goes to checkpoints, where a model has recurrent state.
    """
    block_bytes, window_bytes, window, state_bytes = core.sizes(facts)
    step_bytes = max_step_tokens * _row_bytes(facts) + _ROWS * facts["vocab"] * 4 + max_batch * state_bytes
    budget = kv_budget(kv_bytes, memory_bytes, weight_bytes + step_bytes)
    checkpoints = max(1, min(MAX_CHECKPOINTS, budget // 4 // state_bytes)) if state_bytes else 0
    left, windows = budget - checkpoints * state_bytes, 0
    if window_blocks and not state_bytes and 0 < window < facts["context"]:
        one = -(-window // BLOCK_SIZE) + 3  # what a sequence sees and writes, wherever it stands, and what it copies
        everybody = max_batch * one + -(-max_step_tokens // BLOCK_SIZE)
        windows = _windows_in(left, max(block_bytes, BLOCK_SIZE), window_bytes, one, everybody)
    if not windows:  # all of them lie in the blocks
        block_bytes, window_bytes, window = block_bytes + window_bytes, 0, 0
    block_bytes = max(block_bytes, BLOCK_SIZE)  # where all layers have windows
    blocks = min((left - windows * window_bytes) // block_bytes, 2**31 - 1)
    if blocks < 1:
        needed, what = block_bytes + state_bytes, "and one checkpoint take" if state_bytes else "takes"
        raise ConfigError(
            f"kv_memory is {kv_bytes:,} bytes",
            value=kv_bytes,
            limit=needed,
            hint=f"one block of KV {what} {needed:,} bytes: raise it to at least that",
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
        max_rows=_ROWS,
        exact=True,
        recurrent=state_bytes > 0,
        num_checkpoints=checkpoints,
        checkpoint_bytes=state_bytes,
        window=window,
        num_windows=windows,
        window_bytes=window_bytes,
    )


def _windows_in(budget: int, block_bytes: int, window_bytes: int, one: int, everybody: int) -> int:
    """How many window blocks to make of a budget that holds blocks too.

    An eighth of the blocks have one; but there are enough for the windows of `everybody` at once, as far as that leaves
    an eighth of the budget for what is longer. 0 where it would be too few for `one` sequence.
    """
    enough = min(everybody, 7 * (budget // (block_bytes + window_bytes)) // 8)
    windows = max(budget // (_BLOCKS_A_WINDOW * block_bytes + window_bytes), enough)
    return min(windows, 2**31 - 1) if windows >= one else 0
