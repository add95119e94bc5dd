"""One swarm on the server: a task follows it, and what changes is kept as frames, to be read from any point.

The run belongs to the server, not to the page that began it: a page that is loaded again takes a snapshot and goes on
from there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.agents.carded import Before, CardedRun
from shoal.agents.cards import CardState
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, ShoalError
from shoal.server.swarmbench.orders import Order
from shoal.server.swarmbench.record import Document, apply, card_numbers, new_phase, phase_summary
from shoal.server.swarmbench.resumed import INTERRUPTED, Resumed
from shoal.server.swarmbench.steps import StepLog, single_stream_rate
from shoal.types import Result, StepRecord

_FRAME_S = 1 / 60  # what a screen shows; tokens that come together travel together
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class _Phase:
    """Agents with their cards, their steps, and how much of both has been told."""

    name: str
    swarm: CardedRun
    log: StepLog
    cards_told: int  # that the record has
    told: dict[int, tuple[CardState, int, int, int]] = field(default_factory=dict)  # card: state, tokens, text
    steps_told: int = 0


class SwarmRun:
    """A run from its order to its end, and its record.

    Invariant: `frames` only grows, and `document` is what all of them make of an empty record. All of it belongs to the
    event loop. `finished`: nothing more will come.
    """

    def __init__(
        self,
        order: Order,
        engine: Engine,
        model: str,
        ended: Callable[[SwarmRun], None],
        *,
        folder: Path | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """`ended` is called on the event loop when all is over.

        Its checkpoint lies in `folder` and has its id; a `resumed` one goes on from there. Raises
        `InvalidRequestError`, `GraphError`.
        """
        self.id = secrets.token_hex(8) if resumed is None else str(resumed.document["id"])
        self.checkpoint = None if folder is None else folder / self.id
        self.caller = order.caller
        self.interrupted = False  # by a stop of the server: another one goes on with it
        self.frames: list[bytes] = []
        self.finished = False
        self.results: list[Result] = []
        self._order = order
        self._engine = engine
        self._ended = ended
        self._note: str | None = None
        self._stopped = False
        self._lost = False
        self._changed = asyncio.Event()  # a new one for each frame
        self._over = asyncio.Event()
        document, before = (None, None) if resumed is None else resumed.begin()
        self._together = self._phase("together", before)
        if document is not None and document["together"]["summary"]:
            self._together.log.go_on_from(document["together"]["summary"])
        self._alone: _Phase | None = None
        spec = engine.spec
        self.document: Document = document or {
            "id": self.id,
            "title": order.title,
            "question": order.question,
            "model": {"name": model, "precision": spec.precision, "runner": spec.runner},
            "created": time.time(),
            "state": "running",
            "note": None,
            **order.facts(),
            **order.thread.facts(self.id),
            "together": new_phase([card.specialist for card in self._together.swarm.everyone]),
            "one_by_one": None,
            "same_texts": None,
            "single_tokens_per_s": None,
            "finals": [],
        }
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._live(), name=f"swarm-{self.id}")

    def stop(self, card: int | None) -> None:
        """End one card (the synthesis has the number after the last agent's), or all and what is still to come."""
        swarm = (self._alone or self._together).swarm
        if card is None:
            self._stopped = True
            swarm.abort()
        elif card < len(swarm.everyone):
            swarm.abort(swarm.everyone[card])

    def interrupt(self) -> None:
        """Stop here; the record stays one of a run that goes on, and so does the checkpoint, if there is one."""
        if self.checkpoint is not None and not self.finished:
            self.interrupted = True
            (self._alone or self._together).swarm.interrupt()

    async def changed(self, timeout_s: float) -> bool:
        """True when there are more frames, False after that time."""
        return await _within(timeout_s, self._changed)

    async def until_finished(self, timeout_s: float) -> bool:
        """True when it has ended, False after that time."""
        return await _within(timeout_s, self._over)

    def _append(self, frame: Document) -> None:
        apply(self.document, frame)
        number = len(self.frames) + 1
        self.frames.append(f"id: {number}\nevent: frame\ndata: {_encode(frame)}\n\n".encode("utf-8", "replace"))
        if "end" in frame:
            self._close()
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        self.finished = True
        self._over.set()
        self._ended(self)
        self._changed.set()

    # -- the run's task -----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._follow(self._together)
            states = {card.state for card in self._together.swarm.everyone}
            if self._order.one_by_one and not self._stopped and not self.interrupted and states == {CardState.DONE}:
                self._alone = self._phase("one_by_one")
                await self._follow(self._alone)
        finally:
            if self.interrupted:
                self._close()
            else:
                self._append({"end": self._end()})

    def _phase(self, name: str, before: Before | None = None) -> _Phase:
        together = name == "together"
        checkpoint = self.checkpoint if together else None
        swarm = self._order.work(alone=not together, checkpoint=checkpoint, before=before)
        spec = self._engine.spec
        log = StepLog(swarm.everyone, self._order.agents, spec.block_bytes, spec.window_bytes, time.perf_counter())
        log.used_s = 0.0 if before is None else before.used_s
        return _Phase(name, swarm, log, cards_told=len(swarm.everyone) if together else 0)

    async def _follow(self, phase: _Phase) -> None:
        """Run a phase to its end, telling what changes. A refusal ends the swarm, not the run's record."""

        def listen(record: StepRecord) -> None:
            phase.log.note(record, time.perf_counter())

        self._engine.listen(listen)
        try:
            phase.log.began = time.perf_counter() - phase.log.used_s
            phase.swarm.start(self._engine)
            while not phase.swarm.finished:
                await phase.swarm.pump(_FRAME_S)
                self._tell(phase)
        except CheckpointError as error:
            self._note, self._lost = f"{INTERRUPTED}, and it cannot go on: {error}", True
        except ShoalError as error:
            self._note = str(error)
        finally:
            self._engine.unlisten(listen)
        self.results += phase.swarm.results
        self._tell(phase)

    def _tell(self, phase: _Phase) -> None:
        """Hand over what changed since the last time, if anything did."""
        if self.interrupted:  # what ends now goes on elsewhere
            return
        now = time.perf_counter()
        cards = []
        for number, card in enumerate(phase.swarm.everyone):
            told = phase.told.get(number, (CardState.QUEUED, 0, 0, 0))
            shown = (card.state, card.tokens, card.version, len(card.text))
            if shown == told and number < phase.cards_told:
                continue
            change: Document = {"i": number, **card_numbers(card, now, phase.log.began)}
            if number >= phase.cards_told:
                change |= {"name": card.name, "task": card.specialist.task}
                phase.cards_told = number + 1
            anew = card.version != told[2]
            if anew:
                change["text"] = ""
            cards.append({**change, "more": card.text[0 if anew else told[3] :]})
            phase.told[number] = shown
        steps = phase.log.rows[phase.steps_told :]
        phase.steps_told += len(steps)
        if cards or steps:
            summary = phase_summary(phase.swarm.summary(now), phase.log)
            self._append({"phase": phase.name, "cards": cards, "steps": steps, "summary": summary})

    def _end(self) -> Document:
        """How it ended."""
        swarm = self._together.swarm
        cards = swarm.everyone
        states = {card.state for card in cards}
        if self._lost:
            state = "interrupted"
        elif self._note is not None or swarm.failed or not swarm.finished:
            state = "failed"
        else:
            state = "cancelled" if self._stopped or CardState.ABORTED in states else "done"
        rows = [*self._together.log.rows, *(self._alone.log.rows if self._alone is not None else ())]
        same = None
        if self._alone is not None and self._alone.swarm.finished and not self._stopped:
            same = sum(a.text == b.text for a, b in zip(self._alone.swarm.cards, cards, strict=False))
        told = {"state": state, "note": self._note, "same_texts": same, "finals": swarm.finals}
        return {**told, "single_tokens_per_s": single_stream_rate(rows)}


async def _within(timeout_s: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
