"""Agent frameworks, unmodified, each at a small real job on the default model.

A model of 135M parameters does not call tools of its own accord; where a job needs a call, the framework's own way
of requiring one is used, and the grammar sees to it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.conftest import MODEL
from tests.support.live import Live

pytestmark = [
    # Not our warnings: these libraries use each other's deprecated names while they are imported and run.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    strength: int = Field(ge=0, le=10)


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """They leave sockets to the garbage collector; let that be here, not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def test_openai_agents_runs_a_tool_and_a_structured_answer(real: Live) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    from openai import AsyncOpenAI

    calls: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def lookup(city: Literal["Prague", "Brno"]) -> str:
        """The weather of a city."""
        calls.append(city)
        return "sunny"

    async def work(kind: Any) -> tuple[Any, Any]:
        client = AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
        model = kind(MODEL, openai_client=client)
        settings = agents.ModelSettings(tool_choice="required", max_tokens=60, temperature=0)
        worker = agents.Agent(
            name="worker",
            instructions="Use the tool.",
            model=model,
            tools=[lookup],
            model_settings=settings,
            # an answer that is cut off, as a small model's may be, is an error to the other kind
            tool_use_behavior="run_llm_again" if kind is agents.OpenAIChatCompletionsModel else "stop_on_first_tool",
        )
        judge = agents.Agent(
            name="judge",
            model=model,
            output_type=Mood,
            model_settings=agents.ModelSettings(max_tokens=60, temperature=0),
        )
        told = await agents.Runner.run(worker, "What is the weather in Prague?", max_turns=3)
        streamed = agents.Runner.run_streamed(judge, "I like sunny weather.")
        async for _ in streamed.stream_events():
            pass
        await client.close()
        return told.final_output, streamed.final_output

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls.clear()
        text, mood = asyncio.run(work(kind))
        assert calls
        assert set(calls) <= {"Prague", "Brno"}
        assert isinstance(text, str)
        assert isinstance(mood, Mood)


def test_langchain_chat_tools_and_structure(real: Live) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = langchain.ChatOpenAI(
        base_url=f"{real.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=80, max_retries=0
    )
    assert model.invoke("Say hello.").content
    assert "".join(str(chunk.content) for chunk in model.stream("Say hello."))
    bound = model.bind_tools([add], tool_choice="required", parallel_tool_calls=False)
    [call] = bound.invoke("What is 2 + 3?").tool_calls
    assert call["name"] == "add"
    assert isinstance(add.invoke(call["args"]), int)
    assert isinstance(model.with_structured_output(Mood).invoke("I am so glad!"), Mood)
    assert isinstance(model.with_structured_output(Mood, method="function_calling").invoke("I am so glad!"), Mood)


def test_langgraph_runs_a_graph_with_parallel_branches(real: Live) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    graph = pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
    from langchain_core.tools import tool
    from langgraph.prebuilt import ToolNode

    @tool
    def weather(city: Literal["Prague", "Brno"]) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    model = langchain.ChatOpenAI(
        base_url=f"{real.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=60, max_retries=0
    )
    asking = model.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)

    def ask(state: Any) -> Any:
        return {"messages": [asking.invoke(state["messages"])]}

    def answer(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    built = graph.StateGraph(graph.MessagesState)
    built.add_node("ask", ask)
    built.add_node("tools", ToolNode([weather]))
    built.add_node("answer", answer)
    built.add_edge(graph.START, "ask")
    built.add_edge("ask", "tools")
    built.add_edge("tools", "answer")
    built.add_edge("answer", graph.END)
    runs = built.compile().batch([{"messages": [("user", f"Weather, try {n}?")]} for n in range(3)])
    for run in runs:
        kinds = [message.type for message in run["messages"]]
        assert kinds == ["human", "ai", "tool", "ai"]
        assert "sunny" in run["messages"][2].content


def test_pydantic_ai_structured_output_and_streaming(real: Live) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def work() -> tuple[Any, Any, str]:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{real.url}/v1", api_key="none"))
        settings: Any = {"max_tokens": 60, "temperature": 0}
        by_tool = pydantic_ai.Agent(model, output_type=Mood, model_settings=settings)
        native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Mood), model_settings=settings)
        plain = pydantic_ai.Agent(model, model_settings=settings, instructions="Be brief.")
        first = (await by_tool.run("I am so glad!")).output
        second = (await native.run("I am so glad!")).output
        async with plain.run_stream("Say hello.") as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        return first, second, text

    first, second, text = asyncio.run(work())
    assert isinstance(first, Mood)
    assert isinstance(second, Mood)
    assert text


def test_smolagents_tool_calling_agent(real: Live) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")
    model = smolagents.OpenAIServerModel(
        model_id=MODEL, api_base=f"{real.url}/v1", api_key="none", temperature=0, max_tokens=60
    )

    @smolagents.tool  # type: ignore[untyped-decorator, unused-ignore]
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"sunny in {city}"

    # Its agents require a tool call in every step, the final answer being one too.
    agent = smolagents.ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    assert agent.run("Weather in Prague?") is not None
    message = model.generate([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}])
    assert message.content
