"""The door over replicas that are processes: the whole API, one answer whoever gives it, and what becomes of faults."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient

import shoal.engine.engine
from shoal.agents import Agent, Graph, GraphResult, State
from shoal.cluster.door import door_mounts, hub_of, load_replica
from shoal.cluster.equal import hold_answers
from shoal.cluster.faults import run_fault
from shoal.cluster.local import LocalCluster
from shoal.engine.aio import AsyncEngine
from shoal.engine.remote import RemoteEngine
from shoal.errors import ReplicaLostError
from shoal.server.app import create_app
from shoal.server.config import ServerConfig
from shoal.types import FinishReason, Request, Result, SamplingParams
from tests.support.live import Live

SETTINGS = {"max_batch": 4, "step_s": 0.01}


class Cluster(LocalCluster):
    """A door and its replicas."""

    def __init__(self, count: int) -> None:
        super().__init__("toy", count, SETTINGS, silence_s=2.0)

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.door.describe()["replicas"] if row["name"] == name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as made:
        yield made


def request(text: str, **fields: Any) -> Request:
    return Request(prompt=text, sampling=SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields}))


def until(met: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_loop_has_all_that_an_engine_asks_of_one(cluster: Cluster) -> None:
    source = Path(shoal.engine.engine.__file__).read_text()
    asked = set(re.findall(r"\b(?:self\._)?loop\.([a-z]\w*)", source)) - {"wake"}  # that one is set, not asked
    assert len(asked) > 15
    assert not [name for name in asked if not hasattr(cluster.door.cluster, name)]


def test_outputs_are_those_of_one_engine_whoever_answers(cluster: Cluster) -> None:
    with load_replica("toy", {"max_batch": 4}) as alone:
        told = hold_answers(cluster, alone, 16)
    assert told.equal, told
    assert told.answers == 3 * 16
    until(lambda: all(row["requests"] == row["queued_tokens"] == row["running_tokens"] == 0 for row in _rows(cluster)))


def _rows(cluster: Cluster) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = cluster.door.describe()["replicas"]
    return rows


def test_a_prefix_is_computed_on_one_replica(cluster: Cluster) -> None:
    trunk = "a trunk that all branches share, and that is long enough. " * 8
    first = cluster.door.complete(request(trunk))
    with ThreadPoolExecutor(6) as pool:
        rest = list(pool.map(cluster.door.complete, [request(f"{trunk}{n}") for n in range(6)]))
    assert first.cached_tokens == 0
    assert min(r.cached_tokens for r in rest) > 400


def test_a_wrong_request_is_refused_here_and_sent_nowhere_else(cluster: Cluster) -> None:
    before = [row["resent"] for row in _rows(cluster)]
    with pytest.raises(Exception, match="context"):
        cluster.door.complete(request("x" * 5000))
    assert [row["resent"] for row in _rows(cluster)] == before


def test_callbacks_that_raise_end_what_they_belong_to_and_nothing_else(cluster: Cluster) -> None:
    """As on an engine with a model: the door and its other requests go on."""

    def raises(_: object = None) -> NoReturn:
        raise ValueError("mine")

    cluster.door.on_step_start(raises)
    broken = cluster.door.submit(request("whose sink raises", max_tokens=400), sink=raises)
    until(lambda: broken.state == "finished")
    assert cluster.door.run([request("another")]).results[0].error is None
    assert raises not in cluster.door._loop.step_starters


def test_leaving_a_stream_ends_it_at_the_replica(cluster: Cluster) -> None:
    stream = cluster.door.generate(request("leave me", max_tokens=2000))
    next(stream)
    stream.close()
    until(lambda: all(row["requests"] == 0 for row in _rows(cluster)))
    assert cluster.door.complete(request("after")).finish_reason is FinishReason.LENGTH


def begun(cluster: Cluster, text: str) -> tuple[Any, str]:
    """A stream of which something has come, and the replica that it comes from."""
    stream = cluster.door.generate(request(text, max_tokens=2000))
    next(stream)
    return stream, cluster.door.cluster.states[-1].replica


def last(stream: Iterator[Any]) -> Result:
    result: Result = list(stream)[-1].result
    return result


def test_a_replica_that_is_killed_ends_what_had_begun_and_gives_up_the_rest(cluster: Cluster) -> None:
    stream, name = begun(cluster, "killed")
    waiting = [cluster.door.submit(request(f"killed {n}")) for n in range(6)]
    cluster.processes[name].kill()
    ended = last(stream)
    assert isinstance(ended.error, ReplicaLostError)
    assert ended.tokens
    results = [handle.result(30) for handle in waiting]
    assert all(r.error is None or (isinstance(r.error, ReplicaLostError) and r.tokens) for r in results)
    assert cluster.door.complete(request("after the kill")).error is None
    cluster.restart(name)
    assert cluster.row(name)["well"]


def test_a_replica_that_is_stopped_is_given_up_and_comes_back(cluster: Cluster) -> None:
    stream, name = begun(cluster, "stopped")
    cluster.processes[name].signal(signal.SIGSTOP)
    try:
        assert isinstance(last(stream).error, ReplicaLostError)
        assert not cluster.row(name)["well"]
        assert cluster.door.complete(request("while it is stopped")).error is None
    finally:
        cluster.processes[name].signal(signal.SIGCONT)
    until(lambda: cluster.row(name)["well"])


def test_a_graphs_engine_may_be_a_cluster(cluster: Cluster) -> None:
    async def run() -> list[Result]:
        face = AsyncEngine(cluster.door)
        trunk = "what everybody reads first. " * 20
        await face.expect([f"{trunk}a", f"{trunk}b"], compute=True)
        return list((await face.fan_out(trunk, ["a", "b", "c"], sampling=SamplingParams(max_tokens=4))).results)

    results = asyncio.run(run())
    assert min(r.cached_tokens for r in results) > 400
    assert {r.error for r in results} == {None}


def test_a_graph_over_http_computes_its_trunk_once_on_each_replica_that_needs_it(cluster: Cluster) -> None:
    """Twelve agents at once before a door that knows nothing of their trunk; replicas take four each."""
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    trunk = "Rules that every agent of this graph reads before its own task. " * 16
    graph = Graph(trunk)
    parts = graph.map(Agent("w", task="Write {item}", sampling=short), over=range(12))
    graph.add(Agent("end", task="End", sampling=short), after=parts)

    async def run(url: str) -> GraphResult:
        async with RemoteEngine(f"{url}/v1") as engine:
            return await graph.run(engine)

    with Live(cluster.open()) as live:
        before = live.engine.stats().computed_tokens
        result = asyncio.run(run(live.url))
        computed = live.engine.stats().computed_tokens - before
    assert set(result.states.values()) == {State.DONE}
    prompts = sum(record["prompt_tokens"] for record in result.records if record["kind"] == "attempt")
    assert prompts > 12 * len(trunk)
    assert computed < 2 * len(trunk) + (prompts - 13 * len(trunk)) + 13 * (8 + 2 * cluster.spec.block_size)


def test_the_page_says_which_replica_an_agent_ran_on(cluster: Cluster, tmp_path: Path) -> None:
    config = ServerConfig(history=tmp_path / "history.db", allowed_hosts=("testserver",))
    hub = hub_of(cluster.door, "toy")
    with TestClient(create_app(hub, config, mounts=door_mounts(cluster.door))) as http:
        order = {
            "question": "Which one?",
            "max_tokens": 4,
            "synthesis": False,
            "agents": [{"name": "a", "task": "Say."}],
        }
        run = http.post("/swarmbench/runs", json=order)
        assert run.status_code == 200, run.text
        until(lambda: http.get(f"/swarmbench/runs/{run.json()['id']}").json()["together"]["cards"][0]["finish_reason"])
        (card,) = http.get(f"/swarmbench/runs/{run.json()['id']}").json()["together"]["cards"]
        assert card["error"] is None
        assert card["replica"] in cluster.processes
        assert {row["name"] for row in http.get("/cluster").json()["replicas"]} == set(cluster.processes)
        hub.served = None  # the door outlives this application


@pytest.mark.parametrize("fault", ["slow", "out of memory", "router restarted", "events lost and late"])
def test_every_request_is_accounted_for(fault: str) -> None:
    """Those that are killed and stopped stand above; `shoal cluster faults` does each 50 times."""
    tally = run_fault(fault, 1, replicas=2)
    assert tally.sound, tally
