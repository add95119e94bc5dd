"""Who computes which tokens in the next step, and where their KV goes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter

from shoal.config import EngineConfig
from shoal.core.commands import (
    Abort,
    Add,
    CancelExpectation,
    Command,
    Commit,
    Defer,
    Expect,
    Fail,
    Forget,
    Hold,
    Keep,
    KeepCached,
    PreemptAll,
    PreemptLow,
    Restore,
    Schedule,
    SetMaxRunning,
    SetMaxStall,
    Share,
    Unpin,
)
from shoal.core.deadlines import Deadlines
from shoal.core.draft import Drafter, why_not
from shoal.core.keeping import Keeping
from shoal.core.kv import KVCacheManager, Restored
from shoal.core.leaders import Leaders
from shoal.core.nodes import Match
from shoal.core.pacing import Pacer
from shoal.core.queue import WaitingQueue
from shoal.core.sequence import Ended, Sequence, Status
from shoal.errors import KVBudgetError, ShoalError
from shoal.runners.plan import BlockId, ModelSpec, ScheduledSequence, SeqId, StepPlan, Want
from shoal.types import FinishReason, Namespace, Priority, SamplingParams

_urgency = attrgetter("urgency")


class Scheduler:
    """Plans steps and takes their outcome into the books.

    `Schedule` -> run the plan -> `Commit` (or `Fail`); other commands come in between. All of it on one thread; times
    are on the caller's clock. Each sequence ends exactly once, which `take_ended` tells. Sequences whose per-sequence
    state a runner should drop collect in `take_released`.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, log: Callable[[Command], None] | None = None) -> None:
        """`log` is told of every command before it is carried out."""
        self.spec = spec
        self.config = config
        self.max_running = config.max_batch  # fewer while a governor holds the batch narrow
        self.kv = KVCacheManager(spec, config)
        self.queue = WaitingQueue(config.ageing_s)
        self.pacer = Pacer(config.max_stall_ms)
        self.running: list[Sequence] = []  # in the order of admission
        self.pinned: dict[SeqId, list[BlockId]] = {}  # blocks held for prefixes, by the sequence that computed them
        self.preemptions = 0
        self.drafted = 0  # tokens that were tried, and of these the ones that were right
        self.accepted = 0
        self._drafter = Drafter(spec.max_rows) if config.speculation and why_not(spec) is None else None
        self._by_id: dict[SeqId, Sequence] = {}
        self._deadlines = Deadlines(self._by_id)
        self._leaders = Leaders(self.kv)
        self._keeping = Keeping(self.kv.tree.eviction, self.kv.pool.total)
        self.now = 0.0  # of the command that is carried out, or the last that had a time
        self._ended: list[Ended] = []
        self._released: list[SeqId] = []
        self._restored = Restored()
        self._rows = 0  # of logits that a step may still give to sequences that are scored
        self._step = 0
        self._admissions = 0
        self._log = log

    def apply(self, command: Command) -> StepPlan | None:
        """Carry out one command: the only way to change a scheduler. `Schedule` gives a plan, or None."""
        if self._log is not None:
            self._log(command)
        match command:
            case Schedule():
                return self._schedule(command.now)
            case Commit():
                self._commit(command)
            case Add():
                self._add(command)
            case Abort():
                self._abort(command)
            case Fail():
                self._fail(command)
            case Share():
                self._share(command.seq_id)
            case Unpin():
                self.kv.unpin(command.seq_id, self.pinned.pop(command.seq_id, []))
            case Expect() | CancelExpectation():
                self._announce(command)
            case Keep():
                self._keep(command.tokens, command.namespace, command.until)
            case Hold():
                self._hold(command)
            case Restore():
                self._restore(command)
            case Forget():
                self.kv.tree.forget(command.blocks)
            case PreemptAll():
                self._preempt_all(drop_cached=command.drop_cached)
            case PreemptLow():
                for seq in [seq for seq in self.running if seq.spec.priority is Priority.LOW]:
                    self._preempt(seq)
            case KeepCached():
                self.kv.keep_cached(command.keeping)
            case Defer():
                self.queue.deferring = command.deferring
            case SetMaxRunning():
                self.max_running = command.count
            case SetMaxStall():
                self.pacer.max_stall_ms = command.ms
        return None

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

    def sequence(self, seq_id: SeqId) -> Sequence:
        """A sequence that waits or runs. KeyError when it has ended."""
        return self._by_id[seq_id]

    def take_ended(self) -> list[Ended]:
        """Sequences that ended since the last call."""
        taken, self._ended = self._ended, []
        return taken

    def take_released(self) -> list[SeqId]:
        """Sequences that left the batch, ended or preempted, since the last call."""
        taken, self._released = self._released, []
        return taken

    def take_restored(self) -> Restored:
        """The blocks and the checkpoint that the last `Restore` found room for; they are to be written at once."""
        taken, self._restored = self._restored, Restored()
        return taken

    def _add(self, command: Add) -> None:
        seq = Sequence(
            command.seq_id, command.spec, arrival=command.arrival, written=command.written, scored=command.scored
        )
        seq.want = self._want(command.spec.sampling)
        self._by_id[seq.seq_id] = seq
        self.queue.join(seq)
        self.kv.announce(seq)
        self._deadlines.note(seq)
        self.queue.push(seq)

    def _want(self, sampling: SamplingParams) -> tuple[Want, int]:
        """What the next token of a request is chosen from, and for TOP how many logits."""
        if sampling.greedy:
            return Want.ARGMAX, 0
        if self.spec.draws and sampling.draws:
            return Want.DRAW, 0
        most = min(self.spec.max_top, self.spec.vocab_size - 1)
        return (Want.TOP, sampling.top) if 0 < sampling.top <= most else (Want.LOGITS, 0)

    def _abort(self, command: Abort) -> None:
        seq = self._by_id.get(command.seq_id)
        if seq is not None:
            self._end(seq, command.reason, command.error)

    def _fail(self, command: Fail) -> None:
        for seq_id in command.seq_ids:
            seq = self._by_id.get(seq_id)
            if seq is not None:
                self.kv.invalidate(seq)
                self._end(seq, FinishReason.ERROR, command.error)

    def _end(self, seq: Sequence, reason: FinishReason, error: ShoalError | None = None) -> None:
        """The only way out: leave queue or batch, free what was held, and say so once."""
        if seq.spec.keep_s and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._keep(self.kv.tree_tokens(seq), seq.spec.namespace, self.now + seq.spec.keep_s)
        if seq.status is Status.RUNNING:
            self._leave_batch(seq)
        else:
            self.queue.remove(seq)
            self.kv.withdraw(seq)
        seq.status = Status.FINISHED
        if self._drafter is not None:
            self._drafter.leave(seq)
        self.queue.leave(seq)
        del self._by_id[seq.seq_id]
        self._ended.append(Ended(seq, reason, error))

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

    def _announce(self, command: Expect | CancelExpectation) -> None:
        if not self.config.prefix_sharing:
            return
        hashes = self.kv.tree.path_hashes(command.tokens, command.namespace)
        eviction = self.kv.tree.eviction
        tell = eviction.announce if isinstance(command, Expect) else eviction.withdraw
        tell(hashes, command.due)

    def _keep(self, tokens: Seq[int], namespace: Namespace, until: float) -> None:
        if self.config.prefix_sharing:
            self._keeping.keep(self.kv.tree.path_hashes(tokens, namespace), until)

    def _share(self, seq_id: SeqId) -> None:
        seq = self._by_id.get(seq_id)
        if seq is not None and seq.status is Status.RUNNING:
            self.kv.index(seq, tail=True)

    def _hold(self, command: Hold) -> None:
        seq = self._by_id.get(command.seq_id)
        if seq is not None and seq.status is Status.WAITING:
            seq.held = command.held

    def _restore(self, command: Restore) -> None:
        seq = self._by_id.get(command.seq_id)
        if seq is None or seq.status is not Status.WAITING:
            return
        spare = len(self.running)  # each running one may need one more block soon
        self._restored = self.kv.restore(seq, command.first, command.count, spare=spare, state=command.state)
        tokens = len(self._restored.blocks) * self.kv.block_size if seq.admitted_at is None else 0
        seq.restored[command.tier] = seq.restored.get(command.tier, 0) + tokens

    def _preempt_all(self, *, drop_cached: bool) -> None:
        for seq in list(self.running):
            self._preempt(seq)
        if drop_cached:
            self.kv.drop_cached()

    # -- planning -----------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Ends what is past its time, first."""
        self._expire(now)
        if len(self.queue):
            self._make_room(now)
        planned: list[ScheduledSequence] = []
        decoding: list[Sequence] = []
        in_order = sorted(self.running, key=_urgency)
        chain, size = self._chain(in_order), self.kv.block_size
        ahead = chain - 1 + self.spec.lookahead
        for seq in in_order:
            tokens, start = seq.tokens, seq.computed
            count = len(tokens)
            if count - start != 1 or count <= seq.prompt_len or seq.status is not Status.RUNNING:  # as `seq.decoding`
                continue
            if seq.ready * size >= count + ahead or self._covered(seq, ahead):
                want, top = seq.want
                decoding.append(seq)
                fed, windows = (tokens[-1],), seq.window_table
                planned.append(
                    ScheduledSequence(seq.seq_id, fed, start, seq.table, want, 1, None, None, top, 1, windows)
                )
        decodes = len(planned)
        self._rows = max(self.spec.max_rows, self.config.max_batch)
        budget = max(self.config.max_step_tokens - decodes, 0)
        if decodes:
            budget = self.pacer.prompt_budget(budget)
        joined: list[Sequence] = []
        if decodes < len(self.running) or len(self.queue):
            budget = self._continue_prefills(in_order, planned, budget, self._next_to_join(now) is not None)
            joined = self._admit(now, planned, budget)
        if not planned:
            return None
        if len(planned) > decodes:
            chain = 1
        elif self._drafter is not None:
            most = min(self._rows, self.config.max_step_tokens) - decodes
            spare = max(self.kv.growth - len(self.running), 0)  # blocks that nobody else may need soon
            if self._drafter.plan(decoding, planned, self.kv, self.pacer, most, spare):
                chain = 1
        self._step += 1
        copies, window_copies = self.kv.copies(joined)
        return StepPlan(self._step, tuple(planned), copies, chain, window_copies)

    def _expire(self, now: float) -> None:
        self.now = now
        self._keeping.expire(now)
        for seq in self._deadlines.due(now):
            self._end(seq, FinishReason.TIMEOUT)

    def _make_room(self, now: float) -> None:
        """Preempt a lower class for a waiting higher one, when the batch or the blocks are full."""
        while self.running:
            first = next((s for s in self.queue.candidates(now) if not (s.held or s.waiting_for_leader)), None)
            victim = max(self.running, key=_urgency)
            if first is None or first.rank >= victim.aged_rank:
                return
            if len(self.running) < self.max_running and self.kv.has_room(len(first.tokens) + 1):
                return
            self._preempt(victim)

    def _chain(self, in_order: list[Sequence]) -> int:
        """How many greedy steps can be chained: only when all decode, all are greedy, and nobody waits to join."""
        longest = min(self.config.decode_chunk, self.spec.max_chain)
        if longest <= 1 or len(self.queue):
            return 1
        if not all(seq.decoding and seq.want[0] is Want.ARGMAX for seq in in_order):
            return 1
        return max(1, min(longest, *(s.remaining for s in in_order))) if in_order else 1

    def _feed(self, seq: Sequence, count: int) -> ScheduledSequence:
        start = seq.computed
        end = start + count
        last = end == len(seq.tokens) and seq.writes
        (want, top), rows = seq.want if last else (Want.NOTHING, 0), 1
        if seq.scoring and end > seq.scored:
            want, top, rows = Want.LOGITS, 0, end - max(start, seq.scored)
            self._rows -= rows
        generated = max(0, min(end - seq.prompt_len, count))
        load, seq.load = seq.load, None
        save = self.kv.reserve(seq, end) if seq.marks else None
        fed = tuple(seq.tokens[start:end])
        windows = seq.window_table
        return ScheduledSequence(seq.seq_id, fed, start, seq.table, want, generated, load, save, top, rows, windows)

    def _continue_prefills(
        self, in_order: list[Sequence], planned: list[ScheduledSequence], budget: int, joining: bool
    ) -> int:
        """Share the prompt budget among running prefills, and with a newcomer if there is one; returns what is left."""
        pending = [s for s in in_order if s.status is Status.RUNNING and s.behind and not s.decoding]
        pending.sort(key=self._prefill_order)
        others = sum(s.behind for s in pending) + (budget if joining else 0)
        for seq in pending:
            if seq.status is not Status.RUNNING:  # it gave way to one before it
                continue
            others -= seq.behind
            chunk = self._room(seq, self._chunk(seq, budget, others), alone=not planned)
            if chunk and self._ensure(seq, seq.computed + chunk):
                planned.append(self._feed(seq, chunk))
                budget -= chunk
        return budget

    def _room(self, seq: Sequence, chunk: int, *, alone: bool) -> int:
        """So many of the tokens of a chunk have room. Some when nobody else computes anything: others give way then."""
        room = self.kv.room(seq, chunk)
        while alone and chunk and not room:
            victim = max(self.running, key=_urgency)
            self._preempt(victim)
            room = 0 if victim is seq else self.kv.room(seq, chunk)
            alone = victim is not seq
        return room

    def _prefill_order(self, seq: Sequence) -> tuple[int, float, int, int]:
        service = self.queue.service(seq) if seq.spec.group else 0.0
        return seq.aged_rank, service, -seq.spec.critical_path, seq.urgency[1]

    def _chunk(self, seq: Sequence, budget: int, others: int) -> int:
        """Prompt tokens for a sequence when those behind it want `others`: a long one leaves half the budget to them.

        Of one that is scored no more than there are rows of logits for, and none behind the prompt.
        """
        chunk = min(seq.stride, max(budget - others, (budget + 1) // 2))
        if not seq.scoring:
            return chunk
        rows = min(self.spec.max_rows, self._rows)
        return min(chunk, max(seq.scored - seq.computed, 0) + rows, seq.prompt_len - seq.computed)

    def _admit(self, now: float, planned: list[ScheduledSequence], budget: int) -> list[Sequence]:
        """Let waiting sequences join while rows, prompt budget and blocks last; returns those that did."""
        joined: list[Sequence] = []
        seq = self._next_to_join(now)
        while seq is not None and budget > 0 and self._join(seq, now):
            joined.append(seq)
            following = self._next_to_join(now)
            chunk = self.kv.room(seq, self._chunk(seq, budget, budget if following is not None else 0))
            self.kv.grow(seq, seq.computed + chunk)
            planned.append(self._feed(seq, chunk))
            budget -= chunk
            seq = following if following is None or self._ready(following) else self._next_to_join(now)
        return joined

    def _next_to_join(self, now: float) -> Sequence | None:
        """The first in line that need not wait for a leader's blocks, if a row is free; looks at a bounded number."""
        if len(self.running) >= self.max_running or not len(self.queue):
            return None
        for looked, seq in enumerate(self.queue.candidates(now)):
            if looked >= 8 * self.config.max_batch:
                return None
            if self._ready(seq):
                return seq
        return None

    def _ready(self, seq: Sequence) -> bool:
        """True when nobody is about to compute blocks it shares. One that is scored shares none and needs rows."""
        if seq.held:
            return False
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
        seq.aged_rank = self.queue.rank(seq, now)
        seq.urgency = (seq.aged_rank, self._admissions)
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
        if seq.spec.timeout_s is not None:
            seq.deadline = min(seq.deadline, now + seq.spec.timeout_s)
            self._deadlines.note(seq)

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

    def _covered(self, seq: Sequence, ahead: int) -> bool:
        """As `_ensure` for a decoding sequence and `ahead` positions more, but never blocks that it cannot write."""
        needed = len(seq.tokens) + min(ahead, max(seq.remaining - 1, 0))
        return seq.ready * self.kv.block_size >= needed or self._ensure(seq, needed)

    # -- taking the outcome into the books ----------------------------------------------------------------------

    def _commit(self, command: Commit) -> None:
        plan, outcomes, chain = command.plan, command.outcomes, command.plan.chain
        decodes = chunked = drafted = 0  # sequences that decode; tokens of all other sequences; drafts of the former
        self.now = command.now
        by_id, size, windows = self._by_id, self.kv.block_size, self.kv.windows
        if plan.copies:
            self._copied(plan)
        for item in plan.sequences:
            seq = by_id.get(item.seq_id)
            fed = len(item.tokens)
            if seq is None:  # ended while its row was sampled
                chunked += fed - item.generated
                continue
            decoding = seq.decoding
            drafts = item.tokens[1:] if decoding and fed > 1 else ()
            fed -= len(drafts)
            seq.computed += fed
            seq.computed_tokens += fed
            self.queue.serve(seq, fed)
            if decoding:
                decodes += 1
            else:
                chunked += fed
                self._filled(seq)
            outcome = outcomes.get(item.seq_id)
            if outcome is not None:
                seq.write(outcome, chain)
                if drafts:
                    right = seq.judge(drafts, ended=outcome.finish is not None)
                    self.queue.serve(seq, right)
                    drafted += len(drafts)
                    self.accepted += right
                if outcome.finish is not None:
                    self._end(seq, outcome.finish)
                elif decoding:
                    if seq.computed // size > seq.indexed:
                        self.kv.index(seq, tail=False)
                    if windows is not None:
                        windows.advance(seq)
        self.drafted += drafted
        if not command.once:
            greedy = all(item.want is Want.ARGMAX for item in plan.sequences)
            self.pacer.observe(decodes, chunked, command.ms / chain, drafted, greedy=greedy)
        self._expire(command.now)

    def _copied(self, plan: StepPlan) -> None:
        """What was copied is needed no longer, whatever becomes of the sequences."""
        for item in plan.sequences:
            if (seq := self._by_id.get(item.seq_id)) is not None:
                self.kv.copied(seq)

    def _filled(self, seq: Sequence) -> None:
        """A part of a prompt was computed, or all the rest of it. One that is to write nothing ends then."""
        seq.scored = max(seq.scored, seq.computed)
        while seq.marks and seq.marks[0] <= seq.computed:  # set for a follower when this chunk was planned already
            seq.marks.pop(0)
        self.kv.index(seq, tail=True)
        self.kv.saved(seq)
        self.kv.advance(seq)
        if seq.behind:
            return
        self._leaders.unregister(seq)
        if seq.spec.prefill_only:
            self.pinned[seq.seq_id] = self.kv.pin(seq)
            self._end(seq, FinishReason.STOP)
        elif seq.spec.sampling.max_tokens == 0:  # asked only what its prompt is worth
            self._end(seq, FinishReason.LENGTH)
