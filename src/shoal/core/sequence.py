"""The state of one request inside the engine."""

from __future__ import annotations

import math
from enum import Enum

from shoal.core.stop import StopChecker
from shoal.plan import BlockId, SeqId
from shoal.types import Namespace, Receipt

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
        "computed_tokens", "copy_source", "deadline", "greedy", "group", "hashes", "indexed", "max_tokens", "miss",
        "namespace", "order", "preemptions", "prefill_only", "prompt_len", "rank", "seq_id", "shared_blocks",
        "shared_with", "status", "timeout", "tokens", "waits_for", "waits_until",
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
        arrival: float = 0.0,
        rank: int = 1,
        group: str = "",
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        deadline: float = math.inf,
        timeout: float = math.inf,
        prefill_only: bool = False,
    ) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.checker = checker
        self.greedy = greedy
        self.arrival = arrival
        self.rank = rank
        self.group = group
        self.namespace = namespace
        self.deadline = deadline  # on the caller's clock
        self.timeout = timeout  # seconds from joining the batch
        self.prefill_only = prefill_only

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
        return self.behind == 1 and len(self.tokens) > self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens it may still write."""
        return self.max_tokens - (len(self.tokens) - self.prompt_len)

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
    def receipt(self) -> Receipt:
        """What sharing saved so far."""
        return Receipt(self.cached_tokens, self.computed_tokens, self.shared_with, self.preemptions, self.miss)
