"""Clients whose dependencies pin what others need newer: run where they are installed, each unmodified."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pydantic import BaseModel

from tests.server.conftest import MODEL
from tests.support.live import Live


class Colour(BaseModel):
    """A colour of the list."""

    name: str


def test_instructor_brings_a_model_of_pydantic(real: Live) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor pins rich and jiter: install it with --no-deps")
    import openai

    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            made: Any = instructor.from_openai(client, mode=mode)
            colour = made.chat.completions.create(
                model=MODEL,
                response_model=Colour,
                max_retries=0,
                max_tokens=200,
                messages=[{"role": "user", "content": "Name a colour."}],
            )
            assert isinstance(colour, Colour)


def test_litellm_is_a_client(real: Live) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at import
    litellm = pytest.importorskip("litellm", reason="litellm needs boto3, which pins python-dateutil")
    told = {"api_key": "none", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    answer = litellm.completion(model=f"openai/{MODEL}", api_base=f"{real.url}/v1", **told)
    assert answer.usage.completion_tokens > 0
    pieces = list(litellm.completion(model=f"openai/{MODEL}", api_base=f"{real.url}/v1", stream=True, **told))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    messages = litellm.completion(model=f"anthropic/{MODEL}", api_base=real.url, **told)
    assert messages.usage.completion_tokens > 0
