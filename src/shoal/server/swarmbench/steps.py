"""What each step of the engine was to one swarm: who took part, who joined and left, what KV was held and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.agents.cards import Card
from shoal.engine.handles import Progress
from shoal.types import StepRecord

MAX_STEPS = 6000  # kept of one phase: eight agents of 700 tokens one by one; what comes after is not drawn

Row = tuple[float, float, int, int, int, int, int, int, int, int]
"""A step as the page draws it: begin and length in ms, batch width, prompt tokens, decoded tokens, then as bit sets of
cards who took part, joined and left (the synthesis has the bit after the last agent's), then KV in bytes held by the
swarm and saved by sharing."""


@dataclass(slots=True)
class _Seen:
    """How far a card's sequence was when it was last looked at."""

    computed: int = -1
    present: bool = False


@dataclass(slots=True)
class StepLog:
    """Listens to an engine for one swarm. `note` runs on the engine's thread; `rows` only grows: others may read it.

    `began` is the clock's zero of the rows, in seconds. Steps of other callers alone are left out. The peak is the KV
    of the first `agents` cards when sharing saved most.
    """

    cards: Sequence[Card]
    agents: int
    block_bytes: int
    window_bytes: int  # of a window block; 0 where the model has none
    began: float
    rows: list[Row] = field(default_factory=list)
    peak_held: int = 0
    peak_saved: int = 0
    widest: int = 0
    written: int = 0  # output tokens of its steps, and of these the ones that were drafted
    accepted: int = 0
    used_s: float = 0.0  # in which the swarm had run before it was resumed
    _seen: list[_Seen] = field(default_factory=list, init=False)

    def go_on_from(self, summary: Mapping[str, Any]) -> None:
        """Peaks of the same phase before it was resumed."""
        self.peak_held, self.peak_saved = summary["kv_peak_held"], summary["kv_peak_saved"]
        self.widest = summary["widest"]

    def note(self, record: StepRecord, now: float) -> None:
        """Take in a step that has just ended."""
        took = joined = left = 0
        running: list[Progress] = []
        cards = tuple(self.cards)  # a graph's grow, on another thread
        self._seen += [_Seen() for _ in cards[len(self._seen) :]]
        for bit, (card, seen) in enumerate(zip(cards, self._seen, strict=True)):
            if card.handle is None:
                continue
            progress = card.handle.progress()
            present, computed = progress.running, progress.computed_tokens
            if present:
                running.append(progress)
            if (present and computed != seen.computed) or seen.present != present:
                took |= 1 << bit
            joined |= (present and not seen.present) << bit
            left |= (seen.present and not present) << bit
            seen.computed, seen.present = computed, present
        if took and len(self.rows) < MAX_STEPS:
            self.widest = max(self.widest, record.batch)
            self.written += record.decode_tokens
            self.accepted += record.accepted
            held, saved = _kv(running, self.block_bytes, self.window_bytes)
            if took & ((1 << self.agents) - 1) and (saved, held) >= (self.peak_saved, self.peak_held):
                self.peak_saved, self.peak_held = saved, held
            begin = round((now - self.began) * 1e3 - record.ms, 2)
            width = (record.batch, record.prefill_tokens, record.decode_tokens)
            self.rows.append((begin, round(record.ms, 2), *width, took, joined, left, held, saved))

    @property
    def tokens_a_pass(self) -> float:
        """Output tokens of a row of a pass: 1 without speculation."""
        return self.written / (self.written - self.accepted) if self.written > self.accepted else 1.0


def _kv(running: Sequence[Progress], block_bytes: int, window_bytes: int) -> tuple[int, int]:
    """Bytes of the blocks that some sequences hold, and of those they would hold if nothing were shared."""
    held = saved = 0
    kinds = (([seq.blocks for seq in running], block_bytes), ([seq.windows for seq in running], window_bytes))
    for tables, size in kinds:
        distinct = len({block for table in tables for block in table})
        held += distinct * size
        saved += (sum(map(len, tables)) - distinct) * size
    return held, saved


def single_stream_rate(rows: Sequence[Row]) -> float | None:
    """Tokens per second of a stream that is alone, from the steps in which one was; None when there were too few."""
    alone = [row[1] / row[4] for row in rows if row[2] == 1 and row[3] == 0 and row[4] > 0]
    return round(1e3 / median(alone), 1) if len(alone) >= 4 else None
