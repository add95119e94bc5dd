"""What happens when an agent's attempt fails: try again, another agent, a default, a skip, or failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.checks import is_number
from shoal.errors import GraphError

if TYPE_CHECKING:
    from shoal.agents.build.agent import Agent


@dataclass(frozen=True, slots=True)
class FailRun:
    """The node fails, and so does what depends on it, unless its own policy says otherwise."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The node is left out: dependants go on without it. One that has nothing else, or names it, is left out too."""


@dataclass(frozen=True, slots=True)
class Default:
    """Dependants get `value` in place of an output."""

    value: Any


@dataclass(frozen=True, slots=True)
class Fallback:
    """Another agent writes in its place, in the time kept back for it: `reserve_s` seconds of the node's deadline."""

    agent: Agent
    reserve_s: float | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """Up to `times` more attempts, each with a new seed, after `backoff_s`, which grows by `factor`; then `then`."""

    times: int
    backoff_s: float
    factor: float
    then: Last


Last: TypeAlias = FailRun | Skip | Default | Fallback
Policy: TypeAlias = Last | Retry

fail = FailRun()
skip = Skip()


def default(value: Any) -> Default:
    """On failure dependants get `value`: text, or what the agent's schema would give."""
    return Default(value)


def fallback(agent: Agent, *, reserve_s: float | None = None) -> Fallback:
    """On failure `agent` writes instead, from the same inputs.

    `reserve_s` of the node's (or else the graph's) time is kept back for it; by default its `timeout_s`, or a quarter
    of that time. GraphError when it is not above 0.
    """
    if reserve_s is not None and not reserve_s > 0:
        raise GraphError(f"reserve_s is {reserve_s!r}", value=reserve_s, hint="it must be above 0 seconds")
    return Fallback(agent, reserve_s)


def retry(times: int = 2, *, backoff_s: float = 0.2, factor: float = 2.0, then: Last = fail) -> Retry:
    """Try up to `times` more, then do as `then` says. Raises `GraphError` for numbers that make no sense.

    Only causes that may go away are tried again: a failed pass, a broken connection, a full queue, a timeout, and
    output that does not fit the schema when it was sampled (a greedy agent would write the same again).
    """
    for name, value, low in (("times", times, 1), ("backoff_s", backoff_s, 0), ("factor", factor, 1)):
        if not is_number(value, low) or value >= 1000:
            raise GraphError(f"{name} is {value!r}", value=value, hint=f"it must be from {low} to 1000")
    if not isinstance(times, int):
        raise GraphError(f"times is {times!r}", value=times, hint="it must be a whole number")
    if isinstance(then, Retry):
        raise GraphError("then is another retry", value=then, hint="it must be default, skip, fail or fallback")
    return Retry(times, backoff_s, factor, then)


def attempts_of(policy: Policy) -> tuple[int, Last]:
    """How many attempts a policy allows, and what it does after the last."""
    return (1 + policy.times, policy.then) if isinstance(policy, Retry) else (1, policy)
