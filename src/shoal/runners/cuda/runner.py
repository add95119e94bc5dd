"""The runner over Triton kernels: plans become rows on the device, and a step is one captured graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.cuda.access import DeviceBlocks
from shoal.runners.cuda.choices import largest, until_invalid
from shoal.runners.cuda.model import DeviceModel
from shoal.runners.cuda.states import States
from shoal.runners.cuda.step import BLOCK, SPLIT, UPDATES, Shape, Step, tile_tokens
from shoal.runners.plan import BlockId, ModelSpec, ScheduledSequence, SeqId, StepOutput, StepPlan, Want

_FEW_CHANGES = 8  # table entries of one sequence that go with the step's inputs; more go as a row
_LEAST_TRUNK = 4  # rows that make it worth to read a shared split in a program of its own


@dataclass(slots=True)
class _Ahead:
    """A step that the device computes already: the one after `rows`, should they all go on as they are."""

    shape: Shape
    rows: tuple[tuple[SeqId, int], ...]  # sequence, and the position it will feed
    tables: tuple[tuple[BlockId, ...], ...]
    tokens: list[int]  # that it will feed
    chosen: torch.Tensor
    done: torch.cuda.Event


class CUDARunner:
    """Maps the core's block ids to KV blocks on the device, and sequences in the batch to rows of a table there.

    Invariant: what a pass computes for a sequence depends on its tokens and its blocks only, to the last bit. Greedy
    decoding runs one step ahead: where the next plan is the one that was guessed, its outcome is there already.
    """

    def __init__(self, model: DeviceModel, spec: ModelSpec, identity: str, *, slots: int, rows: int) -> None:
        """For at most `slots` sequences and `rows` rows of a step; see `load` of the package and `identity_of`."""
        self._spec = spec
        self._model = model
        self._states = None if model.states is None else States(model.states)
        self._blocks = DeviceBlocks(model.kv.parts, spec.num_blocks, BLOCK, identity, self._states)
        self._spare = spec.num_blocks  # the KV block that rows which fill up a bucket write to
        width = -(-spec.context_length // BLOCK) + 1
        tables = torch.full((slots + 1, width), self._spare, dtype=torch.int32, device=model.device)
        self._step = Step(model, tables, rows, min(rows, bucket(slots) * spec.max_rows))
        self._free = list(range(slots - 1, -1, -1))
        self._slot: dict[SeqId, int] = {}
        self._known: dict[SeqId, tuple[BlockId, ...]] = {}
        self._ahead: _Ahead | None = None
        self._group = max(a.heads // a.kv_heads for a in model.attentions)
        self._cuda = model.device.type == "cuda"

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model; constant for the runner's life."""
        return self._spec

    @property
    def access(self) -> DeviceBlocks:
        """The blocks of KV as bytes."""
        return self._blocks

    @property
    def peak_bytes(self) -> int | None:
        """Most device memory in use at once so far; None off a GPU."""
        return int(torch.cuda.max_memory_allocated(self._model.device)) if self._cuda else None

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Give their rows of the table, and places for recurrent state, to others."""
        if self._states is not None:
            self._states.release(seq_ids)
        for seq_id in seq_ids:
            slot = self._slot.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
                del self._known[seq_id]

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        self._ahead = None
        if hasattr(self, "_step"):
            del self._step, self._model, self._blocks, self._states
            if self._cuda:
                torch.cuda.empty_cache()

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass, or `plan.chain` of them. `StepOutput.logits` is a copy on the host.

        Raises `RunnerError`: before anything is computed for a plan out of range, and when the device fails.
        """
        self._check(plan)
        try:
            output = self._take_ahead(plan) or self._execute(plan)
        except torch.cuda.OutOfMemoryError as error:
            self._forget_tables()
            torch.cuda.empty_cache()
            hint = "lower kv_memory, max_batch or max_step_tokens"
            raise RunnerError(f"step {plan.step}: out of device memory", value=plan.num_tokens, hint=hint) from error
        except RuntimeError as error:
            self._forget_tables()
            raise RunnerError(f"step {plan.step}: {error}", value=plan.step) from error
        self._blocks.wrote(plan.sequences, plan.chain)
        if self._states is not None:
            self._states.end(plan)
        return output

    # -- from a plan to rows ------------------------------------------------------------------------------------

    def _check(self, plan: StepPlan) -> None:
        if not hasattr(self, "_step"):
            raise RunnerError("the runner is closed", hint="load the model again")
        spec = self._spec
        if plan.chain > spec.max_chain:
            raise RunnerError(f"chain is {plan.chain}", value=plan.chain, limit=spec.max_chain)
        for s in plan.sequences:
            end = s.start + len(s.tokens) + plan.chain - 1
            if not 1 <= s.rows <= min(len(s.tokens), spec.max_rows):
                raise RunnerError(f"sequence {s.seq_id} wants {s.rows} rows", value=s.rows, limit=spec.max_rows)
            if not s.tokens or s.start < 0 or end > min(spec.context_length, len(s.block_table) * BLOCK):
                raise RunnerError(f"sequence {s.seq_id} feeds {s.start} to {end}", value=end, limit=spec.context_length)
            if min(s.tokens) < 0 or max(s.tokens) >= spec.vocab_size:
                raise RunnerError(f"sequence {s.seq_id} names a token out of range", limit=spec.vocab_size)
        if self._states is not None:
            self._states.check(plan)

    def _execute(self, plan: StepPlan) -> StepOutput:
        for source, target in plan.copies:
            self._blocks.copy(source, target)
        if not plan.sequences:
            return StepOutput({})
        lone = [s for s in plan.sequences if len(s.tokens) == 1]
        fed = [s for s in plan.sequences if len(s.tokens) > 1]
        lone.sort(key=lambda s: s.block_table)  # readers of one trunk become neighbours
        if self._states is not None:
            self._states.begin(plan.sequences)
        shape = self._fill(plan, lone, fed)
        step = self._step
        step.inputs(shape).send()
        links = []
        for _ in range(plan.chain):
            step.run(shape)
            links.append(self._fetch(step.buffers.chosen, shape.wanted))
        output = self._output(plan, lone, fed, links)
        self._run_ahead(plan, lone, shape, output)
        return output

    def _fill(self, plan: StepPlan, lone: list[ScheduledSequence], fed: list[ScheduledSequence]) -> Shape:
        """Write the step's inputs to the host's buffer of its shape."""
        wanted = sum(s.rows for s in plan.sequences if s.want is not Want.NOTHING)
        trunks, readers, skipped = self._trunks(lone)
        each = tile_tokens(self._group)
        tiles = sum(-(-len(s.tokens) // each) for s in fed)
        longest = max((s.start for s in lone), default=0) + plan.chain
        shape = Shape(
            lone=bucket(len(lone)),
            splits=bucket(-(-longest // SPLIT)) if lone else 1,
            span=SPLIT // 2 if longest <= SPLIT // 2 else SPLIT,
            trunks=bucket(len(trunks)),
            fed=bucket(sum(len(s.tokens) for s in fed), least=16),
            tiles=bucket(tiles, least=4),
            wanted=bucket(wanted),
            logits=any(s.want in (Want.LOGITS, Want.TOP) for s in plan.sequences),
            feeds=bool(lone) and not fed and all(s.want is Want.ARGMAX for s in lone),
            runs=0 if self._states is None else bucket(len(lone)) + bucket(tiles, least=4),
        )
        a = self._step.inputs(shape).arrays
        spare = len(self._step.tables) - 1
        for name, idle in (("tokens", 0), ("positions", 0), ("slots", spare), ("wanted", 0), ("trunk_splits", 0)):
            a[name][:] = idle
        a["trunks"][:] = 0
        a["tiles"][:] = 0
        self._send_tables(plan.sequences, a["updates"])
        n = len(lone)
        a["tokens"][:n] = [s.tokens[0] for s in lone]
        a["positions"][:n] = [s.start for s in lone]
        a["slots"][:n] = [self._slot[s.seq_id] for s in lone]
        a["trunk_splits"][:n] = skipped
        a["readers"][: len(readers)] = readers
        a["trunks"][: 4 * len(trunks)] = [number for item in trunks for number in item]
        row, tile, last = shape.lone, 0, {s.seq_id: i for i, s in enumerate(lone)}
        for s in fed:
            count = len(s.tokens)
            a["tokens"][row : row + count] = s.tokens
            a["positions"][row : row + count] = np.arange(s.start, s.start + count)
            a["slots"][row : row + count] = self._slot[s.seq_id]
            for first in range(0, count, each):
                a["tiles"][2 * tile : 2 * tile + 2] = row + first, min(each, count - first)
                tile += 1
            row += count
            last[s.seq_id] = row - 1
        rows = [last[s.seq_id] - back for s in _wanting(lone, fed) for back in range(s.rows - 1, -1, -1)]
        a["wanted"][: len(rows)] = rows
        if self._states is not None:
            self._fill_runs(shape, lone, fed, self._states)
        return shape

    def _fill_runs(
        self, shape: Shape, lone: list[ScheduledSequence], fed: list[ScheduledSequence], states: States
    ) -> None:
        """Where each sequence's rows and recurrent state are; rows that fill up a bucket are in no run."""
        arrays = self._step.inputs(shape).arrays
        runs, run_of = arrays["runs"], arrays["run_of"]
        runs[:], run_of[:] = 0, -1
        for sequences, number in ((lone, 0), (fed, shape.lone)):  # the fed ones begin behind the bucket of lone rows
            first = number
            for run, s in enumerate(sequences, number):
                count = len(s.tokens)
                runs[4 * run : 4 * run + 4] = first, count, *states.of(s.seq_id)
                run_of[first : first + count] = run
                first += count

    def _send_tables(self, sequences: Iterable[ScheduledSequence], updates: NDArray[np.int32]) -> None:
        """Give new sequences a row of the table, and send the entries that differ from what the device has."""
        changed: list[tuple[int, int]] = []
        here = {s.seq_id for s in sequences}
        for s in sequences:
            if s.seq_id not in self._slot:
                self._slot[s.seq_id], self._known[s.seq_id] = self._take_slot(here), ()
            entries = self._changes(s)
            if len(entries) > _FEW_CHANGES or len(changed) + len(entries) > UPDATES:
                row = torch.tensor(s.block_table, dtype=torch.int32)
                self._step.tables[self._slot[s.seq_id], : len(row)] = row.to(self._model.device)
            else:
                changed += entries
        self._write_updates(changed, updates)

    def _changes(self, s: ScheduledSequence) -> list[tuple[int, int]]:
        """(place in the tables, block) of each entry that the device does not have yet; it is taken for sent."""
        known, table = self._known[s.seq_id], s.block_table
        if known is table:
            return []
        if min(table) < 0 or max(table) >= self._spec.num_blocks:
            raise RunnerError(f"sequence {s.seq_id} names a block out of range", limit=self._spec.num_blocks)
        self._known[s.seq_id] = table
        begin = self._slot[s.seq_id] * self._step.tables.shape[1]
        kept = known == table[: len(known)]
        first = range(len(known), len(table)) if kept else range(len(table))
        return [(begin + i, table[i]) for i in first if i >= len(known) or known[i] != table[i]]

    def _forget_tables(self) -> None:
        """Some entries may not have come to the device: the next plan sends all tables whole."""
        self._known = dict.fromkeys(self._known, ())

    def _write_updates(self, changed: list[tuple[int, int]], updates: NDArray[np.int32]) -> None:
        idle = ((len(self._step.tables) - 1) * self._step.tables.shape[1], self._spare)
        updates[:] = np.array(changed + [idle] * (UPDATES - len(changed)), np.int32).reshape(-1)

    def _take_slot(self, here: set[SeqId]) -> int:
        if not self._free:
            self.release([next(seq_id for seq_id in self._slot if seq_id not in here)])
        return self._free.pop()

    def _trunks(self, lone: list[ScheduledSequence]) -> tuple[list[tuple[int, int, int, int]], list[int], list[int]]:
        """Shared splits among rows sorted by table: work items, readers, and each row's first split of its own."""
        items: list[tuple[int, int, int, int]] = []
        readers = list(range(len(lone)))
        skipped = [0] * len(lone)
        size, most = SPLIT // BLOCK, tile_tokens(self._group)
        first = 0
        while first < len(lone):
            table = lone[first].block_table
            end, shared = first + 1, lone[first].start // SPLIT  # whole splits that the row's own token is not in
            while end < len(lone) and shared:
                both = min(shared, lone[end].start // SPLIT)
                other = lone[end].block_table
                while both and table[: both * size] != other[: both * size]:
                    both -= 1
                if not both:
                    break
                shared, end = both, end + 1
            if end - first >= _LEAST_TRUNK and shared:
                slot = first  # named by row until slots are given; see below
                for split in range(shared):
                    for begin in range(first, end, most):
                        items.append((slot, split, begin, min(most, end - begin)))
                skipped[first:end] = [shared] * (end - first)
            first = end
        if items:
            here = {s.seq_id for s in lone}
            for s in lone:
                if s.seq_id not in self._slot:
                    self._slot[s.seq_id], self._known[s.seq_id] = self._take_slot(here), ()
            items = [(self._slot[lone[row].seq_id], *rest) for row, *rest in items]  # type: ignore[misc]
        return items, readers, skipped

    # -- from the device to an output ---------------------------------------------------------------------------

    def _fetch(self, chosen: torch.Tensor, count: int) -> torch.Tensor:
        """A copy of the chosen tokens that is on its way to the host."""
        if not self._cuda:
            return chosen[:count].clone()
        host = torch.empty(count, dtype=torch.int32, pin_memory=True)
        host.copy_(chosen[:count], non_blocking=True)
        return host

    def _output(
        self,
        plan: StepPlan,
        lone: list[ScheduledSequence],
        fed: list[ScheduledSequence],
        links: list[torch.Tensor],
    ) -> StepOutput:
        at: dict[SeqId, int] = {}  # the first of a sequence's wanted rows
        total = 0
        for s in _wanting(lone, fed):
            at[s.seq_id] = total
            total += s.rows
        logits = None
        top = {}
        rows = [at[s.seq_id] + i for s in plan.sequences if s.want is Want.LOGITS for i in range(s.rows)]
        few = [s for s in plan.sequences if s.want is Want.TOP]
        device = self._step.buffers.logits
        if rows:
            logits = device[torch.tensor(rows, device=device.device)].cpu().numpy()
        if few:
            top = largest(device, [at[s.seq_id] for s in few], [s.top for s in few], [s.seq_id for s in few])
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        tokens = [link.tolist() for link in links]
        argmax = {}
        for s in plan.sequences:
            if s.want is Want.ARGMAX:
                first = at[s.seq_id]
                found = [link[first] for link in tokens] if s.rows == 1 else tokens[0][first : first + s.rows]
                argmax[s.seq_id] = until_invalid(found)
        return StepOutput(argmax, logits, top)

    # -- one step ahead -----------------------------------------------------------------------------------------

    def _run_ahead(self, plan: StepPlan, lone: list[ScheduledSequence], shape: Shape, output: StepOutput) -> None:
        """Start the step that follows if all go on: its tokens and positions are on the device already."""
        self._ahead = None
        if not self._cuda or not shape.feeds:
            return
        positions = [s.start + plan.chain for s in lone]
        if max(positions) > shape.tokens - 1 or any(
            at >= len(s.block_table) * BLOCK for at, s in zip(positions, lone, strict=True)
        ):
            return
        last = [output.argmax[s.seq_id][-1] for s in lone]
        rows = tuple((s.seq_id, at) for s, at in zip(lone, positions, strict=True))
        self._start_ahead(shape, rows, tuple(s.block_table for s in lone), last)

    def _start_ahead(
        self,
        shape: Shape,
        rows: tuple[tuple[SeqId, int], ...],
        tables: tuple[tuple[BlockId, ...], ...],
        tokens: list[int],
    ) -> None:
        self._step.run(shape)
        chosen = self._fetch(self._step.buffers.chosen, shape.wanted)
        done = torch.cuda.Event()
        done.record()
        self._ahead = _Ahead(shape, rows, tables, tokens, chosen, done)

    def _take_ahead(self, plan: StepPlan) -> StepOutput | None:
        """The outcome of the step that runs already, if it is this plan's; starts the one after it first."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or plan.copies or plan.chain != 1 or len(plan.sequences) != len(ahead.rows):
            return None
        mine = {s.seq_id: s for s in plan.sequences}
        for (seq_id, at), table, token in zip(ahead.rows, ahead.tables, ahead.tokens, strict=True):
            s = mine.get(seq_id)
            if s is None or s.start != at or s.tokens != (token,) or s.want is not Want.ARGMAX:
                return None
            if s.block_table is not table and s.block_table[: len(table)] != table:
                return None
        lone = [mine[seq_id] for seq_id, _ in ahead.rows]
        rows = tuple((seq_id, at + 1) for seq_id, at in ahead.rows)
        shape = ahead.shape
        follows = max(at for _, at in rows) < shape.tokens
        follows = follows and all(at < len(s.block_table) * BLOCK for s, (_, at) in zip(lone, rows, strict=True))
        if follows:
            changed = [entry for s in lone for entry in self._changes(s)]
            if len(changed) <= UPDATES:
                if changed:
                    self._step.inputs(shape).send_updates(lambda updates: self._write_updates(changed, updates))
                self._start_ahead(shape, rows, tuple(s.block_table for s in lone), [])
            else:
                self._forget_tables()
        ahead.done.synchronize()
        chosen = ahead.chosen.tolist()
        if self._ahead is not None:
            self._ahead.tokens = chosen[: len(rows)]
        return StepOutput({seq_id: (chosen[i],) for i, (seq_id, _) in enumerate(ahead.rows)})


def bucket(count: int, least: int = 1) -> int:
    """The power of two that a number of rows is filled up to; 0 stays 0."""
    return 0 if count == 0 else max(least, 1 << (count - 1).bit_length())


def _wanting(lone: list[ScheduledSequence], fed: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """The sequences that want logits, in the order of their rows."""
    return [s for s in (*lone, *fed) if s.want is not Want.NOTHING]
