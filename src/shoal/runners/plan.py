"""What a step is: the plan a scheduler makes, the output a runner gives, the facts about a model both rely on.

Axis letters in shapes: B sequences, T tokens, V vocabulary. Nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SeqId: TypeAlias = int
"""A sequence inside one engine; never reused while the engine lives."""


BlockId: TypeAlias = int
"""A block of KV slots, 0 <= id < ModelSpec.num_blocks. The core hands them out, a runner maps them to storage."""


WindowId: TypeAlias = int
"""A window block, 0 <= id < ModelSpec.num_windows: what layers with a window keep of the positions of one block."""


class Want(StrEnum):
    """What a step is to give for a sequence after its last fed token."""

    NOTHING = "nothing"  # prompt tokens that are not the last: no projection to the vocabulary
    ARGMAX = "argmax"  # the most likely token
    LOGITS = "logits"  # all V logits
    TOP = "top"  # the `top` largest logits and their tokens; only up to ModelSpec.max_top
    DRAW = "draw"  # a token drawn from all logits by `StepOutput.rows`; only where ModelSpec.draws


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: feed `tokens` at positions start .. start + len(tokens) - 1.

    KV of position p lives in slot p % block_size of block `block_table[p // block_size]`. Positions below `start`
    are there already. The table covers every fed position (and the chained ones) and may be longer. A table that
    did not change since an earlier step is the same object, so a runner may cache what it derives from it. The last
    `generated` of the tokens are output of the sequence, the ones before are its prompt. `top` counts for TOP
    only. With LOGITS and, unchained, with ARGMAX, `rows` asks for those after each of the last `rows` tokens fed,
    1 <= rows <= len(tokens), at most ModelSpec.max_rows.

    Of a model with recurrent state, KV blocks are not all there is. A sequence's state goes on from its last step;
    where it has none in the runner and `start` is above 0, it starts from checkpoint `load`. A chunk that wants nothing
    may ask that the state after its last token be kept as checkpoint `save` (0 <= id < ModelSpec.num_checkpoints),
    until that id is saved to again. Loads come before saves.

    Of a model with a window (`ModelSpec.window`), KV of its layers with one lies in window blocks: that of block
    `spec.first_block(start)` + i of the table in `windows[i]`. They cover every fed position as the table does; what
    lies before them no position of this step sees.
    """

    seq_id: SeqId
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[BlockId, ...]
    want: Want
    generated: int = 0
    load: int | None = None
    save: int | None = None
    top: int = 0
    rows: int = 1
    windows: tuple[WindowId, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass is to do. Frozen, small and printable.

    `copies` are (source, destination) blocks, whose contents are copied whole and in order before anything is
    computed; `window_copies` are those of window blocks. `chain` > 1 asks for that many greedy tokens per sequence,
    each fed back on the device; only plans in which every sequence feeds one token and wants ARGMAX may ask, up to
    `ModelSpec.max_chain`.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    chain: int = 1
    window_copies: tuple[tuple[WindowId, WindowId], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens fed in this step, all sequences together."""
        return sum(len(s.tokens) for s in self.sequences)


class Draw(NamedTuple):
    """How a token is drawn, as `sampling.sampler` defines it for a temperature with min-p and no other filter.

    `scale` multiplies the distance of a logit from the largest one; `min_p` and `number`, in [0, 1), as there.
    """

    scale: float
    min_p: float
    number: float


class HeldRows(Protocol):
    """Rows of logits that stay where they were computed until the runner's next call."""

    def draw(self, draws: Mapping[SeqId, Draw]) -> Mapping[SeqId, int | NDArray[np.float32]]:
        """For each sequence the token that the sampler would draw from its row, -1 where that has no distribution.

        Where rounding could make it another one, the row itself, float32 [V]: the sampler then has the last word.
        """


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave.

    `argmax` holds `chain` tokens, or unchained `rows`, for each sequence that wanted ARGMAX, of equal logits the lowest
    token, and -1 where the logits were not finite numbers. `logits`, float32 [n, V], holds, for each sequence that
    wanted LOGITS, its `rows` in the order of their tokens, the sequences in plan order; it is valid until the runner's
    next call and may be written to. `top` holds, for each sequence that wanted TOP, the tokens of its `top` largest
    logits, int64 in rising order, and these logits, float32; of equal logits the lowest tokens are in it, and it is
    empty where the logits were not finite numbers. `rows` are those of the sequences that wanted DRAW. `once`: some of
    the time went into what a step of this shape needs once (kernels were compiled), so it does not tell what such steps
    take.
    """

    argmax: Mapping[SeqId, tuple[int, ...]]
    logits: NDArray[np.float32] | None = None
    top: Mapping[SeqId, tuple[NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=dict)
    once: bool = False
    rows: HeldRows | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the core must know of a loaded model. Sizes in bytes, lengths in tokens.

    `step_bytes` is the most a step of `max_step_tokens` needs beside weights and KV (the transient). `copies_blocks`:
    the runner can copy a block (`StepPlan.copies`), so a prefix may be cut at any token. `exact`: logits of a sequence
    are the same bits whatever else is in the batch and however it is chunked. `splits_decode`: that holds as long as
    generated tokens and prompt tokens are told apart, because other kernels compute them; then KV of the ones never
    stands in for KV of the others. `max_top`: the most tokens that Want.TOP may ask for (0: this runner gives LOGITS
    or ARGMAX). `max_rows`: the most rows of logits that a step gives of one sequence (1: only those after its last
    token). `draws`: Want.DRAW may be asked for. `lookahead`: positions beyond a plan's that a decode row should have
    blocks for, since the runner starts the next step itself. `recurrent`: some layers keep a state that cannot be cut,
    so that a prefix can only be taken up where a checkpoint of it was kept; there is room for `num_checkpoints` of
    `checkpoint_bytes` each, beside the blocks. `window`: some layers see `window` positions and no more, and their KV
    is not in the blocks but in `num_windows` window blocks of `window_bytes` each; 0: all KV is in the blocks.
    `kv_bytes_per_token` is what a token takes in a block.
    """

    name: str
    architecture: str
    runner: str
    precision: str
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    weight_bytes: int
    step_bytes: int = 0
    max_chain: int = 1
    max_top: int = 0
    max_rows: int = 1
    draws: bool = False
    lookahead: int = 0
    copies_blocks: bool = True
    exact: bool = False
    splits_decode: bool = False
    recurrent: bool = False
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    window: int = 0
    num_windows: int = 0
    window_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block, without its window block."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks and window blocks."""
        return self.num_blocks * self.block_bytes + self.num_windows * self.window_bytes

    def first_block(self, position: int) -> int:
        """The first block of a table whose window block is seen when the token at `position` is fed."""
        return max(position - self.window + 1, 0) // self.block_size

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits all blocks together."""
        return self.num_blocks * self.block_size


def windows_in_turn(spec: ModelSpec, start: int, tokens: int, place: int = 0, places: int = 1) -> tuple[WindowId, ...]:
    """`ScheduledSequence.windows` for plans that are made by hand: sequence `place` of `places` uses its share in turn.

    It must be enough for what its longest step sees and writes.
    """
    if not spec.window:
        return ()
    share = spec.num_windows // places
    blocks = range(spec.first_block(start), (start + tokens - 1) // spec.block_size + 1)
    return tuple(place * share + block % share for block in blocks)
