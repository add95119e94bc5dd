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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.agents.cards import CardState, Specialist
from shoal.agents.swarm import SYNTHESIS, Before, Swarm, swarm_sampling
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, ShoalError
from shoal.server.swarmbench.record import Document, apply, card_numbers, new_phase, phase_summary
from shoal.server.swarmbench.resumed import INTERRUPTED, Resumed
from shoal.server.swarmbench.steps import StepLog, single_stream_rate
from shoal.server.swarmbench.turns import Thread
from shoal.types import Namespace, Result, StepRecord

_FRAME_S = 1 / 60  # what a screen shows; tokens that come together travel together
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class SwarmOrder:
    """What was asked for. `one_by_one`: run the agents once more, one after another, to compare the times.

    `sharing`: whether the agents may share KV of what their prompts begin with, and with the other calls of `caller`.
    `deadline_s` is that of each agent.
    """

    question: str
    team: tuple[Specialist, ...]
    max_tokens: int
    temperature: float
    seed: int
    synthesis: bool
    one_by_one: bool
    sharing: bool
    deadline_s: float | None = None
    caller: str = ""
    thread: Thread = field(default_factory=Thread)

    def settings(self) -> dict[str, Any]:
        """What is not the question, the team, its thread and whose run it is."""
        left_out = ("question", "team", "caller", "thread")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}


@dataclass(slots=True)
class _Phase:
    """A swarm, its steps, and how much of both has been told."""

    name: str
    swarm: Swarm
    log: StepLog
    told: dict[int, tuple[CardState, int, int]] = field(default_factory=dict)  # card: state, tokens, characters
    steps_told: int = 0


class SwarmRun:
    """A run from its order to its end, and its record.

    Invariant: `frames` only grows, and `document` is what all of them make of an empty record. All of it belongs to the
    event loop. `finished`: nothing more will come.
    """

    def __init__(
        self,
        order: SwarmOrder,
        engine: Engine,
        model: str,
        ended: Callable[[SwarmRun], None],
        *,
        folder: Path | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """`ended` is called on the event loop when all is over.

        Its checkpoint lies in `folder` and has its id; a `resumed` one goes on from there. Raises
        `InvalidRequestError`.
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
            "title": order.question.strip().split("\n", 1)[0][:80],
            "question": order.question,
            "model": {"name": model, "precision": spec.precision, "runner": spec.runner},
            "created": time.time(),
            "state": "running",
            "note": None,
            "settings": order.settings(),
            **order.thread.facts(self.id),
            "together": new_phase([card.specialist for card in self._together.swarm.everyone]),
            "one_by_one": None,
            "same_texts": None,
            "single_tokens_per_s": None,
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
        order, together = self._order, name == "together"
        swarm = Swarm(
            order.question,
            order.team,
            swarm_sampling(order.max_tokens, order.temperature, order.seed),
            serial=not together,
            synthesis=SYNTHESIS if order.synthesis and together else None,
            sharing=order.sharing,
            deadline_s=order.deadline_s,
            namespace=Namespace(agent=order.caller),
            earlier=order.thread.messages(),
            checkpoint=self.checkpoint if together else None,
            before=before,
        )
        log = StepLog(swarm.everyone, len(swarm.cards), self._engine.spec.block_bytes, time.perf_counter())
        log.used_s = 0.0 if before is None else before.used_s
        return _Phase(name, swarm, log)

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
        ran = [card for card in phase.swarm.everyone if card.handle is not None]
        self.results += [card.result for card in ran if card.result is not None]
        self._tell(phase)

    def _tell(self, phase: _Phase) -> None:
        """Hand over what changed since the last time, if anything did."""
        if self.interrupted:  # what ends now goes on elsewhere
            return
        now = time.perf_counter()
        cards = []
        for number, card in enumerate(phase.swarm.everyone):
            state, tokens, characters = phase.told.get(number, (CardState.QUEUED, 0, 0))
            if (card.state, card.tokens, len(card.text)) != (state, tokens, characters):
                phase.told[number] = (card.state, card.tokens, len(card.text))
                more = card.text[characters:]
                cards.append({"i": number, "more": more, **card_numbers(card, now, phase.log.began)})
        steps = phase.log.rows[phase.steps_told :]
        phase.steps_told += len(steps)
        if cards or steps:
            summary = phase_summary(phase.swarm.summary(now), phase.log)
            self._append({"phase": phase.name, "cards": cards, "steps": steps, "summary": summary})

    def _end(self) -> Document:
        """How it ended."""
        cards = self._together.swarm.everyone
        states = {card.state for card in cards}
        if self._lost:
            state = "interrupted"
        elif self._note is not None or CardState.FAILED in states or not self._together.swarm.finished:
            state = "failed"
        else:
            state = "cancelled" if self._stopped or CardState.ABORTED in states else "done"
        rows = [*self._together.log.rows, *(self._alone.log.rows if self._alone is not None else ())]
        same = None
        if self._alone is not None and self._alone.swarm.finished and not self._stopped:
            same = sum(a.text == b.text for a, b in zip(self._alone.swarm.cards, cards, strict=False))
        told = {"state": state, "note": self._note, "same_texts": same}
        return {**told, "single_tokens_per_s": single_stream_rate(rows)}


async def _within(timeout_s: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
