"""Turns of a conversation: each is a run, and a later one has the earlier questions and answers in all its prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.engine.engine import Engine
from shoal.server.errors import bad_request
from shoal.server.swarmbench.record import Document, totals
from shoal.types import Message, Request

MAX_TURNS = 100  # each record has the ones before it


@dataclass(frozen=True, slots=True)
class Thread:
    """Where a run stands in its conversation: the id of the first turn, and the turns before, as `turn_of`.

    Of these the first `left_out` are not read any more.
    """

    id: str | None = None
    earlier: tuple[Document, ...] = ()
    left_out: int = 0

    def messages(self) -> list[Message]:
        """What the prompts of the next turn go on from. Turns in which nobody wrote anything are not in it."""
        chat: list[Message] = []
        for turn in self.earlier[self.left_out :]:
            if turn["answer"]:
                chat += [
                    {"role": "user", "content": turn["question"]},
                    {"role": "assistant", "content": turn["answer"]},
                ]
        return chat

    def facts(self, own: str) -> Document:
        """What the record of the run `own` has of it."""
        turn = len(self.earlier) + 1
        return {"thread": self.id or own, "turn": turn, "earlier": list(self.earlier), "left_out": self.left_out}


def turn_of(run: Document) -> Document:
    """A run as later turns have it: {"id", "question", "answer", "totals"}.

    The answer is the synthesis; where there is none it is what the agents wrote, of a graph those that it was for.
    """
    cards = run["together"]["cards"]
    if run.get("graph"):
        cards = [cards[place] for place in run.get("finals", ())]
    cards = [card for card in cards if card["text"].strip()]
    if run["settings"]["synthesis"] and cards and cards[-1] is run["together"]["cards"][-1]:
        cards = cards[-1:]
    answer = "\n\n".join(
        card["text"].strip() if len(cards) == 1 else f"{card['name']}: {card['text']}" for card in cards
    )
    return {"id": run["id"], "question": run["question"].strip(), "answer": answer, "totals": totals(run)}


def thread_after(run: Document) -> Thread:
    """The conversation that goes on from an ended run. ApiError 400 when it has too many turns."""
    earlier = (*run.get("earlier", ()), turn_of(run))
    if len(earlier) >= MAX_TURNS:
        raise bad_request(f"the thread has {len(earlier)} turns, which is the most; begin a new one", "after")
    return Thread(run.get("thread", run["id"]), earlier)


def fitting(engine: Engine, thread: Thread, prompt: Callable[[Sequence[Message]], list[Message]]) -> Thread:
    """The same with as many of the oldest turns left out as it takes for a prompt to fill half of what can be read.

    `prompt` makes the longest one from the turns before. The other half is for what the agents write, and for others
    to read that. Takes the time of tokenising.
    """
    limit = min(engine.spec.context_length, engine.spec.kv_capacity) // 2

    def fits(left_out: int) -> bool:
        shorter = Thread(thread.id, thread.earlier, left_out)
        return len(engine.tokenize(Request(messages=prompt(shorter.messages())))) <= limit

    count = len(thread.earlier)
    return Thread(thread.id, thread.earlier, bisect_left(range(count), True, key=fits))
