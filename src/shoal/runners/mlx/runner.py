"""The runner over `mlx-lm`'s models: dense batch rows for what decodes, blocks of KV for what is shared."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from shoal.errors import RunnerError
from shoal.models.files import ModelFiles
from shoal.runners.mlx.loading import Loaded, Precision, leave_thread, read_model, spec_of
from shoal.runners.mlx.places import Live, Places
from shoal.runners.mlx.rows import Ahead, Rows, alike, arrays, kv_leaves, state_leaves
from shoal.runners.plan import ModelSpec, ScheduledSequence, SeqId, StepOutput, StepPlan, Want


class MLXRunner:
    """Keeps running sequences as rows of `mlx-lm`'s caches, and maps the core's block ids to copies of their KV.

    A pass is up to two: the prompt tokens of a step but for the last of each sequence, which fill caches only; then one
    token for every sequence that wants output, all rows at once. KV is copied into blocks when its sequence leaves or
    another one reads it. All calls must come from the thread that made the runner.
    """

    def __init__(self, loaded: Loaded, spec: ModelSpec) -> None:
        """Over a loaded model; use `load`."""
        self._spec = spec
        self._model: Any = loaded.model
        self._thread = threading.get_ident()
        self._batch = Rows([], [], [])
        self._wired_before: int | None = None
        self._ahead: Ahead | None = None
        self._may_run_ahead = loaded.window is None and not loaded.state_bytes  # only KV that can be cut is taken back
        self._states: dict[int, list[list[mx.array]]] = {}
        # A rotating cache forgets: what is in it must be stored before it is a window old.
        window = loaded.window
        store_every = None if window is None else max(1, min(spec.block_size, window - spec.max_chain))
        self._places = Places(spec.block_size, store_every)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        kv_bytes: int,
        memory_bytes: int | None = None,
        precision: Precision = "auto",
        max_step_tokens: int = 1024,
        cache_limit: int | None = None,
    ) -> MLXRunner:
        """Load a directory that `mlx-lm` knows, or a GGUF file, on MLX's default device.

        `kv_bytes` is the most that blocks of KV and checkpoints may take, `memory_bytes` what weights, those and the
        transient of a step may take together. `precision` "auto" leaves floats as the files have them. `cache_limit`
        bounds the freed memory that MLX keeps for reuse, in this process. Raises `ModelError`s for what is wrong with
        the files, `ConfigError` for a budget below one block and one checkpoint.
        """
        if cache_limit is not None:
            mx.set_cache_limit(cache_limit)
        runner = None
        try:
            loaded = read_model(files, precision)
            runner = cls(loaded, spec_of(loaded, kv_bytes, memory_bytes, max_step_tokens))
        finally:
            if runner is None:
                leave_thread()
        if mx.metal.is_available():  # the weights stay where the GPU reads them
            runner._wired_before = mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        return runner

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
        return self._spec

    @property
    def access(self) -> None:
        """None: blocks are not read or written as bytes."""
        return None

    @property
    def peak_bytes(self) -> int | None:
        """Most memory MLX had in use at once so far, in this process."""
        return int(mx.get_peak_memory())

    # -- the protocol -------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass, or `plan.chain` of them. `RunnerError` for a plan that reads what nothing wrote, from another
        thread, or when MLX fails; the sequences of the plan have no rows then.
        """
        self._check_thread()
        if not 1 <= plan.chain <= self._spec.max_chain:
            raise RunnerError(f"chain is {plan.chain}", value=plan.chain, limit=self._spec.max_chain)
        try:
            return self._execute(plan)
        except (RuntimeError, ValueError, MemoryError, RunnerError) as error:
            self._places.lose({item.seq_id for item in plan.sequences} | set(self._batch.ids))
            self._batch, self._ahead = Rows([], [], []), None
            if isinstance(error, RunnerError):
                raise
            raise RunnerError(f"step {plan.step}: MLX failed: {error}", value=plan.step) from error

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Store what these sequences' rows hold, and drop the rows."""
        self._check_thread()
        live = self._places.live
        self._places.forget([seq_id for seq_id in seq_ids if seq_id in live])
        if not any(seq_id in live for seq_id in self._batch.ids):
            self._batch, self._ahead = Rows([], [], []), None

    def close(self) -> None:
        """Free weights, rows and blocks. Idempotent."""
        self._check_thread()
        if self._wired_before is not None:
            mx.set_wired_limit(self._wired_before)
            self._wired_before = None
        self._model = None
        self._places.clear()
        self._states.clear()
        self._batch, self._ahead = Rows([], [], []), None
        mx.clear_cache()
        leave_thread()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RunnerError(
                "the model was loaded on another thread",
                value=threading.current_thread().name,
                hint="MLX work stays on the thread that loaded the model; give work to the Engine, which owns one",
            )

    # -- one step -----------------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepOutput:
        if self._model is None:
            raise RunnerError("the runner is closed", hint="load the model again")
        for source, destination in plan.copies:
            self._places.copy(source, destination)
        staying = self._make_way(plan)
        others = [item for item in plan.sequences if item.seq_id not in staying]
        for item in others:
            if item.save is not None and item.want is not Want.NOTHING:
                raise RunnerError("a chunk that wants output keeps no state", value=item.want, limit=Want.NOTHING)
            self._admit(item)
        self._places.claim(plan)
        joining = self._prefill(others)
        wanted = [item for item in plan.sequences if item.want is not Want.NOTHING]
        output = self._decode(wanted, plan.chain, joining) if wanted else StepOutput({})
        chunks = [self._places.live[item.seq_id].rows for item in others if item.want is Want.NOTHING]
        mx.eval([arrays(rows.caches) for rows in chunks])  # a step is to take the time of all that it computes
        return output

    def _make_way(self, plan: StepPlan) -> set[SeqId]:
        """Take rows out of the batch that this step does not feed as the batch is fed: one token, for output.

        Gives the sequences that stay in it. What was started ahead is taken back unless it is what they want; rows may
        leave and join.
        """
        feeds = {item.seq_id: item for item in plan.sequences}
        batch, ahead, live = self._batch, self._ahead, self._places.live
        keep, apart = [], []
        as_started = all(item.want in (Want.ARGMAX, Want.NOTHING) for item in plan.sequences)
        for row, (seq_id, length) in enumerate(zip(batch.ids, batch.lengths, strict=True)):
            if seq_id not in live:
                continue
            item = feeds.get(seq_id)
            if item is None or not _goes_on(item, length):
                apart.append(row)
                continue
            keep.append(row)
            if ahead is not None and item.tokens[0] != ahead.fed[row]:
                as_started = False
        if ahead is not None and (apart or not as_started):
            batch.take_back()
            self._ahead = ahead = None
        if not self._spec.recurrent:  # what waits goes to the store; recurrent state cannot
            self._places.forget([seq_id for seq_id in live if seq_id not in feeds])
        for row in apart:
            if batch.ids[row] in live:
                self._places.settle(batch.alone(row))
        if ahead is not None and len(keep) < len(batch):
            self._ahead = ahead.of(keep) if keep else None
        batch.keep(keep)
        return set(batch.ids)

    def _admit(self, item: ScheduledSequence) -> None:
        """See to it that the sequence has rows with its positions below `start`."""
        places = self._places
        if item.seq_id in places.live:
            if places.length(item.seq_id) == item.start and item.load is None:
                return
            places.flush([item.seq_id])
        rows = Rows(self._assembled(item), [item.seq_id], [item.start])
        places.live[item.seq_id] = Live(item.block_table, item.start, rows)

    def _assembled(self, item: ScheduledSequence) -> list[Any]:
        """Fresh caches that hold positions 0 .. start - 1, from blocks and a checkpoint."""
        caches: list[Any] = make_prompt_cache(self._model)
        if item.start == 0:
            return caches
        states = state_leaves(caches)
        if states:
            saved = self._states.get(-1 if item.load is None else item.load)
            if saved is None:
                raise RunnerError(
                    f"sequence {item.seq_id} goes on at {item.start} without its recurrent state", value=item.load
                )
            for leaf, parts in zip(states, saved, strict=True):
                leaf.cache = list(parts)
        kv = kv_leaves(caches)
        parts = self._places.read(item.block_table, item.start) if kv else []
        for i, leaf in enumerate(kv):
            keys = mx.concatenate([part[i][0] for part in parts], axis=2) if len(parts) > 1 else parts[0][i][0]
            values = mx.concatenate([part[i][1] for part in parts], axis=2) if len(parts) > 1 else parts[0][i][1]
            window = getattr(leaf, "max_size", None)
            if window is None:
                leaf.state = keys, values, item.start
            else:
                held = min(window, item.start)
                leaf.state = keys[:, :, -held:], values[:, :, -held:], item.start, 0, window, held
        return caches

    def _prefill(self, items: Sequence[ScheduledSequence]) -> list[Rows]:
        """Feed sequences that are not in the batch: all tokens of one that wants nothing, all but the last of others.

        Those that want output share a pass when their lengths are alike, and are given back: they may join the batch.
        """
        joining: list[tuple[Rows, Sequence[int]]] = []
        ready = []
        for item in items:
            rows = self._places.live[item.seq_id].rows
            if item.want is Want.NOTHING:
                rows.feed(self._model, [item.tokens])
                self._after_prefill(item, rows)
            else:
                joining.append((rows, item.tokens[:-1]))
        for group in alike(joining, lambda pair: len(pair[1])):
            rows = group[0][0]
            rows.join([other for other, _ in group[1:]])
            self._places.settle(rows)
            if group[0][1]:
                rows.feed(self._model, [tokens for _, tokens in group])
                self._places.store_old(rows.ids)
            ready.append(rows)
        return ready

    def _after_prefill(self, item: ScheduledSequence, rows: Rows) -> None:
        if item.save is not None:
            self._states[item.save] = [list(leaf.cache) for leaf in state_leaves(rows.caches)]
        self._places.store_old([item.seq_id])

    def _decode(self, items: Sequence[ScheduledSequence], chain: int, joining: Sequence[Rows]) -> StepOutput:
        """One token for each row, `chain` times; the token fed back stays on the device."""
        if chain > 1 and any(item.want is not Want.ARGMAX or len(item.tokens) > 1 for item in items):
            raise RunnerError("a chained step feeds one token per sequence and wants the arg-max", value=chain)
        by_id = {item.seq_id: item for item in items}
        best, given, logits = self._first(by_id, joining)
        ordered = [by_id[seq_id] for seq_id in self._batch.ids]
        rows = [self._batch.ids.index(item.seq_id) for item in items if item.want is Want.LOGITS]
        wanted = logits[mx.array(rows)].astype(mx.float32) if rows and logits is not None else None
        chosen = [given]
        while len(chosen) < chain:
            best, given, _ = self._started(self._batch, best)
            chosen.append(given)
        following = self._started(self._batch, best) if self._may_run_ahead and not rows else None
        mx.eval(chosen, wanted)
        tokens = [step.tolist() for step in chosen]
        self._batch.lengths = [length + chain for length in self._batch.lengths]
        self._batch.ahead = 0 if following is None else 1
        self._ahead = None if following is None else Ahead(tokens[-1], following[0], following[1])
        self._places.store_old(self._batch.ids)
        written = zip(ordered, zip(*tokens, strict=True), strict=True)
        argmax = {item.seq_id: chain_of for item, chain_of in written if item.want is Want.ARGMAX}
        return StepOutput(argmax, None if wanted is None else np.array(wanted))

    def _first(
        self, items: Mapping[SeqId, ScheduledSequence], joining: Sequence[Rows]
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """The next step of the batch and of those who join it, which are in it afterwards; what `_started` gives.

        What was started ahead is that step; who joins then takes it alone, and there are no logits.
        """
        batch, ahead = self._batch, self._ahead
        if ahead is None:
            batch.join(joining)
            self._places.settle(batch)
            return self._started(batch, mx.array([items[seq_id].tokens[-1] for seq_id in batch.ids]))
        if not joining:
            return ahead.best, ahead.chosen, None
        new, *others = joining
        new.join(others)
        best, chosen, _ = self._started(new, mx.array([items[seq_id].tokens[-1] for seq_id in new.ids]))
        new.ahead = batch.ahead  # now both have a token more than their lengths say
        order = [*batch.ids, *new.ids]
        batch.join([new])
        self._places.settle(batch)
        rows = mx.array([order.index(seq_id) for seq_id in batch.ids])
        return mx.concatenate([ahead.best, best])[rows], mx.concatenate([ahead.chosen, chosen])[rows], None

    def _started(self, rows: Rows, fed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Start a step of these rows, one token each; gives the best tokens to feed, the same with -1 where the logits
        are not finite, and the logits [B, V]. None of it has been waited for.
        """
        logits = rows.step(self._model, fed)
        best = mx.argmax(logits, axis=-1)
        chosen = mx.where(mx.isfinite(mx.max(logits, axis=-1)), best.astype(mx.int32), -1)
        mx.async_eval(chosen)
        return best, chosen, logits


def _goes_on(item: ScheduledSequence, length: int) -> bool:
    """Whether a row with `length` tokens is fed as a batch is: the next token, for output."""
    fed = len(item.tokens) == 1 and item.start == length and item.want is not Want.NOTHING
    return fed and item.load is None and item.save is None
