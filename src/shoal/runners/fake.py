"""A deterministic toy model behind the Runner protocol, for tests, examples and trying the engine without a model.

Its "KV" of a position is a hash of the token, the position and all KV before it, so that one wrong or stale slot
anywhere in a sequence's blocks changes every later logit, as in a real transformer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.plan import BlockId, ModelSpec, ScheduledSequence, SeqId, StepOutput, StepPlan, Want, WindowId
from shoal.splitmix import GOLDEN, MASK, mix

Fault = Callable[[StepPlan], None]


def _mix(value: int) -> int:
    return mix((value + GOLDEN) & MASK)


class FakeRunner:
    """Toy model of `vocab_size` tokens over paged KV of 8 bytes a slot.

    `step_s` is slept in each step. `fault` is called with each plan before it is executed, and may raise or sleep;
    `nan_for` names sequences whose rows come out as NaN. `keep_plans` records every plan. With `splits_decode`
    generated tokens leave other KV than prompt tokens do, as on backends that compute them with other kernels. With
    `checkpoints` above 0 logits depend on a recurrent state too, which is carried per sequence and kept on demand. With
    `window` above 0 they depend on what lies in `num_windows` window blocks too, as far back as the window goes.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 259,
        num_blocks: int = 256,
        block_size: int = 32,
        context_length: int = 4096,
        max_chain: int = 4,
        max_top: int = 64,
        max_rows: int = 16,
        copies_blocks: bool = True,
        splits_decode: bool = False,
        checkpoints: int = 0,
        window: int = 0,
        num_windows: int = 0,
        step_s: float = 0.0,
        fault: Fault | None = None,
        keep_plans: bool = False,
    ) -> None:
        self.spec = ModelSpec(
            name="fake",
            architecture="fake",
            runner="fake",
            precision="u64",
            vocab_size=vocab_size,
            context_length=context_length,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=8,
            weight_bytes=0,
            max_chain=max_chain,
            max_top=max_top,
            max_rows=max_rows,
            copies_blocks=copies_blocks,
            exact=True,
            splits_decode=splits_decode,
            recurrent=checkpoints > 0,
            num_checkpoints=checkpoints,
            checkpoint_bytes=8,
            window=window,
            num_windows=num_windows,
            window_bytes=8 * block_size if window else 0,
        )
        self.step_s = step_s
        self.fault = fault
        self.nan_for: set[SeqId] = set()
        self.plans: list[StepPlan] | None = [] if keep_plans else None
        self.closed = False
        self._kv = [[0] * block_size for _ in range(num_blocks)]
        self._windows = [[0] * block_size for _ in range(num_windows)]
        self._state: dict[SeqId, tuple[int, int]] = {}  # tokens seen, and the recurrent state after them
        self._checkpoints: dict[int, tuple[int, int]] = {}
        self._salt = np.arange(vocab_size, dtype=np.uint64) * np.uint64(GOLDEN)

    @property
    def peak_bytes(self) -> int | None:
        """None: not counted."""
        return None

    @property
    def access(self) -> FakeRunner:
        """This runner itself."""
        return self

    @property
    def identity(self) -> str:
        """All toy models of one form compute the same."""
        return f"fake {self.spec.block_size} {self.spec.splits_decode} {self.spec.recurrent} {self.spec.window}"

    @property
    def block_bytes(self) -> int:
        """Eight for each slot, and as much for each of its window block."""
        return self.spec.block_bytes + self.spec.window_bytes

    def read_block(self, block: BlockId, out: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Copy the slots of a block to `out`, then those of its window block."""
        seen = [] if window is None else self._windows[window]
        out[:] = np.array([*self._kv[block], *seen], np.uint64).view(np.uint8)

    def write_block(self, block: BlockId, data: NDArray[np.uint8], window: WindowId | None = None) -> None:
        """Put back what `read_block` gave."""
        slots, size = data.view(np.uint64).tolist(), self.spec.block_size
        self._kv[block] = slots[:size]
        if window is not None:
            self._windows[window] = slots[size:]

    def discard_blocks(self, blocks: Sequence[BlockId], windows: Sequence[WindowId] = ()) -> None:
        """Empty blocks."""
        for block in blocks:
            self._kv[block] = [0] * self.spec.block_size
        for window in windows:
            self._windows[window] = [0] * self.spec.block_size

    def read_checkpoint(self, checkpoint: int) -> NDArray[np.uint8]:
        """The state that was saved there."""
        return np.array([self._checkpoints[checkpoint][1]], np.uint64).view(np.uint8)

    def write_checkpoint(self, checkpoint: int, tokens: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_checkpoint` gave."""
        self._checkpoints[checkpoint] = tokens, int(data.view(np.uint64)[0])

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass. RunnerError for a sequence without tokens, a table too short for them, a chain that cannot be."""
        if self.plans is not None:
            self.plans.append(plan)
        if self.fault is not None:
            self.fault(plan)
        if self.step_s:
            time.sleep(self.step_s)
        for source, destination in plan.copies:
            self._kv[destination] = list(self._kv[source])
        for source, destination in plan.window_copies:
            self._windows[destination] = list(self._windows[source])
        for item in plan.sequences:
            if item.load is not None:
                self._state[item.seq_id] = self._checkpoints[item.load]
        argmax: dict[SeqId, tuple[int, ...]] = {}
        rows: list[NDArray[np.float32]] = []
        top: dict[SeqId, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        for item in plan.sequences:
            if not 1 <= item.rows <= min(len(item.tokens), self.spec.max_rows):
                raise RunnerError(f"sequence {item.seq_id} wants {item.rows} rows", value=item.rows)
            earlier = self._earlier_rows(item)
            logits = self._feed(item, item.tokens, item.start, item.generated)
            if item.save is not None:
                if item.want is not Want.NOTHING:
                    raise RunnerError("a chunk that wants output keeps no state", value=item.want, limit=Want.NOTHING)
                self._checkpoints[item.save] = self._state[item.seq_id]
            if item.want is Want.LOGITS:
                rows += [*earlier, logits]
            elif item.want is Want.ARGMAX:
                argmax[item.seq_id] = (*map(self._best, earlier), *self._chain(item, logits, plan.chain))
            elif item.want is Want.TOP:
                best = np.sort(np.argsort(-logits, kind="stable")[: item.top if np.isfinite(logits[0]) else 0])
                top[item.seq_id] = best, logits[best]
        return StepOutput(argmax, np.stack(rows) if rows else None, top)

    def _earlier_rows(self, item: ScheduledSequence) -> list[NDArray[np.float32]]:
        """The logits after all but the last of the tokens that rows are wanted of; the same as if fed in pieces."""
        tokens, state = item.tokens, self._state.get(item.seq_id)
        earlier = []
        for count in range(len(tokens) - item.rows + 1, len(tokens)):
            if state is not None:
                self._state[item.seq_id] = state
            fed = tokens[:count]
            earlier.append(self._feed(item, fed, item.start, max(0, item.generated - (len(tokens) - count))))
        if state is not None:
            self._state[item.seq_id] = state
        return earlier

    def _chain(self, item: ScheduledSequence, logits: NDArray[np.float32], chain: int) -> tuple[int, ...]:
        if chain > 1 and len(item.tokens) != 1:
            raise RunnerError("a chained step feeds one token per sequence", value=len(item.tokens), limit=1)
        tokens = [self._best(logits)]
        while len(tokens) < chain:
            tokens.append(self._best(self._feed(item, (tokens[-1],), item.start + len(tokens), 1)))
        return tuple(tokens)

    @staticmethod
    def _best(logits: NDArray[np.float32]) -> int:
        return -1 if np.isnan(logits[0]) else int(logits.argmax())

    def _feed(self, item: ScheduledSequence, tokens: Sequence[int], start: int, generated: int) -> NDArray[np.float32]:
        size = self.spec.block_size
        if not tokens:
            raise RunnerError(f"sequence {item.seq_id} feeds no tokens", value=0, limit=1)
        prompt_end = start + len(tokens) - (generated if self.spec.splits_decode else 0)
        if (start + len(tokens) - 1) // size >= len(item.block_table):
            raise RunnerError(f"sequence {item.seq_id} feeds past its block table", value=start + len(tokens))
        state = 0
        for position in range(start):
            state = _mix(state ^ self._kv[item.block_table[position // size]][position % size])
        for position, token in enumerate(tokens, start):
            value = _mix(state ^ _mix(token * 0x1000003 + position) ^ (position >= prompt_end))
            if self.spec.window:
                value ^= self._look_back(item, value, position)
            self._kv[item.block_table[position // size]][position % size] = value
            state = _mix(state ^ value)
        if self.spec.recurrent:
            state ^= self._carry(item.seq_id, tokens, start)
        if item.seq_id in self.nan_for:
            return np.full(self.spec.vocab_size, np.nan, np.float32)
        bits = self._salt ^ np.uint64(state)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)) - np.float32(2.0)

    def _look_back(self, item: ScheduledSequence, value: int, position: int) -> int:
        """What a position sees of its window, itself included. RunnerError for a plan without its window blocks."""
        size, first = self.spec.block_size, self.spec.first_block(item.start)
        if position // size - first >= len(item.windows):
            raise RunnerError(f"sequence {item.seq_id} has no window block for {position}", value=item.windows)
        at = self._windows[item.windows[position // size - first]]
        at[position % size] = _mix(value)
        seen = 0
        for p in range(max(position - self.spec.window + 1, 0), position + 1):
            seen = _mix(seen ^ self._windows[item.windows[p // size - first]][p % size])
        return seen

    def _carry(self, seq_id: SeqId, tokens: Sequence[int], start: int) -> int:
        """Take tokens into a sequence's recurrent state. RunnerError when it has none of the tokens before."""
        seen, state = self._state.get(seq_id, (0, 0)) if start else (0, 0)
        if seen != start:
            raise RunnerError(
                f"sequence {seq_id} goes on at {start} without its recurrent state", value=seen, limit=start
            )
        for token in tokens:
            state = _mix(state ^ token)
        self._state[seq_id] = (start + len(tokens), state)
        return state

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Forget the recurrent state and the injected faults of these sequences."""
        for seq_id in seq_ids:
            self._state.pop(seq_id, None)
        self.nan_for.difference_update(seq_ids)

    def close(self) -> None:
        """Drop the KV."""
        self.closed = True
        self._kv = []


class ByteTokenizer:
    """One token per byte, 0 to 255, then 256 = end, 257 = user turn, 258 = assistant turn: enough for the toy model."""

    vocab_size = 259
    eos_ids = frozenset({256})

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:  # noqa: ARG002 - the face of Tokenizer
        """UTF-8 bytes of the text."""
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        """The token's byte; nothing for the three special ones."""
        return bytes([token]) if token < 256 else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def encode_messages(self, messages: Sequence[object]) -> list[int]:
        """Turn marks around each message's content."""
        tokens: list[int] = []
        for message in messages:
            assert isinstance(message, dict)
            tokens += [258 if message["role"] == "assistant" else 257, *str(message["content"]).encode()]
        return [*tokens, 258]
