"""Who computes which tokens in the next step, and where their KV goes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from shoal.config import EngineConfig
from shoal.core.kv import KVCacheManager
from shoal.core.leaders import Leaders
from shoal.core.nodes import Match
from shoal.core.pacing import Pacer
from shoal.core.queue import WaitingQueue
from shoal.core.sequence import Progress, Sequence, Status
from shoal.errors import KVBudgetError, ShoalError
from shoal.runners.plan import BlockId, ModelSpec, ScheduledSequence, SeqId, StepPlan, Want
from shoal.types import FinishReason, Namespace


class Scheduler:
    """Plans steps and takes their outcome into the books.

    `schedule` -> run the plan -> `commit` (or `fail`); aborts and additions come in between. All of it on one
    thread; times are on the caller's clock. What happened to sequences collects in an outbox, `take_progress`:
    each sequence ends in exactly one entry with a `finish`. Sequences whose per-sequence state a runner should
    drop collect in `take_released`.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self.spec = spec
        self.config = config
        self.kv = KVCacheManager(spec, config)
        self.queue = WaitingQueue(config.ageing_s)
        self.pacer = Pacer(config.max_stall_ms)
        self.running: list[Sequence] = []  # in the order of admission
        self.pinned: dict[SeqId, list[BlockId]] = {}  # blocks held for prefixes, by the sequence that computed them
        self.preemptions = 0
        self._by_id: dict[SeqId, Sequence] = {}
        self._deadlines: list[tuple[float, SeqId]] = []
        self._leaders = Leaders(self.kv)
        self._progress: list[Progress] = []
        self._released: list[SeqId] = []
        self._max_top = min(spec.max_top, spec.vocab_size - 1)
        self._rows = 0  # of logits that a step may still give to sequences that are scored
        self._step = 0
        self._admissions = 0

    def set_max_stall(self, ms: float) -> None:
        """Change the stall bound for the steps to come."""
        self.pacer.max_stall_ms = ms

    # -- coming and going ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when nothing waits or runs."""
        return not self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def leaders(self) -> set[SeqId]:
        """Sequences whose blocks-to-be others may wait for."""
        return self._leaders.seq_ids

    def add(self, seq: Sequence) -> None:
        """Put a new sequence in line. It must be able to fit the pool when it is alone."""
        self._by_id[seq.seq_id] = seq
        self.queue.join(seq)
        self.kv.announce(seq)
        self._note_deadline(seq)
        self.queue.push(seq)

    def abort(
        self, seq_id: SeqId, reason: FinishReason = FinishReason.ABORTED, error: ShoalError | None = None
    ) -> None:
        """End a sequence wherever it stands. Nothing happens when it has ended already."""
        seq = self._by_id.get(seq_id)
        if seq is not None:
            self._end(seq, reason, error)

    def take_progress(self) -> list[Progress]:
        """What happened since the last call."""
        taken, self._progress = self._progress, []
        return taken

    def take_released(self) -> list[SeqId]:
        """Sequences that left the batch, ended or preempted, since the last call."""
        taken, self._released = self._released, []
        return taken

    def _end(
        self, seq: Sequence, reason: FinishReason, error: ShoalError | None = None, progress: Progress | None = None
    ) -> None:
        """The only way out: leave queue or batch, free what was held, and say so once."""
        if seq.status is Status.RUNNING:
            self._leave_batch(seq)
        else:
            self.queue.remove(seq)
            self.kv.withdraw(seq)
        seq.status = Status.FINISHED
        self.queue.leave(seq)
        del self._by_id[seq.seq_id]
        if progress is None:
            progress = Progress(seq, (), seq.checker.flush(), reason, error)
        self._progress.append(progress)

    def _leave_batch(self, seq: Sequence) -> None:
        self.kv.give_back(seq)
        self.running.remove(seq)
        self._leaders.unregister(seq)
        self._released.append(seq.seq_id)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue; its tokens stay, its KV goes, its cached prefix stays as long as there is room."""
        self._leave_batch(seq)
        seq.status = Status.WAITING
        seq.computed = 0
        seq.preemptions += 1
        self.preemptions += 1
        self.kv.announce(seq)
        self.queue.push(seq)

    def defer(self, deferring: bool) -> None:
        """Let waiting sequences of class low join no more, or again; those that run go on."""
        self.queue.deferring = deferring

    def unpin(self, seq_id: SeqId) -> None:
        """Let go of a prefix that a `prefill_only` sequence computed; its blocks stay cached while there is room."""
        self.kv.tree.release(self.pinned.pop(seq_id, []))

    def expect(self, tokens: tuple[int, ...], namespace: Namespace, due: int) -> None:
        """A prefix will be needed in about step `due`: it is evicted last. `cancel_expectation` takes that back."""
        if self.config.prefix_sharing:
            self.kv.tree.announce(self.kv.tree.path_hashes(tokens, namespace), due)

    def cancel_expectation(self, tokens: tuple[int, ...], namespace: Namespace, due: int) -> None:
        """Take back what `expect` was told with the same arguments."""
        if self.config.prefix_sharing:
            self.kv.tree.withdraw(self.kv.tree.path_hashes(tokens, namespace), due)

    def share(self, seq: Sequence) -> None:
        """Put all KV a running sequence has so far within reach of others, its last block included."""
        if seq.status is Status.RUNNING:
            self.kv.index(seq, tail=True)

    def preempt_all(self, *, drop_cached: bool = False) -> None:
        """Send the whole batch back to the queue; with `drop_cached` give up all KV that is not pinned."""
        for seq in list(self.running):
            self._preempt(seq)
        if drop_cached:
            self.kv.drop_cached()

    def close(self) -> None:
        """Nothing follows."""

    # -- planning -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Ends what is past its time, first."""
        self._expire(now)
        if len(self.queue):
            self._make_room(now)
        planned: list[ScheduledSequence] = []
        in_order = sorted(self.running, key=_urgency)
        chain = self._chain(in_order)
        for seq in in_order:
            if seq.status is Status.RUNNING and seq.decoding and self._ensure(seq, len(seq.tokens) + chain - 1):
                want, top = self._want(seq)
                fed = (seq.tokens[-1],)
                planned.append(ScheduledSequence(seq.seq_id, fed, seq.computed, seq.table, want, 1, None, None, top))
        decodes = len(planned)
        self._rows = max(self.spec.max_rows, self.config.max_batch)
        budget = max(self.config.max_step_tokens - decodes, 0)
        if decodes:
            budget = self.pacer.prompt_budget(budget)
        copies: list[tuple[BlockId, BlockId]] = []
        if decodes < len(self.running) or len(self.queue):
            budget = self._continue_prefills(in_order, planned, budget, self._next_to_join(now) is not None)
            copies = self._admit(now, planned, budget)
        if not planned:
            return None
        self._step += 1
        return StepPlan(self._step, tuple(planned), tuple(copies), chain if len(planned) == decodes else 1)

    def _note_deadline(self, seq: Sequence) -> None:
        if seq.deadline == math.inf:
            return
        if len(self._deadlines) > 2 * len(self._by_id) + 64:  # most are of sequences that ended before they were due
            kept = ((due, seq_id) for due, seq_id in self._deadlines if seq_id in self._by_id)
            self._deadlines = [(due, seq_id) for due, seq_id in kept if self._by_id[seq_id].deadline == due]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (seq.deadline, seq.seq_id))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq_id = heapq.heappop(self._deadlines)
            seq = self._by_id.get(seq_id)
            if seq is not None and seq.deadline <= now:
                self._end(seq, FinishReason.TIMEOUT)

    def _make_room(self, now: float) -> None:
        """Preempt a lower class for a waiting higher one, when the batch or the blocks are full."""
        while self.running:
            first = next((s for s in self.queue.candidates(now) if not s.waiting_for_leader), None)
            victim = max(self.running, key=_urgency)
            if first is None or first.rank >= victim.aged_rank:
                return
            needed = self.kv.blocks_for(len(first.tokens) + 1)
            if len(self.running) < self.config.max_batch and needed <= self.kv.available:
                return
            self._preempt(victim)

    def _chain(self, in_order: list[Sequence]) -> int:
        """How many greedy steps can be chained: only when all decode, all are greedy, and nobody waits to join."""
        longest = min(self.config.decode_chunk, self.spec.max_chain)
        if longest <= 1 or len(self.queue) or not all(s.decoding and s.greedy for s in in_order):
            return 1
        return max(1, min(longest, *(s.remaining for s in in_order))) if in_order else 1

    def _feed(self, seq: Sequence, count: int) -> ScheduledSequence:
        start = seq.computed
        end = start + count
        last = end == len(seq.tokens) and not seq.prefill_only
        (want, top), rows = self._want(seq) if last else (Want.NOTHING, 0), 1
        if seq.scoring and end > seq.scored:
            want, top, rows = Want.LOGITS, 0, end - max(start, seq.scored)
            self._rows -= rows
        generated = max(0, min(end - seq.prompt_len, count))
        load, seq.load = seq.load, None
        save = self.kv.reserve(seq, end) if seq.marks else None
        fed = tuple(seq.tokens[start:end])
        return ScheduledSequence(seq.seq_id, fed, start, seq.table, want, generated, load, save, top, rows)

    def _want(self, seq: Sequence) -> tuple[Want, int]:
        """What the next token of a sequence is chosen from, and for TOP how many logits."""
        if seq.greedy:
            return Want.ARGMAX, 0
        return (Want.TOP, seq.top) if 0 < seq.top <= self._max_top else (Want.LOGITS, 0)

    def _continue_prefills(
        self, in_order: list[Sequence], planned: list[ScheduledSequence], budget: int, joining: bool
    ) -> int:
        """Share the prompt budget among running prefills, and with a newcomer if there is one; returns what is left."""
        pending = [s for s in in_order if s.status is Status.RUNNING and s.behind and not s.decoding]
        pending.sort(key=lambda s: (s.aged_rank, self.queue.service(s) if s.group else 0.0, -s.path, s.order))
        others = sum(s.behind for s in pending) + (budget if joining else 0)
        for seq in pending:
            others -= seq.behind
            chunk = self._chunk(seq, budget, others)
            if chunk and self._ensure(seq, seq.computed + chunk):
                planned.append(self._feed(seq, chunk))
                budget -= chunk
        return budget

    def _chunk(self, seq: Sequence, budget: int, others: int) -> int:
        """Prompt tokens for a sequence when those behind it want `others`: a long one leaves half the budget to them.

        Of one that is scored no more than there are rows of logits for, and none behind the prompt.
        """
        chunk = min(seq.stride, max(budget - others, (budget + 1) // 2))
        if not seq.scoring:
            return chunk
        rows = min(self.spec.max_rows, self._rows)
        return min(chunk, max(seq.scored - seq.computed, 0) + rows, seq.prompt_len - seq.computed)

    def _admit(self, now: float, planned: list[ScheduledSequence], budget: int) -> list[tuple[BlockId, BlockId]]:
        """Let waiting sequences join while rows, prompt budget and blocks last."""
        copies: list[tuple[BlockId, BlockId]] = []
        seq = self._next_to_join(now)
        while seq is not None and budget > 0 and self._join(seq, now):
            if seq.copy_source is not None:
                copies.append((seq.copy_source, seq.blocks[seq.shared_blocks]))
            following = self._next_to_join(now)
            chunk = self._chunk(seq, budget, budget if following is not None else 0)
            planned.append(self._feed(seq, chunk))
            budget -= chunk
            seq = following if following is None or self._ready(following) else self._next_to_join(now)
        return copies

    def _next_to_join(self, now: float) -> Sequence | None:
        """The first in line that need not wait for a leader's blocks, if a row is free; looks at a bounded number."""
        if len(self.running) >= self.config.max_batch or not len(self.queue):
            return None
        for looked, seq in enumerate(self.queue.candidates(now)):
            if looked >= 8 * self.config.max_batch:
                return None
            if self._ready(seq):
                return seq
        return None

    def _ready(self, seq: Sequence) -> bool:
        """True when nobody is about to compute blocks it shares. One that is scored shares none and needs rows."""
        if seq.scoring:
            return self._rows > 0
        return not seq.waiting_for_leader and not self._leaders.follow(seq)

    def _join(self, seq: Sequence, now: float) -> bool:
        """Admit one sequence with what the tree has of it; False, with nothing changed, when blocks do not suffice."""
        match = self.kv.claim(seq, spare=len(self.running))  # each running one may need one more block soon
        if match is None:
            if not self.running:
                self._refuse(seq)
            return False
        self.queue.remove(seq)
        self.kv.withdraw(seq)
        seq.status = Status.RUNNING
        self._admissions += 1
        seq.order = self._admissions
        seq.aged_rank = self.queue.rank(seq, now)
        if seq.admitted_at is None:
            self._first_admission(seq, match, now)
        self._note_sharing(seq)
        self.running.append(seq)
        self._leaders.register(seq)
        return True

    def _first_admission(self, seq: Sequence, match: Match, now: float) -> None:
        seq.admitted_at = now
        seq.cached_tokens = match.tokens
        seq.miss = self.kv.miss_reason(seq, match)
        if seq.timeout < math.inf:
            seq.deadline = min(seq.deadline, now + seq.timeout)
            self._note_deadline(seq)

    def _note_sharing(self, seq: Sequence) -> None:
        if not seq.shared_blocks:
            return
        for other in self.running:
            if other.blocks and other.blocks[0] == seq.blocks[0]:
                other.shared_with += 1
                seq.shared_with += 1

    def _refuse(self, seq: Sequence) -> None:
        """Nothing runs and yet it does not fit: pinned prefixes hold what it would need."""
        error = KVBudgetError(
            "the request does not fit beside the pinned prefixes",
            param="prompt",
            value=len(seq.tokens),
            limit=self.kv.available * self.spec.block_size,
            hint="release pinned prefixes or raise kv_memory",
        )
        self._end(seq, FinishReason.ERROR, error)

    def _ensure(self, seq: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for its first `tokens` positions; preempt the lowest class, latest first, for them.

        False when that was the sequence itself. Callers go from the most to the least urgent, so that no victim
        is in the plan already.
        """
        while not self.kv.grow(seq, tokens):
            victim = max(self.running, key=_urgency)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    # -- taking the outcome into the books ----------------------------------------------------------------------

    def commit(self, plan: StepPlan, sampled: Mapping[SeqId, tuple[int, ...]], now: float, ms: float) -> None:
        """The plan was executed in `ms`, and `sampled` holds the next token(s) of every sequence that wanted any."""
        decodes = chunked = 0  # sequences that fed one output token; tokens of all other sequences
        for item in plan.sequences:
            seq = self._by_id.get(item.seq_id)
            fed = len(item.tokens)
            if seq is None:  # ended while its row was sampled
                chunked += fed - item.generated
                continue
            decoding = seq.decoding
            if decoding:
                decodes += 1
            else:
                chunked += fed
            if seq.copy_source is not None:
                self.kv.copied(seq)
            seq.computed_tokens += fed
            self.queue.serve(seq, fed)
            self._advance(seq, fed, sampled.get(item.seq_id, ()), plan.chain, prefill=not decoding)
        if plan.chain == 1:
            self.pacer.observe(decodes, chunked, ms)
        self._expire(now)

    def _advance(self, seq: Sequence, fed: int, tokens: tuple[int, ...], chain: int, *, prefill: bool) -> None:
        seq.computed += fed
        seq.scored = max(seq.scored, seq.computed)
        while seq.marks and seq.marks[0] <= seq.computed:  # set for a follower when this chunk was planned already
            seq.marks.pop(0)
        if prefill:
            self.kv.index(seq, tail=True)
            self.kv.saved(seq)
            if seq.behind == 0:
                self._leaders.unregister(seq)
        if seq.prefill_only and seq.behind == 0:
            self.pinned[seq.seq_id] = list(seq.blocks)
            self.kv.pool.hold(seq.blocks)
            self._end(seq, FinishReason.STOP)
            return
        if seq.max_tokens == 0 and seq.behind == 0:  # asked only what its prompt is worth
            self._end(seq, FinishReason.LENGTH)
            return
        if not tokens:
            return
        progress = seq.push(tokens, chain)
        finish = progress.finish
        if finish is not None:
            self._end(seq, finish, progress=progress)
            return
        if not prefill and seq.computed // self.spec.block_size > seq.indexed:
            self.kv.index(seq, tail=False)
        self._progress.append(progress)

    def fail(self, plan: StepPlan, error: ShoalError) -> None:
        """The plan's pass failed: every sequence in it ends with `error`; KV it may have written is not trusted."""
        for item in plan.sequences:
            self.fail_sequence(item.seq_id, error)

    def fail_sequence(self, seq_id: SeqId, error: ShoalError) -> None:
        """End one sequence whose KV cannot be trusted; the tree forgets every block it computed itself."""
        seq = self._by_id.get(seq_id)
        if seq is None:
            return
        self.kv.invalidate(seq)
        self._end(seq, FinishReason.ERROR, error)


def _urgency(seq: Sequence) -> tuple[int, int]:
    return seq.aged_rank, seq.order
