"""Hints of callers: how long KV is wanted, priority, length."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.server.anthropic.schemas import MessagesRequest
from shoal.server.openai.schemas import ChatRequest
from shoal.types import Priority
from tests.support.live import Live, error_of, toy

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (Priority.NORMAL, 0.0, None)),
        ({"prompt_cache_retention": "24h"}, (Priority.NORMAL, 86_400.0, None)),
        ({"prompt_cache_retention": "in-memory"}, (Priority.NORMAL, 600.0, None)),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 80}}}, (Priority.HIGH, 0.0, 80)),
        ({"nvext": {"agent_hints": {"priority": -1}}}, (Priority.LOW, 0.0, None)),
        ({"nvext": {"agent_hints": {"priority": 5}}, "priority": "low"}, (Priority.LOW, 0.0, None)),
        ({"nvext": {"agent_hints": {"latency_sensitivity": 1.0}}}, (Priority.HIGH, 0.0, None)),
    ],
)
def test_hints_of_chats(fields: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    body = ChatRequest.model_validate({**CHAT, **fields})
    assert (body.priority_class(), body.keep_s, body.hints.osl) == wanted


def test_the_longest_ttl_of_a_message_counts() -> None:
    text: dict[str, Any] = {"type": "text", "text": "x"}
    short = {**text, "cache_control": {"type": "ephemeral"}}
    long = {**text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for content, wanted in ((["x"], 0), ([short], 300), ([short, long], 3600)):
        blocks = [text if one == "x" else one for one in content]
        body = {"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
        assert MessagesRequest.model_validate(body).keep_s == wanted


def test_hints_reach_the_engine_and_unknown_ones_are_refused_by_name() -> None:
    with Live(toy()) as live:
        hints = {"prompt_cache_retention": "24h", "nvext": {"agent_hints": {"osl": 3, "speculative_prefill": False}}}
        assert live.post("/v1/chat/completions", {**CHAT, **hints}).status_code == 200
        wrong = live.post("/v1/chat/completions", {**CHAT, "nvext": {"agent_hints": {"priorty": 1}}})
        assert wrong.status_code == 400
        assert "priorty" in error_of(wrong)["param"]
