"""The report of `systems/agents.py` as a graph of LangGraph, whose agents call a server over HTTP.

What an application has that does not plan inside the engine: the same prompts, the same lengths, one call at a time for
each node, on this engine's server or on llama.cpp's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

from shoal.bench.systems.agents import CALLS, PAGES, SECTIONS, per_minute
from shoal.bench.systems.base import Setup
from shoal.bench.systems.http import AnyServer, LlamaServer, ShoalServer
from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job
from shoal.errors import BenchmarkError
from shoal.models import Store, load_tokenizer

if TYPE_CHECKING:
    import httpx


class _State(TypedDict):
    """What nodes hand on."""

    plan: str
    parts: Annotated[list[str], operator.add]
    review: str
    text: str


class _Framework(AnyServer):
    """Runs the graphs of a level at once, as `Agents` does."""

    VARIANTS: ClassVar[dict[str, str]] = {"framework": "through LangGraph over HTTP"}

    @staticmethod
    def lacking() -> str | None:
        """Which of the framework's packages is not installed."""
        found = all(importlib.util.find_spec(name) for name in ("langgraph", "langchain_openai"))
        return None if found else "langgraph and langchain-openai are not installed"

    def prepare(self, setup: Setup) -> None:
        """Start the server; the editor is shown all that the others wrote, so its slots are longer than the jobs."""
        super().prepare(replace(setup, length=3 * setup.length))

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """Run the graphs; each call has the time of its answer and as many tokens as the server says."""
        if len(jobs) < CALLS:  # the question whether the server takes token ids
            return super().run(jobs)
        tokenizer = load_tokenizer(Store().resolve(self._source.model))
        rules = tokenizer.decode(jobs[0].prompt[: len(jobs[0].prompt) * 9 // 10])
        graphs = len(jobs) // CALLS
        traces: list[TokenTimes] = []
        begin = time.perf_counter()
        asyncio.run(self._in_loop(rules, jobs[0].max_tokens, graphs, traces, begin))
        wall_s = time.perf_counter() - begin
        if len(traces) != graphs * CALLS:
            raise BenchmarkError("the graphs made another number of calls", value=len(traces), limit=graphs * CALLS)
        return RunTimes(traces, wall_s, per_minute(graphs, wall_s))

    async def _in_loop(self, rules: str, count: int, graphs: int, traces: list[TokenTimes], begin: float) -> None:
        import httpx

        # The framework's own client stays for the process, bound to the event loop of the first run.
        async with httpx.AsyncClient(timeout=600) as client:
            await self._all(client, rules, count, graphs, traces, begin)

    async def _all(
        self, client: httpx.AsyncClient, rules: str, count: int, graphs: int, traces: list[TokenTimes], begin: float
    ) -> None:
        from langchain_openai import ChatOpenAI

        make: Any = ChatOpenAI  # whose types want a secret where a server here has none
        same: dict[str, Any] = {"base_url": self._url, "api_key": "none", "model": self._model, "temperature": 0}
        same |= {"max_retries": 0, "http_async_client": client, "extra_body": {"ignore_eos": True}}

        def model(tokens: int) -> Any:
            return make(max_tokens=tokens, **same)

        short, long = model(count), model(PAGES * count)

        async def ask(which: Any, task: str) -> str:
            arrival = time.perf_counter() - begin
            answer = await which.ainvoke([("system", rules), ("user", task)])
            at = time.perf_counter() - begin
            written = int((answer.usage_metadata or {}).get("output_tokens", 0))
            traces.append(TokenTimes(arrival, [-1] * written, [at] * written))
            return str(answer.content)

        built = _report(ask, short, long)
        state: _State = {"plan": "", "parts": [], "review": "", "text": ""}
        await asyncio.gather(*(built.ainvoke(state) for _ in range(graphs)))


def _report(ask: Callable[[Any, str], Any], short: Any, long: Any) -> Any:
    """A planner, three writers at once, a reviewer, an editor."""
    from langgraph.graph import END, START, StateGraph

    async def plan(state: _State) -> dict[str, Any]:  # noqa: ARG001 - a node's face
        return {"plan": await ask(short, "Outline a short report about the harbour.")}

    def writer(section: str) -> Callable[[_State], Any]:
        async def write(state: _State) -> dict[str, Any]:
            return {"parts": [await ask(long, f"{state['plan']}\n\nWrite the section on {section}.")]}

        return write

    async def review(state: _State) -> dict[str, Any]:
        return {"review": await ask(short, "\n\n".join([*state["parts"], "Say what is inconsistent."]))}

    async def edit(state: _State) -> dict[str, Any]:
        return {"text": await ask(short, "\n\n".join([*state["parts"], state["review"], "Merge the sections."]))}

    graph: Any = StateGraph(_State)
    graph.add_node("planner", plan)
    graph.add_node("reviewer", review)
    graph.add_node("editor", edit)
    graph.add_edge(START, "planner")
    names = [f"writer-{number}" for number in range(len(SECTIONS))]
    for name, section in zip(names, SECTIONS, strict=True):
        graph.add_node(name, writer(section))
        graph.add_edge("planner", name)
    graph.add_edge(names, "reviewer")
    graph.add_edge("reviewer", "editor")
    graph.add_edge("editor", END)
    return graph.compile()


class FrameworkOnShoal(_Framework, ShoalServer):
    """LangGraph on `shoal serve`."""

    @staticmethod
    def missing() -> str | None:
        """Whether framework and server are here."""
        return _Framework.lacking() or ShoalServer.missing()


class FrameworkOnLlama(_Framework, LlamaServer):
    """LangGraph on `llama-server`, the baseline."""

    @staticmethod
    def missing() -> str | None:
        """Whether framework and server are here."""
        return _Framework.lacking() or LlamaServer.missing()
