"""The state of one request inside the engine."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from shoal.core.commands import JudgedTokens
from shoal.core.request import RequestSpec
from shoal.core.tiers import Tier
from shoal.errors import ShoalError
from shoal.runners.plan import BlockId, SeqId, Want, WindowId
from shoal.types import FinishReason, Priority, Receipt

if TYPE_CHECKING:
    from shoal.core.draft import Draft

RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's tokens and how far their KV is computed.

    Invariant: 0 <= computed <= len(tokens), and `blocks` cover at least the computed positions. A prompt is
    behind by its length, a decoding sequence by 1, a preempted one by everything; scheduling is catching up,
    whatever the cause::

        tokens   | prompt ............................ | output ........ |
        KV       | cached | computed so far    | behind                  |
                 0        cached_tokens        computed          len(tokens)

    Who waits and who runs is the scheduler's; what the tokens mean is nobody's here.
    """

    __slots__ = (
        "_table", "_window_table", "accepted", "admitted_at", "aged_rank", "arrival", "blocks", "cached_tokens",
        "computed", "computed_tokens", "copy_source", "deadline", "draft", "drafted", "foretold", "hashes", "held",
        "indexed", "load", "marks", "miss", "preemptions", "prompt_len", "rank", "ready", "restored", "saving",
        "scored", "seq_id", "shared_blocks", "shared_with", "spec", "status", "tokens", "urgency", "waits_for",
        "waits_until", "want", "window_from", "windows", "writes",
    )  # fmt: skip

    def __init__(
        self, seq_id: SeqId, spec: RequestSpec, *, arrival: float = 0.0, written: tuple[int, ...] = (), scored: int = 0
    ) -> None:
        self.seq_id = seq_id
        self.spec = spec
        self.arrival = arrival  # on the caller's clock, as `deadline`
        self.tokens = [*spec.prompt, *written]
        self.prompt_len = len(spec.prompt)
        self.rank = RANKS[spec.priority]
        self.deadline = math.inf if spec.deadline_s is None else arrival + spec.deadline_s
        # Prompt tokens after which logits are not wanted, or no more.
        self.scored = self.prompt_len if spec.sampling.prompt_logprobs is None else scored
        self.writes = spec.sampling.max_tokens > 0 and not spec.prefill_only
        self.want = (Want.LOGITS, 0)  # what its next token is chosen from, as the scheduler says for its model

        self.status = Status.WAITING
        self.computed = 0
        self.blocks: list[BlockId] = []
        self._table: tuple[BlockId, ...] | None = None
        self.ready = 0  # of `blocks`, how many can be written to: all, but those that have no window block yet
        self.window_from = 0  # the first block that has one which it needs, where the model has a window
        self.windows: list[WindowId] = []  # of its blocks from there up to `ready`
        self._window_table: tuple[WindowId, ...] | None = None
        self.aged_rank = self.rank  # its class when it joined, ageing included
        self.urgency = (self.rank, 0)  # that class, and the number of its admission: the highest is preempted first
        self.admitted_at: float | None = None  # first admission
        self.hashes: list[int] = []  # of the full blocks it came with, for announcements and waiting
        self.indexed = 0  # full blocks known to the prefix tree
        self.shared_blocks = 0  # of `blocks`, how many came from the tree by reference
        self.copy_source: BlockId | None = None  # held until the step that copies it is done
        self.load: int | None = None  # the checkpoint its first chunk starts from
        self.marks: list[int] = []  # where a chunk must end, so that recurrent state can be kept there
        self.saving: int | None = None  # the checkpoint reserved for the chunk that is being computed
        self.waits_for: Sequence | None = None  # this one computes blocks we share
        self.waits_until = 0
        self.held = False  # what it wants from further tiers is on its way
        self.restored: dict[Tier, int] = {}  # tokens that came back for it, by where from
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.shared_with = 0
        self.preemptions = 0
        self.miss: str | None = None
        self.draft: Draft | None = None  # from its first output token on, where it is drafted for
        self.drafted = 0  # tokens that passes tried, and of these the ones that were right
        self.accepted = 0
        self.foretold = 0  # output tokens that stood in `spec.predicted` where they were expected

    @property
    def behind(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """True when one token is to be fed and the next one is wanted."""
        count = len(self.tokens)  # asked of every sequence in every step
        return count - self.computed == 1 and count > self.prompt_len

    @property
    def scoring(self) -> bool:
        """True while logits after prompt tokens are wanted that tell of the token behind."""
        return self.scored < self.prompt_len - 1

    @property
    def remaining(self) -> int:
        """Output tokens it may still write."""
        return self.spec.sampling.max_tokens - (len(self.tokens) - self.prompt_len)

    @property
    def stride(self) -> int:
        """Tokens up to the next mark, or all it is behind."""
        return self.marks[0] - self.computed if self.marks else self.behind

    @property
    def waiting_for_leader(self) -> bool:
        """True while another running sequence is about to compute blocks this one shares."""
        leader = self.waits_for
        if leader is None:
            return False
        if leader.status is Status.RUNNING and leader.computed < self.waits_until:
            return True
        self.waits_for = None
        return False

    @property
    def table(self) -> tuple[BlockId, ...]:
        """The block table, the same object until it changes."""
        if self._table is None:
            self._table = tuple(self.blocks)
        return self._table

    def blocks_changed(self) -> None:
        """Call after every change to `blocks`."""
        self._table = None

    @property
    def window_table(self) -> tuple[WindowId, ...]:
        """The window blocks, the same object until they change."""
        if self._window_table is None:
            self._window_table = tuple(self.windows)
        return self._window_table

    def windows_changed(self) -> None:
        """Call after every change to `windows`."""
        self._window_table = None

    def write(self, outcome: JudgedTokens, chain: int) -> None:
        """Append what a step gave. Of its tokens, the first `chain` without the last were fed on the device already."""
        tokens, kept, _ = outcome
        if len(tokens) == 1:
            if kept:
                self.tokens.append(tokens[0])
        else:
            self.tokens += tokens[:kept]
            self.computed = min(self.computed + min(len(tokens), chain) - 1, len(self.tokens))

    def judge(self, drafts: tuple[int, ...], *, ended: bool) -> int:
        """Of the tokens fed behind its last one, those that it wrote: their KV is computed, the rest's is not.

        Call after `write`; gives how many are right. Where the output goes on though nothing was chosen behind the
        last right one (its row was not finite, or a grammar left no token), that one stays behind: it is fed again.
        """
        tokens, right = self.tokens, 0
        end = len(tokens) if ended else len(tokens) - 1
        for token in drafts:
            if self.computed + right >= end or tokens[self.computed + right] != token:
                break
            right += 1
        self.computed += right
        self.computed_tokens += right
        self.drafted += len(drafts)
        self.accepted += right
        return right

    @property
    def receipt(self) -> Receipt:
        """What sharing and drafting saved so far."""
        host, disk = (min(self.restored.get(tier, 0), self.cached_tokens) for tier in (Tier.HOST, Tier.DISK))
        return Receipt(
            self.cached_tokens,
            self.computed_tokens,
            self.shared_with,
            self.preemptions,
            self.miss,
            self.drafted,
            self.accepted,
            self.draft.foretold if self.draft is not None else self.foretold,
            host,
            disk,
        )


class Ended(NamedTuple):
    """A sequence ended, and why."""

    seq: Sequence
    finish: FinishReason
    error: ShoalError | None = None
