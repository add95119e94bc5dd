"""Agent frameworks on the engine of this process: no server, no socket."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("openai", reason="openai is not installed")
import httpx
import openai
from pydantic import BaseModel, ConfigDict, Field

from shoal import AsyncEngine, Engine
from shoal.errors import ShoalError
from shoal.runners.fake import FakeRunner
from shoal.server.inprocess import (
    BASE_URL,
    EngineTransport,
    SyncEngineTransport,
    async_openai,
    langchain_options,
    sync_openai,
)
from tests.server.conftest import MODEL
from tests.support.brake import Brake
from tests.support.engines import toy_engine
from tests.support.live import LETTERS

pytestmark = [
    # Not our warnings: these libraries use each other's deprecated names while they are imported and run.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
HELLO: Any = [{"role": "user", "content": "Hello"}]
PLAIN: dict[str, Any] = {"model": "toy", "messages": HELLO, "temperature": 0, "logit_bias": LETTERS}


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    strength: int = Field(ge=0, le=10)


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever tries to connect anywhere fails."""

    def connect(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    yield
    gc.collect()


def idle(engine: Engine, timeout_s: float = 60.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        stats = engine.stats()
        if stats.running == stats.waiting == stats.kv_held_bytes == 0:
            return True
        time.sleep(0.01)
    return False


# -- the transport, on the toy model --------------------------------------------------------------------------------


def test_answers_equal_those_of_the_server_and_stream_as_they_are_written() -> None:
    brake = Brake()

    async def work(engine: Engine) -> tuple[str, str]:
        async with async_openai(engine, "toy") as client:
            whole = await client.chat.completions.create(**PLAIN, max_tokens=40)
            pieces: list[str] = []
            brake.set(after=20)
            stream = await client.chat.completions.create(**PLAIN, max_tokens=40, stream=True)
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if len("".join(pieces)) == 10:  # before the others are written
                    brake.release()
            return whole.choices[0].message.content or "", "".join(pieces)

    with toy_engine(FakeRunner(), speculation=False) as engine:  # a token a pass
        whole, streamed = asyncio.run(work(brake.fitted(engine)))
        assert whole == streamed
        assert len(whole) == 40
        with sync_openai(engine, "toy") as client:
            again = client.chat.completions.create(**PLAIN, max_tokens=40)
            assert again.choices[0].message.content == whole
            stream = client.chat.completions.create(**PLAIN, max_tokens=40, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
        assert not engine.closed


def test_many_calls_share_one_batch() -> None:
    widest = 0

    async def work(engine: Engine) -> int:
        async with async_openai(engine, "toy") as client:
            calls = [client.chat.completions.create(**PLAIN, max_tokens=60) for _ in range(8)]
            return len(await asyncio.gather(*calls))

    with toy_engine(FakeRunner(step_s=0.01), speculation=False) as engine:

        def note(record: Any) -> None:
            nonlocal widest
            widest = max(widest, record.batch)

        engine.listen(note)
        assert asyncio.run(work(engine)) == 8
        assert widest >= 6
        assert asyncio.run(work(engine)) == 8  # another event loop


@pytest.mark.parametrize("how", ["cancelled", "stream closed", "timed out"])
def test_a_client_that_leaves_ends_its_request(how: str) -> None:
    async def work(engine: Engine) -> None:
        async with async_openai(engine, "toy") as client:
            if how == "cancelled":
                call = asyncio.ensure_future(client.chat.completions.create(**PLAIN, max_tokens=2000))
                while engine.stats().running == 0:
                    await asyncio.sleep(0.01)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            elif how == "stream closed":
                stream = await client.chat.completions.create(**PLAIN, max_tokens=2000, stream=True)
                async for _ in stream:
                    break
                await stream.close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(**PLAIN, max_tokens=2000, timeout=0.1)
            assert await asyncio.to_thread(idle, engine)

    with toy_engine(FakeRunner(step_s=0.005)) as engine:
        asyncio.run(work(engine))
        steps = engine.stats().steps
        assert steps < 200


def test_a_synchronous_stream_left_early_ends_its_request() -> None:
    with toy_engine(FakeRunner(step_s=0.005)) as engine, sync_openai(engine, "toy") as client:
        with client.chat.completions.create(**PLAIN, max_tokens=2000, stream=True) as stream:
            next(iter(stream))
        assert idle(engine)


def test_errors_are_those_of_the_api() -> None:
    with toy_engine() as engine, sync_openai(engine, "toy") as client:
        with pytest.raises(openai.NotFoundError, match="not loaded"):
            client.chat.completions.create(**{**PLAIN, "model": "gpt-4"})
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**{**PLAIN, "temperature": -1})
        assert client.models.list().data[0].id == "toy"
        with httpx.Client(transport=SyncEngineTransport(engine)) as plain:  # type: ignore[arg-type]
            switch = plain.post("http://shoal.invalid/models/load", json={"model": "other"})
            assert (switch.status_code, "cannot be switched" in switch.json()["error"]["message"]) == (400, True)
            health = plain.get("http://shoal.invalid/health?probe=1").json()
            assert health["status"] == "ok"
    threads = {thread.name for thread in threading.enumerate()}
    assert "shoal-inprocess" not in threads


def test_the_page_is_not_in_this_process() -> None:
    paths = ("/", "/page/main.js", "/swarmbench/state", "/swarmbench/runs", "/swarmbench/storage", "/health")
    with toy_engine() as engine, sync_openai(engine, "toy") as client:
        http, base = client._client, BASE_URL.removesuffix("/v1")
        assert [http.get(base + path).status_code for path in paths] == [404] * 5 + [200]


def test_an_engine_that_closes_under_a_call_is_an_error_for_it() -> None:
    async def work(engine: Engine) -> None:
        async with httpx.AsyncClient(transport=EngineTransport(engine)) as client:  # type: ignore[arg-type]
            body = {"messages": HELLO, "max_tokens": 2000, "ignore_eos": True}
            call = asyncio.ensure_future(client.post("http://shoal.invalid/v1/chat/completions", json=body))
            while engine.stats().running == 0:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.close)
            assert (await call).status_code == 503

    asyncio.run(work(toy_engine(FakeRunner(step_s=0.005))))


# -- the frameworks, on the default model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    try:
        engine = Engine.load(MODEL, max_batch=8)
    except ShoalError as error:
        pytest.skip(f"no model: {error}")
    with engine:
        yield engine


def test_langgraph(real: Engine) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    graph = pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
    options = langchain_options(real, MODEL)
    model = langchain.ChatOpenAI(**options, temperature=0, max_tokens=24)

    async def write(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def judge(state: Any) -> Any:
        mood = await model.with_structured_output(Mood).ainvoke("I am so glad!")
        return {"messages": [("ai", mood.mood)]}

    built = graph.StateGraph(graph.MessagesState)
    for name, node in (("write", write), ("judge", judge)):
        built.add_node(name, node)
        built.add_edge(graph.START, name)
        built.add_edge(name, graph.END)

    async def run() -> Any:
        pieces = [piece async for piece in model.astream("Say hello.")]
        assert len(pieces) > 3
        states = await built.compile().abatch([{"messages": [("user", f"Name {n} fruits.")]} for n in (2, 3)])
        await options["http_async_client"].aclose()
        return states

    for state in asyncio.run(run()):
        assert [message.type for message in state["messages"]] == ["human", "ai", "ai"]
        assert {message.content for message in state["messages"]} & {"happy", "sad"}
    assert model.invoke("Say hello.").content
    options["http_client"].close()


def test_pydantic_ai(real: Engine) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> tuple[Any, list[str]]:
        async with async_openai(real) as client:
            model = OpenAIChatModel(real.spec.name, provider=OpenAIProvider(openai_client=client))
            settings: Any = {"max_tokens": 60, "temperature": 0}
            judge = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Mood), model_settings=settings)
            plain = pydantic_ai.Agent(model, model_settings=settings)
            mood = (await judge.run("I am so glad!")).output
            async with plain.run_stream("Say hello.") as stream:
                return mood, [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

    mood, pieces = asyncio.run(run())
    assert isinstance(mood, Mood)
    assert len(pieces) > 3


def test_openai_agents(real: Engine) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    calls: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def lookup(city: Literal["Prague", "Brno"]) -> str:
        """The weather of a city."""
        calls.append(city)
        return "sunny"

    async def run(kind: Any) -> tuple[Any, Any]:
        async with async_openai(AsyncEngine(real), MODEL) as client:
            model = kind(MODEL, openai_client=client)
            settings = agents.ModelSettings(tool_choice="required", max_tokens=60, temperature=0)
            worker = agents.Agent(
                name="worker",
                instructions="Use the tool.",
                model=model,
                tools=[lookup],
                model_settings=settings,
                # an answer that is cut off, as a small model's may be, is an error to the other kind
                tool_use_behavior="run_llm_again"
                if kind is agents.OpenAIChatCompletionsModel
                else "stop_on_first_tool",
            )
            settings = agents.ModelSettings(max_tokens=60, temperature=0)
            judge = agents.Agent(name="judge", model=model, output_type=Mood, model_settings=settings)
            told = await agents.Runner.run(worker, "What is the weather in Prague?", max_turns=3)
            streamed = agents.Runner.run_streamed(judge, "I like sunny weather.")
            async for _ in streamed.stream_events():
                pass
            return told.final_output, streamed.final_output

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls.clear()
        text, mood = asyncio.run(run(kind))
        assert calls
        assert isinstance(text, str)
        assert isinstance(mood, Mood)


def test_closing_a_transport_ends_what_other_threads_wait_for() -> None:
    with toy_engine(FakeRunner(step_s=0.02)) as engine:
        transport: Any = SyncEngineTransport(engine, "toy")
        client = httpx.Client(transport=transport, base_url="http://shoal.invalid/v1", timeout=60)
        ends: list[str] = []

        def call(stream: bool) -> None:
            body = {**PLAIN, "max_tokens": 3000, "stream": stream}
            try:
                client.post("/chat/completions", json=body)
            except httpx.ReadError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=call, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        with client.stream("POST", "/chat/completions", json={**PLAIN, "max_tokens": 3000, "stream": True}) as held:
            next(held.iter_lines())
            until = time.monotonic() + 60
            while engine.stats().running < 3 and time.monotonic() < until:
                time.sleep(0.01)
            transport.close()
        for thread in threads:
            thread.join(60)
        assert ends == ["the transport is closed"] * 2
        with pytest.raises(httpx.ReadError, match="is closed"):
            client.post("/chat/completions", json=PLAIN)
        transport.close()
        until = time.monotonic() + 60
        while engine.stats().running and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.stats().running == 0
