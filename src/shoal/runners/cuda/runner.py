"""The runner over Triton kernels: plans become rows on the device, and a step is one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.cuda.access import DeviceBlocks
from shoal.runners.cuda.ahead import StepAhead, room_of
from shoal.runners.cuda.choices import DeviceRows, largest, until_invalid
from shoal.runners.cuda.model import DeviceModel
from shoal.runners.cuda.states import States
from shoal.runners.cuda.step import BLOCK, SPLIT, UPDATES, Shape, Step, readers_at_once, tile_tokens
from shoal.runners.plan import BlockId, ModelSpec, ScheduledSequence, SeqId, StepOutput, StepPlan, Want

_FEW_CHANGES = 8  # table entries of one sequence that go with the step's inputs; more go as a row
_LEAST_TRUNK = 4  # rows that make it worth to read a shared split in a program of its own


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
        self._ahead: StepAhead | None = None
        self._group = max(a.heads // a.kv_heads for a in model.attentions)
        self._cuda = self._runs_ahead = model.device.type == "cuda"

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
        if self._ahead is not None:
            self._ahead.gone.update(seq_ids)
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
        if not hasattr(self, "_step"):
            raise RunnerError("the runner is closed", hint="load the model again")
        ahead, self._ahead = self._ahead, None
        compute: Callable[[StepPlan], StepOutput]  # a plan that runs already follows from one that was checked
        if ahead is not None and ahead.is_plan(plan):
            compute = partial(self._take_ahead, ahead)
        elif ahead is not None and (rows := ahead.rows_of(plan)) is not None:
            compute = partial(self._take_part, ahead, rows)
        else:
            self._check(plan)
            compute = self._execute
        captured = self._step.captured
        try:
            output = compute(plan)
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
        return output if self._step.captured == captured else replace(output, once=True)

    # -- from a plan to rows ------------------------------------------------------------------------------------

    def _check(self, plan: StepPlan) -> None:
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
        if self._states is not None:
            self._states.begin(plan.sequences)
        lone, fed, shape = self._send(plan)
        links = []
        for _ in range(plan.chain):
            self._step.run(shape)
            links.append(self._fetch(self._step.buffers.chosen, shape.wanted))
        output = self._output(plan, lone, fed, links)
        if self._runs_ahead and shape.feeds:  # the next tokens and positions are on the device already
            self._begin_ahead(plan, lone, shape, [output.argmax[s.seq_id][-1] for s in plan.sequences])
        return output

    def _send(self, plan: StepPlan) -> tuple[list[ScheduledSequence], list[ScheduledSequence], Shape]:
        """Bring a step's inputs to the device; gives its sequences of one row and of many, in the order of rows."""
        lone = [s for s in plan.sequences if len(s.tokens) == 1]
        fed = [s for s in plan.sequences if len(s.tokens) > 1]
        lone.sort(key=lambda s: s.block_table)  # readers of one trunk become neighbours
        shape = self._fill(plan, lone, fed)
        self._step.inputs(shape).send()
        return lone, fed, shape

    def _fill(self, plan: StepPlan, lone: list[ScheduledSequence], fed: list[ScheduledSequence]) -> Shape:
        """Write the step's inputs to the host's buffer of its shape."""
        wanted = sum(s.rows for s in plan.sequences if s.want is not Want.NOTHING)
        trunks, skipped = self._trunks(lone)
        if not trunks:
            lone.sort(key=lambda s: -s.start)  # long ones begin first: programs that walk a row end together then
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
            logits=any(s.want in (Want.LOGITS, Want.TOP, Want.DRAW) for s in plan.sequences),
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

    def _trunks(self, lone: list[ScheduledSequence]) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Shared splits among rows sorted by table: work items, and each row's first split of its own."""
        items: list[tuple[int, int, int, int]] = []
        skipped = [0] * len(lone)
        size, most = SPLIT // BLOCK, readers_at_once(self._group)
        first = 0
        while first < len(lone):
            table = lone[first].block_table
            end, shared = first + 1, lone[first].start // SPLIT  # whole splits that the row's own token is not in
            while end < len(lone) and shared:
                both = min(shared, lone[end].start // SPLIT)
                other = lone[end].block_table
                if table[0] != other[0]:
                    break
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
        return items, skipped

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
        drawing = {s.seq_id: at[s.seq_id] for s in plan.sequences if s.want is Want.DRAW}
        return StepOutput(argmax, logits, top, rows=DeviceRows(device, drawing) if drawing else None)

    # -- one step ahead -----------------------------------------------------------------------------------------

    def _begin_ahead(self, plan: StepPlan, lone: list[ScheduledSequence], shape: Shape, tokens: list[int]) -> None:
        """Start the step that follows a plan if all of it go on and feed `tokens`; `lone` in the order of its rows."""
        sequences = plan.sequences
        starts = tuple([s.start + plan.chain for s in sequences])
        tables = tuple([s.block_table for s in sequences])
        room = room_of(starts, tables, self._spec.context_length)
        if room < 0 or max(starts) >= shape.tokens:
            return
        row_of = {s.seq_id: row for row, s in enumerate(lone)}
        rows = [row_of[s.seq_id] for s in sequences]
        fed = tuple([(token,) for token in tokens])
        seq_ids = tuple([s.seq_id for s in sequences])
        self._ahead = StepAhead(shape, seq_ids, starts, tables, fed, rows, room, *self._start_ahead(shape))

    def _start_ahead(self, shape: Shape) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        self._step.run(shape)
        chosen = self._fetch(self._step.buffers.chosen, shape.wanted)
        if not self._cuda:
            return chosen, None
        done = torch.cuda.Event()
        done.record()
        return chosen, done

    def _take_ahead(self, ahead: StepAhead, plan: StepPlan) -> StepOutput:
        """The outcome of the step that runs already, which is this plan's; starts the one after it first."""
        shape, room = ahead.shape, ahead.room
        starts = tuple([start + 1 for start in ahead.starts])
        tables = tuple([s.block_table for s in plan.sequences])
        if tables != ahead.tables:
            room = room_of(ahead.starts, tables, self._spec.context_length)
        following = None
        if room > 0 and max(starts) < shape.tokens:
            changed = [] if tables == ahead.tables else [entry for s in plan.sequences for entry in self._changes(s)]
            if len(changed) > UPDATES:
                self._forget_tables()
            else:
                if changed:
                    self._step.inputs(shape).send_updates(lambda updates: self._write_updates(changed, updates))
                started = self._start_ahead(shape)
                following = StepAhead(shape, ahead.seq_ids, starts, tables, (), ahead.rows, room - 1, *started)
        found = ahead.take()
        tokens = tuple([(found[row],) for row in ahead.rows])
        if following is not None:
            following.tokens = tokens
            self._ahead = following
        return StepOutput(dict(zip(ahead.seq_ids, tokens, strict=True)))

    def _take_part(self, ahead: StepAhead, rows: list[int], plan: StepPlan) -> StepOutput:
        """As `_take_ahead` where some sequences have ended: what the others got stands, as rows depend on no other.

        The step after it is another one, so it waits for this one's tokens.
        """
        found = ahead.take()
        tokens = [found[row] for row in rows]
        following = [
            s._replace(tokens=(max(token, 0),), start=s.start + 1)
            for s, token in zip(plan.sequences, tokens, strict=True)
        ]
        starts, tables = [s.start for s in following], [s.block_table for s in following]
        if room_of(starts, tables, self._spec.context_length) >= 0:
            lone, _, shape = self._send(StepPlan(plan.step, tuple(following)))
            self._begin_ahead(plan, lone, shape, tokens)
        return StepOutput({s.seq_id: (token,) for s, token in zip(plan.sequences, tokens, strict=True)})


def bucket(count: int, least: int = 1) -> int:
    """The power of two that a number of rows is filled up to; 0 stays 0."""
    return 0 if count == 0 else max(least, 1 << (count - 1).bit_length())


def _wanting(lone: list[ScheduledSequence], fed: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """The sequences that want logits, in the order of their rows."""
    return [s for s in (*lone, *fed) if s.want is not Want.NOTHING]
