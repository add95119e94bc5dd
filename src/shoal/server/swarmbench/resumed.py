"""A run that a stop of the server cut off, as it is taken up: its order, and what its record knew of ended agents."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.agents.carded import Before
from shoal.agents.cards import Card, CardState, Specialist
from shoal.server.swarmbench.orders import GraphOrder, Order, SwarmOrder
from shoal.server.swarmbench.record import Document, new_phase
from shoal.server.swarmbench.turns import Thread
from shoal.types import FinishReason, Receipt, Result

INTERRUPTED = "the server stopped before the run had ended"
_STATES = {"done": CardState.DONE, "failed": CardState.FAILED, "cancelled": CardState.ABORTED}


@dataclass(slots=True)
class Resumed:
    """The record of such a run as the history has it, and whose it was."""

    document: Document
    caller: str

    def thread(self) -> Thread:
        """Where it stands in its conversation."""
        document = self.document
        return Thread(document["thread"], tuple(document["earlier"]), document["left_out"])

    def order(self) -> Order:
        """What it was asked for. Reading a graph takes time. Raises what orders do, and what Python does for fields."""
        document, graph = self.document, self.document.get("graph")
        cards = tuple(Specialist(card["name"], card["task"]) for card in document["together"]["cards"])
        facts = {**document["settings"], "caller": self.caller, "thread": self.thread()}
        if graph is not None:
            return GraphOrder.read(graph["file"], graph["text"], graph["inputs"], known=cards, **facts)
        team = cards[: len(cards) - document["settings"]["synthesis"]]
        return SwarmOrder(question=document["question"], team=team, **facts)

    def begin(self) -> tuple[Document, Before]:
        """The record as it grows from here, and what the swarm has to know.

        Cards are empty: those whose end the checkpoint has are filled from what is here as the run is taken up.
        """
        old, phase = self.document, self.document["together"]
        team = [Specialist(card["name"], card["task"]) for card in phase["cards"]]
        fresh = {**new_phase(team), "steps": list(phase["steps"]), "summary": phase["summary"]}
        ended_s = phase["summary"]["wall_s"] if phase["summary"] else 0.0
        used_s = max([ended_s, *((row[0] + row[1]) / 1e3 for row in phase["steps"][-1:])])
        empty = {"one_by_one": None, "same_texts": None, "single_tokens_per_s": None}
        return {**old, "state": "running", "note": None, "together": fresh, **empty}, Before(
            used_s, ended_s, self.recall
        )

    def recall(self, number: int, card: Card) -> None:
        """Fill in what the record had of an agent that had ended. What it lost in its last second stays unknown."""
        old = self.document["together"]["cards"][number]
        card.text = card.text or old["text"]  # one that was stopped has none in the checkpoint
        card.tokens = old["tokens"]
        card.state = _STATES.get(old["state"], card.state)
        ttft_s = None if old["ttft_ms"] is None else old["ttft_ms"] / 1e3
        wrote_s = (old["tokens"] - 1) / old["tokens_per_s"] if old["tokens_per_s"] else 0.0
        card.result = Result(
            id="",
            tokens=(),
            text=card.text,
            finish_reason=FinishReason(old["finish_reason"] or "stop"),
            prompt_tokens=old["prompt_tokens"],
            ttft_s=ttft_s,
            latency_s=(ttft_s or 0.0) + wrote_s,
            seed=self.document["settings"]["seed"],
            receipt=Receipt(cached_tokens=old["cached_tokens"]),
        )
