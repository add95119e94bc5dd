"""Everything that changes a scheduler, as values: `Scheduler.apply` carries them out, a record is a list of them.

A scheduler's state follows from its commands alone: none of them reads a clock, and what the model and the stop rules
said comes with `Commit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shoal.core.request import RequestSpec
from shoal.core.tiers import Tier
from shoal.errors import ShoalError
from shoal.runners.plan import BlockId, SeqId, StepPlan
from shoal.types import FinishReason, Namespace


class JudgedTokens(NamedTuple):
    """What a step gave one sequence: the tokens up to the one that ends it, if one does.

    The first `kept` of them are output: all, or all but a stop token at the end. `finish` is why they end the request.
    """

    tokens: tuple[int, ...]
    kept: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Put a new sequence in line. It must be able to fit the pool when it is alone.

    It goes on after `written`, output it has already; the first `scored` tokens of its prompt need no scores.
    """

    seq_id: SeqId
    spec: RequestSpec
    arrival: float
    written: tuple[int, ...] = ()
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence wherever it stands. Nothing happens when it has ended already."""

    seq_id: SeqId
    reason: FinishReason = FinishReason.ABORTED
    error: ShoalError | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Plan the next step, at this time of the caller's clock. Ends what is past its time, first."""

    now: float


@dataclass(frozen=True, slots=True)
class Commit:
    """The plan was executed in `ms`; `outcomes` has an entry for every sequence that got tokens.

    `once` as the runner said (`StepOutput.once`): then nothing is learned from the time.
    """

    plan: StepPlan
    outcomes: Mapping[SeqId, JudgedTokens]
    now: float
    ms: float
    once: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """KV that these sequences computed cannot be trusted: end them, and forget every block they computed themselves."""

    seq_ids: tuple[SeqId, ...]
    error: ShoalError


@dataclass(frozen=True, slots=True)
class Share:
    """Put all KV a running sequence has so far within reach of others, its last block included."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let go of a prefix that a `prefill_only` sequence computed; its blocks stay cached while there is room."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class Expect:
    """A prefix will be needed in about step `due`: it is evicted last."""

    tokens: tuple[int, ...]
    namespace: Namespace
    due: int


@dataclass(frozen=True, slots=True)
class CancelExpectation:
    """Take back what `Expect` said with the same fields."""

    tokens: tuple[int, ...]
    namespace: Namespace
    due: int


@dataclass(frozen=True, slots=True)
class Keep:
    """A prefix will be wanted again before `until`, a time of the caller's clock: it is evicted late."""

    tokens: tuple[int, ...]
    namespace: Namespace
    until: float


@dataclass(frozen=True, slots=True)
class Hold:
    """A waiting sequence is not to join while what it wants back from further tiers is on its way; or it is again."""

    seq_id: SeqId
    held: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """KV of a waiting sequence is back from a tier: blocks `first` .. `first + count - 1` of its tokens.

    The blocks that it gets are in `Scheduler.take_restored`, and are to be written before anything else is scheduled.
    With `state`, the recurrent state after the last of them is back too (after block `first` - 1 where `count` is 0).
    """

    seq_id: SeqId
    first: int
    count: int
    tier: Tier
    state: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """What a `Restore` gave these blocks could not be written: nobody may find them."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PreemptAll:
    """Send the whole batch back to the queue; with `drop_cached` give up all KV that is not pinned."""

    drop_cached: bool = False


@dataclass(frozen=True, slots=True)
class PreemptLow:
    """Send what runs of class low back to the queue."""


@dataclass(frozen=True, slots=True)
class KeepCached:
    """Keep KV that nobody holds, within its bounds; or, while memory is short, none at all."""

    keeping: bool


@dataclass(frozen=True, slots=True)
class Defer:
    """Let waiting sequences of class low join no more, or again; those that run go on."""

    deferring: bool


@dataclass(frozen=True, slots=True)
class SetMaxRunning:
    """Let at most `count` sequences run together from here on; those that run go on."""

    count: int


@dataclass(frozen=True, slots=True)
class SetMaxStall:
    """Change the stall bound for the steps to come."""

    ms: float


Command: TypeAlias = (
    Schedule
    | Commit
    | Add
    | Abort
    | Fail
    | Share
    | Unpin
    | Expect
    | CancelExpectation
    | Keep
    | Hold
    | Restore
    | Forget
    | PreemptAll
    | PreemptLow
    | KeepCached
    | Defer
    | SetMaxRunning
    | SetMaxStall
)
