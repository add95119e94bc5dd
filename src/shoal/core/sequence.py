"""The state of one request inside the engine."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from shoal.core.stop import StopChecker
from shoal.errors import ShoalError
from shoal.runners.plan import BlockId, SeqId
from shoal.types import FinishReason, Namespace, Receipt

RANKS = {"high": 0, "normal": 1, "low": 2}


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
        "_table", "admitted_at", "aged_rank", "arrival", "blocks", "cached_tokens", "checker", "computed",
        "computed_tokens", "copy_source", "deadline", "greedy", "group", "hashes", "indexed", "load", "marks",
        "max_tokens", "miss", "namespace", "order", "path", "preemptions", "prefill_only", "prompt_len", "rank",
        "saving", "scored", "seq_id", "shared_blocks", "shared_with", "status", "timeout", "tokens", "top", "waits_for",
        "waits_until",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: SeqId,
        tokens: list[int],
        *,
        prompt_len: int,
        max_tokens: int,
        checker: StopChecker,
        greedy: bool,
        top: int = 0,
        arrival: float = 0.0,
        rank: int = 1,
        group: str = "",
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        deadline: float = math.inf,
        timeout: float = math.inf,
        prefill_only: bool = False,
        path: int = 0,
        score: bool = False,
    ) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.checker = checker
        self.greedy = greedy
        self.top = top  # the largest logits that its choice looks at, 0: all
        self.arrival = arrival
        self.rank = rank
        self.group = group
        self.namespace = namespace
        self.deadline = deadline  # on the caller's clock
        self.timeout = timeout  # seconds from joining the batch
        self.prefill_only = prefill_only
        self.scored = 0 if score else prompt_len  # prompt tokens after which logits are not wanted, or no more
        self.path = path  # tokens to be written one after another until its graph ends

        self.status = Status.WAITING
        self.computed = 0
        self.blocks: list[BlockId] = []
        self._table: tuple[BlockId, ...] | None = None
        self.order = 0  # counts admissions: later is preempted first
        self.aged_rank = rank  # its class when it joined, ageing included
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
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.shared_with = 0
        self.preemptions = 0
        self.miss: str | None = None

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
        return self.max_tokens - (len(self.tokens) - self.prompt_len)

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

    def push(self, tokens: tuple[int, ...], chain: int) -> Progress:
        """Append new tokens to the output, up to where the stop rules end it; says what became of them.

        Of several, the first `chain` were fed on the device already, all but the last; those a grammar forced were not.
        """
        if len(tokens) == 1:  # the common case, without the lists
            verdict = self.checker.push(tokens[0])
            if not verdict.is_output:
                return Progress(self, (), verdict.text, verdict.reason)
            self.tokens.append(tokens[0])
            return Progress(self, tokens, verdict.text, verdict.reason)
        kept, text, finish = [], [], None
        for i, token in enumerate(tokens):
            verdict = self.checker.push(token)
            self.computed += 0 < i < chain
            text.append(verdict.text)
            if verdict.is_output:
                kept.append(token)
                self.tokens.append(token)
            if verdict.reason is not None:
                finish = verdict.reason
                break
        self.computed = min(self.computed, len(self.tokens))
        return Progress(self, tuple(kept), "".join(text), finish)

    @property
    def receipt(self) -> Receipt:
        """What sharing saved so far."""
        return Receipt(self.cached_tokens, self.computed_tokens, self.shared_with, self.preemptions, self.miss)


class Progress(NamedTuple):
    """What became of one sequence: new output tokens, the text they completed, and the end if it came."""

    seq: Sequence
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    error: ShoalError | None = None
