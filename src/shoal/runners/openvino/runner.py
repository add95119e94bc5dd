"""The runner for CPUs that OpenVINO serves: paged KV, any mix of prefill and decode in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BackendError, RunnerError
from shoal.runners.base import kv_budget
from shoal.runners.openvino.feed import Feed, Wanted
from shoal.runners.openvino.kv import KVArrays, cache_ports
from shoal.runners.openvino.loading import PagedSource, best_precision, machine, open_core, read_source
from shoal.runners.openvino.probe import BLOCKS, is_exact, remembered, warm_up
from shoal.runners.plan import BlockId, ModelSpec, SeqId, StepOutput, StepPlan, Want, WindowId

Precision: TypeAlias = Literal["auto", "bf16", "f32"]

_ROWS = 64  # rows of logits that the estimate of a step's memory counts
_ITEM_BYTES = {"bf16": 2, "f32": 4}


class OpenVINORunner:
    """Maps the core's block ids to the first axis of OpenVINO's KV arrays, one pair of arrays per layer.

    Invariant: what a pass computes for a sequence depends on its tokens and its blocks only; with `spec.exact`, to the
    last bit. Leaves scheduling, sampling and the contents of block tables to the caller.
    """

    def __init__(self, source: PagedSource, compiled: Any, spec: ModelSpec, kv: KVArrays) -> None:
        """Over a compiled model; use `load`."""
        self._spec = spec
        self._kv: KVArrays | None = kv
        self._source: PagedSource | None = source  # the plugin reads the mapped weights as long as it lives
        self._request: Any = compiled.create_infer_request()
        for name, tensor in kv.tensors():
            self._request.set_tensor(name, tensor)
        self.identity = ""  # set when all facts are known
        self._feed = Feed(self._request, spec.vocab_size, spec.block_size, spec.num_blocks)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        kv_bytes: int,
        cache_dir: Path,
        memory_bytes: int | None = None,
        threads: int | None = None,
        pin_threads: bool = False,
        precision: Precision = "auto",
        max_step_tokens: int = 1024,
    ) -> OpenVINORunner:
        """Load a GGUF file, or a directory with an OpenVINO model, for this machine's CPU.

        A GGUF file is converted once and kept in `cache_dir`. `kv_bytes` is the most that KV may take, `memory_bytes`
        what weights, KV and the transient of a step may take together; pages of KV are taken when first written.
        `threads` None leaves the number to OpenVINO, `pin_threads` False where they run.
        `precision` "auto" is bf16 where the CPU multiplies that natively, else f32. Raises `ModelError`s for what is
        wrong with the files, `BackendError` when OpenVINO is missing or cannot run the model, `ConfigError` for a
        budget below one block.
        """
        core = open_core()
        if precision == "auto":
            precision, _ = best_precision(core)
        source = read_source(core, path, cache_dir)
        settings: dict[str, str] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        settings["PERFORMANCE_HINT"] = "LATENCY"
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        if pin_threads:
            settings["ENABLE_CPU_PINNING"] = "YES"
        try:
            runner = cls._compiled(core, source, settings, kv_bytes, memory_bytes, max_step_tokens)
        except (RuntimeError, RunnerError):
            # Some CPUs have no kernel that quantises activations; the plugin may notice only in the first pass.
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
            try:
                runner = cls._compiled(core, source, settings, kv_bytes, memory_bytes, max_step_tokens)
            except (RuntimeError, RunnerError) as error:
                raise BackendError(f"OpenVINO cannot run {path}", value=settings, hint="try precision f32") from error
        facts = (source.identity, sorted(settings.items()), *machine(core))
        runner.identity = repr(("openvino", *facts))
        runner._find_out_exact(cache_dir, facts)
        return runner

    @classmethod
    def _compiled(
        cls,
        core: Any,
        source: PagedSource,
        settings: dict[str, str],
        kv_bytes: int,
        memory_bytes: int | None,
        max_step_tokens: int,
    ) -> OpenVINORunner:
        """A runner that has made its first pass. Raises `RuntimeError` or `RunnerError` when it cannot."""
        compiled = core.compile_model(source.model, "CPU", settings)
        precision = settings["INFERENCE_PRECISION_HINT"]
        vocab_size = compiled.output(0).get_partial_shape()[-1].get_length()
        step_bytes = max_step_tokens * source.step_elements_per_token * _ITEM_BYTES[precision]
        step_bytes += _ROWS * vocab_size * (_ITEM_BYTES[precision] + 4)
        fixed_bytes = source.weight_bytes + step_bytes
        kv = KVArrays(cache_ports(compiled), kv_budget(kv_bytes, memory_bytes, fixed_bytes))
        spec = ModelSpec(
            name=source.name,
            architecture=source.architecture,
            runner="openvino",
            precision=precision,
            vocab_size=vocab_size,
            context_length=source.context_length,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            kv_bytes_per_token=kv.bytes_per_token,
            weight_bytes=source.weight_bytes,
            step_bytes=step_bytes,
            max_rows=_ROWS,
            splits_decode=True,
        )
        runner = cls(source, compiled, spec, kv)
        warm_up(runner.execute)
        return runner

    def _find_out_exact(self, cache_dir: Path, facts: tuple[object, ...]) -> None:
        spec = self._spec
        if spec.num_blocks >= BLOCKS:  # a smaller one cannot be probed, and claims nothing
            exact = remembered(cache_dir, facts, lambda: is_exact(self.execute, spec.vocab_size))
            self._spec = replace(spec, exact=exact)
        self.release(range(BLOCKS))

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
        return self._spec

    @property
    def peak_bytes(self) -> int | None:
        """None: not counted."""
        return None

    @property
    def access(self) -> OpenVINORunner:
        """This runner itself: its blocks lie in memory of this process."""
        return self

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all arrays together."""
        return self._arrays.block_bytes

    def read_block(self, block: BlockId, out: NDArray[np.uint8], window: WindowId | None = None) -> None:  # noqa: ARG002
        """Copy one block to `out`."""
        self._arrays.read(block, out)

    def write_block(self, block: BlockId, data: NDArray[np.uint8], window: WindowId | None = None) -> None:  # noqa: ARG002
        """Put back what `read_block` gave."""
        self._arrays.write(block, data)

    def discard_blocks(self, blocks: Sequence[BlockId], windows: Sequence[WindowId] = ()) -> None:
        """Nothing: pages stay, and are written again."""

    def read_checkpoint(self, checkpoint: int) -> NDArray[np.uint8]:
        """There are none: `RunnerError`."""
        raise RunnerError(f"there is no checkpoint {checkpoint}", value=checkpoint, limit=0)

    def write_checkpoint(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:  # noqa: ARG002
        """There are none: `RunnerError`."""
        raise RunnerError(f"there is no checkpoint {checkpoint}", value=checkpoint, limit=0)

    @property
    def _arrays(self) -> KVArrays:
        if self._kv is None:
            raise RunnerError("the runner is closed", hint="load the model again")
        return self._kv

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass. `StepOutput.logits` is a view of the plugin's memory, valid until the next call.

        Raises `RunnerError` when OpenVINO fails and for plans that ask what this runner does not do.
        """
        arrays = self._arrays
        if plan.chain != 1:
            raise RunnerError(f"chain is {plan.chain}", value=plan.chain, limit=1, hint="see ModelSpec.max_chain")
        for source, destination in plan.copies:
            arrays.copy(source, destination)
        if not plan.sequences:
            return StepOutput({})
        if any(0 < each.generated < len(each.tokens) for each in plan.sequences):
            before, plan = _split(plan)
            self._pass(before)
        wanted = self._pass(plan)
        if not wanted.logits and not wanted.argmax:
            return StepOutput({})
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data.reshape(-1, self._spec.vocab_size)
        return _output(logits, wanted)

    def _pass(self, plan: StepPlan) -> Wanted:
        wanted = self._feed.write(plan)
        try:
            self._request.infer(share_outputs=True)  # the default copies all logits once more
        except RuntimeError as error:
            raise RunnerError(f"step {plan.step} failed in OpenVINO", value=plan.step) from error
        return wanted

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Drop the arrays made of these sequences' block tables. Unknown ids are ignored."""
        self._feed.forget(seq_ids)

    def close(self) -> None:
        """Free the KV arrays and the compiled model. Idempotent."""
        self._kv = self._request = self._source = None
        self._feed.close()


def _split(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """The ends of prompts that are computed again together with generated tokens, and the plan without them.

    They must go in a pass before: attention of a single token does not see what a longer span of the same pass writes
    (what other single tokens write, it does).
    """
    pairs = [(each, len(each.tokens) - each.generated if each.generated else 0) for each in plan.sequences]
    before = tuple(e._replace(tokens=e.tokens[:n], generated=0, want=Want.NOTHING) for e, n in pairs if n)
    after = tuple(e._replace(tokens=e.tokens[n:], start=e.start + n) for e, n in pairs)
    return replace(plan, sequences=before), replace(plan, sequences=after)


def _output(logits: NDArray[np.float32], wanted: Wanted) -> StepOutput:
    full = wanted.logits
    argmax: dict[SeqId, tuple[int, ...]] = {}
    for seq_id, row in zip(wanted.argmax, logits[full:], strict=False):
        token = int(row.argmax())  # NaN, wherever it is, counts as the largest
        argmax[seq_id] = (*argmax.get(seq_id, ()), token if np.isfinite(row[token]) else -1)
    return StepOutput(argmax, logits[:full] if full else None)
