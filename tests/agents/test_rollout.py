"""A second configuration on trial: who goes there, what is compared, when it is given up."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncEngine, FinishReason, Request, SamplingParams
from shoal.agents import Agent, Graph
from shoal.agents.rollout.plan import RolloutPlan, read_plan
from shoal.agents.rollout.rollout import Rollout, fraction
from shoal.agents.run.engines import LocalEngine
from shoal.agents.trace.trace import Trace
from shoal.errors import ConfigError, EngineClosedError, InvalidRequestError, ModelNotFoundError, StoreError
from shoal.runners.fake import FakeRunner
from shoal.runners.plan import StepPlan
from tests.support.engines import toy_engine

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
CANDIDATE = {"model": "other"}


class Bench:
    """A rollout over two toy engines, its plan in a file, its trace at hand."""

    def __init__(self, tmp_path: Path, candidate: Callable[[], FakeRunner] = FakeRunner, **plan: Any) -> None:
        self.path = tmp_path / "plan.json"
        self.write(**plan)
        self.trace = Trace()
        self.loaded: list[AsyncEngine] = []
        self._candidate = candidate
        self.rollout = Rollout(AsyncEngine(toy_engine()), self.path, trace=self.trace, every_s=0.02, load=self._load)

    def write(self, **plan: Any) -> None:
        self.path.write_text(
            json.dumps({"share": 0.5, "candidate": CANDIDATE, "min_samples": 5, "max_slowdown": 100, **plan})
        )

    def _load(self, settings: Mapping[str, Any]) -> AsyncEngine:
        if settings["model"] == "broken":
            raise ModelNotFoundError("there is no model 'broken'")
        self.loaded.append(AsyncEngine(toy_engine(self._candidate())))
        return self.loaded[-1]

    def told(self, *decisions: str) -> list[dict[str, Any]]:
        return [record for record in self.trace.records if record.get("action") in decisions]

    async def ask(self, count: int, prefix: str = "task", **fields: Any) -> list[Any]:
        requests = [Request(prompt="q", group=f"{prefix}-{i}", **{"sampling": SHORT, **fields}) for i in range(count)]
        return await asyncio.gather(*map(self.rollout.complete, requests), return_exceptions=True)

    async def until(self, *decisions: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while len(self.told(*decisions)) < count:
                await asyncio.sleep(0.01)
        return self.told(*decisions)[-1]

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.rollout:
                await work()

        asyncio.run(main())
        assert all((record["kind"], record["decision"]) == ("decision", "rollout") for record in self.trace.records)
        assert all(engine.engine.closed for engine in self.loaded)
        assert json.loads(json.dumps(self.trace.records))


def slow() -> FakeRunner:
    return FakeRunner(step_s=0.02)


def failing() -> FakeRunner:
    def fault(plan: StepPlan) -> None:
        if plan.step % 2:
            raise ValueError("bad kernel")

    return FakeRunner(fault=fault)


def another() -> FakeRunner:
    """Another model: other answers."""
    runner = FakeRunner()
    runner._salt = runner._salt[::-1].copy()
    return runner


def test_the_share_is_stable_by_task_and_every_task_is_told_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=0.3)

    async def work() -> None:
        for _ in range(2):
            results = await bench.ask(60)
            assert all(result.finish_reason is FinishReason.LENGTH for result in results)
        assigned = {record["task_id"]: record["side"] for record in bench.told("assign")}
        assert len(bench.told("assign")) == 60
        assert assigned == {f"task-{i}": "candidate" if fraction(f"task-{i}") < 0.3 else "stable" for i in range(60)}
        there = bench.loaded[0].engine.stats().finished
        assert there == 2 * list(assigned.values()).count("candidate")
        assert 8 <= there / 2 <= 30

    bench.run(work)
    assert [record["action"] for record in bench.told("begin", "end")] == ["begin", "end"]
    assert bench.told("end")[0]["stable"]["requests"] + bench.told("end")[0]["candidate"]["requests"] == 120


def test_a_higher_share_keeps_those_who_were_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=0.2)

    async def work() -> None:
        await bench.ask(40)
        before = {r["task_id"] for r in bench.told("assign") if r["side"] == "candidate"}
        bench.trace.records.clear()
        bench.write(share=0.7)
        assert (await bench.until("share"))["share"] == 0.7
        await bench.ask(40)
        after = {r["task_id"] for r in bench.told("assign") if r["side"] == "candidate"}
        assert before < after
        assert len(bench.loaded) == 1  # the same candidate is not loaded again
        bench.write(share=0)
        await bench.until("stop")
        done = bench.loaded[0].engine.stats().finished
        await bench.ask(40)
        assert bench.loaded[0].engine.stats().finished == done

    bench.run(work)


@pytest.mark.parametrize(
    ("candidate", "plan", "cause"),
    [
        (slow, {"max_slowdown": 0.5}, "margin 50%"),
        (failing, {}, "succeed, of the stable engine's 100.0%; margin 5.0%"),
        (another, {"compare": 1.0, "min_agreement": 0.9}, "answers agree by"),
    ],
    ids=["slow", "failing", "different"],
)
def test_it_rolls_back_by_itself(
    tmp_path: Path, candidate: Callable[[], FakeRunner], plan: dict[str, Any], cause: str
) -> None:
    bench = Bench(tmp_path, candidate, **plan)

    async def work() -> None:
        for number in range(40):
            await bench.ask(6, f"round-{number}")
            if bench.told("rollback"):
                break
            await asyncio.sleep(0.01)
        told = await bench.until("rollback")
        assert cause in told["cause"]
        assert told["candidate"]["requests"] >= 5
        assert len(bench.told("rollback")) == 1
        async with asyncio.timeout(60):
            while not bench.loaded[0].engine.closed:
                await asyncio.sleep(0.01)
        results = await bench.ask(20, "after")
        assert all(result.finish_reason is FinishReason.LENGTH for result in results)
        assert not [r for r in bench.told("assign") if r["task_id"].startswith("after")]  # there is no choice now

    bench.run(work)


def test_an_equal_candidate_stays_and_answers_are_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, compare=1.0, min_agreement=1.0)

    async def work() -> None:
        sampling = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
        for number in range(10):
            await bench.ask(4, f"round-{number}", sampling=sampling)
        await bench.until("compare", count=5)
        assert {record["agreement"] for record in bench.told("compare")} == {1.0}  # the same seed, so the same tokens
        assert not bench.told("rollback")
        described = bench.rollout.describe()
        assert described["agreement"] == 1.0
        assert described["share"] == 0.5

    bench.run(work)


def test_closing_while_a_candidate_is_loading_closes_that_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=0)

    class Slow(AsyncEngine):
        async def __aenter__(self) -> Any:
            await asyncio.sleep(0.3)
            return self

    def load(settings: Mapping[str, Any]) -> AsyncEngine:
        bench.loaded.append(Slow(toy_engine()))
        return bench.loaded[-1]

    bench.rollout = Rollout(AsyncEngine(toy_engine()), bench.path, trace=bench.trace, every_s=0.02, load=load)

    async def work() -> None:
        bench.write(share=1.0)
        while not bench.loaded:
            await asyncio.sleep(0.01)

    bench.run(work)
    assert [record["action"] for record in bench.trace.records] == ["stop", "begin", "end"]


def test_few_samples_are_no_verdict(tmp_path: Path) -> None:
    bench = Bench(tmp_path, failing, min_samples=1000)

    async def work() -> None:
        await bench.ask(30)
        assert not bench.told("rollback")

    bench.run(work)


def test_a_candidate_that_dies_is_given_up_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=1.0)

    async def work() -> None:
        await bench.ask(1)
        bench.loaded[0].engine.close()
        [error] = await bench.ask(1, "victim")
        assert isinstance(error, EngineClosedError)
        assert "has failed" in bench.told("rollback")[0]["cause"]
        [result] = await bench.ask(1, "victim")
        assert result.finish_reason is FinishReason.LENGTH

    bench.run(work)


def test_a_plan_that_turns_bad_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=0.5)

    async def work() -> None:
        bench.path.write_text("{")
        assert "not valid JSON" in (await bench.until("unreadable"))["cause"]
        await asyncio.sleep(0.1)
        assert len(bench.told("unreadable")) == 1
        assert bench.rollout.describe()["share"] == 0.5
        bench.write(candidate={"model": "broken"})
        assert "no model 'broken'" in (await bench.until("not_loaded"))["cause"]
        await bench.ask(10)
        assert bench.rollout.describe()["share"] == 0
        bench.write(candidate={"model": "third"})
        await bench.until("begin", count=2)

    bench.run(work)


def test_what_runs_on_a_candidate_ends_there_when_it_is_exchanged(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slow, share=1.0)

    async def work() -> None:
        long = asyncio.ensure_future(bench.ask(1, sampling=SamplingParams(max_tokens=60, ignore_eos=True)))
        while not bench.loaded[0].engine.stats().running:
            await asyncio.sleep(0.01)
        bench.write(share=1.0, candidate={"model": "next"})
        await bench.until("begin", count=2)
        assert not bench.loaded[0].engine.closed
        [result] = await long
        assert (result.finish_reason, len(result.tokens)) == (FinishReason.LENGTH, 60)
        async with asyncio.timeout(60):
            while not bench.loaded[0].engine.closed:
                await asyncio.sleep(0.01)

    bench.run(work)


def test_a_caller_that_gives_up_late_counts_against_the_engine(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slow, share=1.0)

    async def work() -> None:
        request = Request(prompt="q", group="g", sampling=SamplingParams(max_tokens=500, ignore_eos=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await bench.rollout.complete(request)  # no deadline: the caller's own doing
        assert bench.rollout.describe()["candidate"]["requests"] == 0
        late = Request(prompt="q", group="g", sampling=request.sampling, deadline_s=0.1)
        assert (await bench.rollout.complete(late)).finish_reason is FinishReason.TIMEOUT
        assert bench.rollout.describe()["candidate"] == {"requests": 1, "success": 0.0, "median_ms": None}
        with pytest.raises(InvalidRequestError):
            await bench.rollout.complete(Request(prompt_tokens=[9999], group="g"))
        assert bench.rollout.describe()["candidate"]["requests"] == 2

    bench.run(work)


def test_hints_go_to_the_side_of_their_task(tmp_path: Path) -> None:
    bench = Bench(tmp_path, share=1.0)

    async def work() -> None:
        assert isinstance(bench.rollout, LocalEngine)
        held = await bench.rollout.expect(["a" * 100 + "x", "a" * 100 + "y"], compute=True, group="task")
        assert held is not None
        assert bench.loaded[0].engine.stats().steps > 0
        held.release()

    bench.run(work)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A plan on an HTTP server of the loopback, and the file behind it."""
    path = tmp_path / "plan.json"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if path.exists() else 404)
            self.end_headers()
            if path.exists():
                self.wfile.write(path.read_bytes())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/plan.json", path
        server.shutdown()
        thread.join()


