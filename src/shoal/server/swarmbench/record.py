"""The record of a run as a document, and the frames by which it grows. The page applies the same frames.

{"id", "title", "question", "model", "created", "state", "note", "settings", "thread", "turn", "earlier", "left_out",
 "together": phase, "one_by_one": phase or null, "same_texts", "single_tokens_per_s", "finals",
 "graph": null or {"file", "name", "text", "inputs"}}
Of a thread it has the id, the number of its turn, and the turns before (`turns.turn_of`); the prompts are without the
first `left_out` of these.
phase: {"cards": [card], "steps": [row], "summary"}     (rows: `swarm_steps.Row`)
frame: {"phase", "cards": [changes and "more" text], "steps": [more rows], "summary"}, or {"end": {...}}
A card that the record does not have yet comes with its name and task; one that begins anew with an empty text.
`finals` are the places of the cards that a graph was for, in a record whose run has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.agents.cards import Card, CardState, Specialist, Summary
from shoal.server.swarmbench.steps import StepLog
from shoal.types import FinishReason, Result

Document = dict[str, Any]


def new_phase(team: Sequence[Specialist]) -> Document:
    """A phase of which nothing has run yet."""
    return {"cards": [_new_card(member) for member in team], "steps": [], "summary": None}


def _new_card(member: Specialist) -> Document:
    numbers = {"tokens": 0, "tokens_per_s": 0.0, "ttft_ms": None, "prompt_tokens": 0, "cached_tokens": 0}
    told = {"state": "queued", "finish_reason": None, "error": None, "replica": None}
    return {"name": member.name, "task": member.task, "text": "", **numbers, **told}


def apply(document: Document, frame: Document) -> None:
    """Bring a record up to date with the next frame."""
    if "end" in frame:
        document.update(frame["end"])
        return
    phase = document[frame["phase"]]
    if phase is None:
        phase = document[frame["phase"]] = {"cards": [], "steps": [], "summary": None}
    for change in frame["cards"]:
        number = change["i"]
        if number == len(phase["cards"]):
            phase["cards"].append(_new_card(Specialist(change["name"], change["task"])))
        card = phase["cards"][number]
        card.update({name: value for name, value in change.items() if name not in ("i", "more")})
        card["text"] += change["more"]
    phase["steps"] += frame["steps"]
    phase["summary"] = frame["summary"]


def frozen(document: Document) -> Document:
    """A copy that later frames leave as it is."""
    phases = {name: document[name] for name in ("together", "one_by_one")}
    copies = {
        name: phase and {**phase, "cards": [dict(card) for card in phase["cards"]], "steps": list(phase["steps"])}
        for name, phase in phases.items()
    }
    return {**document, **copies}


def card_numbers(card: Card, now: float, began: float) -> Document:
    """What a card shows beside its text. `now` and `began` are of the clock that its swarm uses, in seconds."""
    result = card.result
    ttft = None if card.first_token_at is None else card.first_token_at - began
    if result is not None and result.ttft_s is not None:
        ttft = result.ttft_s
    progress = card.handle.progress() if card.handle is not None else None
    told = progress or result  # an agent of a resumed run has no request here
    return {
        "state": "cancelled" if card.state is CardState.ABORTED else str(card.state),
        "tokens": card.tokens,
        "tokens_per_s": round(card.tokens_per_s(now), 1),
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 1),
        "prompt_tokens": told.prompt_tokens if told is not None else 0,
        "cached_tokens": told.cached_tokens if told is not None else 0,
        "replica": None if progress is None else progress.replica or None,
        "finish_reason": None if result is None else str(result.finish_reason),
        "error": card.cause if result is None else card.cause or _why(result),
    }


def _why(result: Result) -> str | None:
    """What went wrong, in words."""
    if result.finish_reason is FinishReason.TIMEOUT:
        return "its deadline passed"
    return None if result.error is None else str(result.error)


def totals(document: Document) -> Document | None:
    """What the line that closes a run says of its agents; None when nothing ran."""
    summary = document["together"]["summary"]
    if summary is None:
        return None
    cards = document["together"]["cards"]
    agents = len(cards) - document["settings"]["synthesis"]
    if document.get("graph"):  # nodes of rules write nothing themselves
        agents = sum(card["prompt_tokens"] > 0 for card in cards)
    names = ("tokens", "wall_s", "prompt_tokens", "cached_tokens")
    return {"agents": agents, **{name: summary.get(name, 0) for name in names}}


def phase_summary(summary: Summary, log: StepLog) -> Document:
    """A phase in numbers: the agents' tokens and time, the shared prefix, KV in bytes now and at its most."""
    held, saved = (log.rows[-1][8], log.rows[-1][9]) if log.rows else (0, 0)
    return {
        "tokens": summary.tokens,
        "wall_s": round(summary.wall_s, 4),
        "tokens_per_s": round(summary.tokens_per_s, 1),
        "prefix_tokens": summary.prefix_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "kv_held": held,
        "kv_saved": saved,
        "kv_peak_held": log.peak_held,
        "kv_peak_saved": log.peak_saved,
        "widest": log.widest,
        "tokens_a_pass": round(log.tokens_a_pass, 2),
    }
