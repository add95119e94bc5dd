"""Clients whose dependencies pin what others need newer: run where they are installed, each unmodified."""

from __future__ import annotations

import asyncio
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


def test_autogen_agents_answer_stream_and_call_their_tools(real: Live) -> None:
    pytest.importorskip("autogen_agentchat", reason="autogen-ext pins pillow and protobuf: install it in its own place")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    async def talk() -> None:
        able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        client = OpenAIChatCompletionClient(
            model=MODEL,
            base_url=f"{real.url}/v1",
            api_key="none",
            max_tokens=48,
            temperature=0,
            model_info={**able, "family": "unknown"},
        )
        agents = [
            AssistantAgent(name, client, tools=[weather], system_message=f"You are {name}.", model_client_stream=stream)
            for name, stream in (("ann", False), ("bob", True))
        ]
        told = await RoundRobinGroupChat(agents, max_turns=2).run(task="Say where you are.")
        assert told.messages[0].source == "user"
        assert {"ann", "bob"} <= {message.source for message in told.messages}
        tool = FunctionTool(weather, "The weather in a city.")
        asked = [UserMessage(content="What is the weather in Oslo?", source="user")]
        made = await client.create(asked, tools=[tool], tool_choice=tool)
        assert [call.name for call in made.content] == ["weather"]
        assert made.usage.prompt_tokens > 0
        await client.close()

    asyncio.run(talk())


def test_a_crew_of_crewai_does_its_tasks(real: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED", "CREWAI_DISABLE_VERSION_CHECK"):
        monkeypatch.setenv(name, "true")
    crewai = pytest.importorskip("crewai", reason="crewai pins much of what others need: install it in its own place")
    llm = crewai.LLM(model=f"openai/{MODEL}", base_url=f"{real.url}/v1", api_key="none", max_tokens=48, temperature=0)
    agents = [
        crewai.Agent(role=role, goal=goal, backstory="You work at sea.", llm=llm, max_iter=2)
        for role, goal in (("Sailor", "Tell where the ship is"), ("Writer", "Write one line about it"))
    ]
    tasks = [crewai.Task(description=f"{agent.goal}.", expected_output="one line", agent=agent) for agent in agents]
    made = crewai.Crew(agents=agents, tasks=tasks, tracing=False).kickoff()
    assert len(made.tasks_output) == 2
    assert all(output.raw.strip() for output in made.tasks_output)
    assert made.token_usage.prompt_tokens > 0