def test_a_plan_from_a_url_is_read_again(tmp_path: Path, served: tuple[str, Path]) -> None:
    url, path = served
    with pytest.raises(StoreError, match="404"):
        read_plan(url)
    bench = Bench(tmp_path, share=0.0)
    bench.rollout = Rollout(AsyncEngine(toy_engine()), url, trace=bench.trace, every_s=0.02, load=bench._load)

    async def work() -> None:
        path.write_text(json.dumps({"share": 1.0, "candidate": CANDIDATE}))
        await bench.until("begin")
        await bench.ask(3)
        assert bench.loaded[0].engine.stats().finished == 3
        path.unlink()
        assert "404" in (await bench.until("unreadable"))["cause"]

    bench.run(work)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the plan is"),
        ({}, "with a share"),
        ({"share": 2}, "share is 2"),
        ({"share": 0.1}, "with a model or a base_url"),
        ({"share": 0, "min_sample": 3}, "did you mean min_samples"),
        ({"share": 0, "min_samples": 0}, "above 0"),
        ({"share": 0, "max_slowdown": -1}, "0 or more"),
        ({"share": 0, "candidate": 3}, "settings of an engine"),
        ({"share": True}, "share is True"),
    ],
)
def test_a_plan_is_checked(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutPlan.of(document)


def test_a_wrong_plan_at_the_start_is_raised_and_opens_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Rollout(AsyncEngine.load("no-such-model"), tmp_path / "missing.json"):
            pass

    with pytest.raises(StoreError, match="cannot be read"):
        asyncio.run(main())


def test_a_hung_engine_whose_callers_give_up_counts_as_failing(tmp_path: Path) -> None:
    class Hung:
        spec = FakeRunner().spec

        async def __aenter__(self) -> Hung:
            return self

        async def __aexit__(self, *error: Any) -> None:
            """Nothing is held."""

        async def generate(self, request: Request) -> Any:
            await asyncio.sleep(60)
            yield None

    bench = Bench(tmp_path, share=1.0)
    bench.rollout = Rollout(AsyncEngine(toy_engine()), bench.path, trace=bench.trace, load=lambda settings: Hung())

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await bench.rollout.complete(Request(prompt="q", group="g", timeout_s=1.0, deadline_s=0.05))
        assert bench.rollout.describe()["candidate"] == {"requests": 1, "success": 0.0, "median_ms": None}

    bench.run(work)


def test_a_graph_runs_on_it_unchanged_and_all_its_agents_on_one_side(tmp_path: Path) -> None:
    graph = Graph(shared="the rules")
    writers = graph.map(Agent("writer", task="{item}", sampling=SHORT, timeout_s=5), over=["a", "b", "c"])
    graph.add(Agent("editor", task="merge", sampling=SHORT), after=writers)
    bench = Bench(tmp_path, share=0.5)

    async def work() -> None:
        for task in [f"task-{i}" for i in range(8)]:
            before = bench.loaded[0].engine.stats().finished
            result = await graph.run(bench.rollout, trace=bench.trace, task_id=task)
            assert result.ok
            there = bench.loaded[0].engine.stats().finished - before
            assert bool(there) == (fraction(task) < 0.5)
        sides = {record["task_id"]: record["side"] for record in bench.told("assign")}
        assert set(sides.values()) == {"candidate", "stable"}

    async def main() -> None:
        async with bench.rollout:
            await work()

    asyncio.run(main())
