"""A cluster under Ray Serve: the API at its door, one prefix on one replica, a replica that dies is replaced."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from shoal.cluster.config import ClusterConfig
from shoal.types import Request, SamplingParams

ray: Any = pytest.importorskip("ray", reason="ray is not installed (extra `cluster`)")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def rayserve() -> Any:
    """Imported where warnings are no errors: Ray's own has some."""
    from shoal.cluster import rayserve

    return rayserve


@pytest.fixture(scope="module")
def url(rayserve: Any) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        door = {"api_key": "secret"}
        rayserve.start(ClusterConfig(model="toy", replicas=2, port=port, engine={"max_batch": 4}, door=door))
        yield f"http://127.0.0.1:{port}"
    finally:
        rayserve.stop()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer secret"}) as client:
        yield client


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **fields}


def replicas(http: httpx.Client) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = http.get("/cluster").json()["replicas"]
    return told


def wait_for_two(http: httpx.Client) -> list[dict[str, Any]]:
    end = time.monotonic() + 120
    while True:
        there = [row for row in replicas(http) if row["well"]]
        if len(there) == 2:
            return there
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_door_has_the_whole_api_and_wants_the_key(url: str, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "model": "toy"}
    assert httpx.post(f"{url}/v1/chat/completions", json=body("hello"), timeout=60).status_code == 401
    answer = http.post("/v1/chat/completions", json=body("hello"))
    assert answer.status_code == 200
    streamed = http.post("/v1/chat/completions", json=body("hello", stream=True)).text
    assert streamed.endswith("data: [DONE]\n\n")
    bad = http.post("/v1/chat/completions", json=body("hello", temperature=9))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert http.get("/").status_code == 200
    assert http.get("/v1/events").status_code == 404


def test_one_prefix_goes_to_one_replica(http: httpx.Client) -> None:
    """Were the calls of a task spread over both replicas, each would have computed the task's prefix for itself."""
    tasks = {name: f"You are the agent {name}. " + name * 200 for name in "abcd"}

    def call(number: int) -> int:
        answer = http.post("/v1/chat/completions", json=body(f"{tasks['abcd'[number % 4]]} Question {number}"))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cold = [call(number) for number in range(4)]
    assert max(cold) < 50
    with ThreadPoolExecutor(4) as pool:
        warm = list(pool.map(call, range(4, 28)))
    assert min(warm) > 200


def test_calls_by_a_handle_go_where_their_prefix_is(rayserve: Any, http: httpx.Client) -> None:
    """Another program on the same Ray: Ray asks our router where each call goes."""
    handle = rayserve.serve.get_deployment_handle("Replica", "shoal")
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)

    def call(task: int, number: int) -> int:
        tokens = [*random.Random(task).choices(range(250), k=240), number]
        told = handle.complete.remote(Request(prompt_tokens=tokens, sampling=sampling)).result(timeout_s=60)
        return int(told.cached_tokens)

    def all_warm(first: int) -> bool:
        """Six beginnings that nobody has, four calls each: by chance next to never."""
        tasks = [first + 10 * n for n in range(6)]
        cold = [call(task, 1) for task in tasks]
        warm = [call(task, number) for number in (2, 3, 4) for task in tasks]
        return max(cold) < 50 and min(warm) > 200

    wait_for_two(http)
    end = time.monotonic() + 60  # replicas tell Ray's router of themselves once a second: until then it is Ray's own
    rounds = iter(range(0, 6000, 60))
    while not all_warm(next(rounds)):
        assert time.monotonic() < end
    streamed = handle.options(stream=True).generate.remote(Request(prompt_tokens=[1, 2, 3], sampling=sampling))
    events = list(streamed)
    assert events[-1].result is not None
    assert events[-1].result.error is None


def test_a_replica_that_dies_is_replaced(http: httpx.Client) -> None:
    before = wait_for_two(http)
    victim = httpx.get(f"{before[0]['url']}/replica/card", headers=http.headers, timeout=30).json()["pid"]
    os.kill(victim, signal.SIGKILL)
    assert http.post("/v1/chat/completions", json=body("after")).status_code == 200
    names = {row["name"] for row in before}
    end = time.monotonic() + 120
    while {row["name"] for row in wait_for_two(http)} == names:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert http.post("/v1/chat/completions", json=body("after that")).status_code == 200


def test_replicas_follow_the_tokens_that_wait(rayserve: Any) -> None:
    class Told:
        def __init__(self, now: int, *queued: float) -> None:
            self.target_num_replicas = now
            self.aggregated_metrics = {rayserve.QUEUED: dict(enumerate(queued))}

    assert rayserve.wanted_replicas(Told(2, 4000.0, 5000.0), 2000, 1, 8) == 5
    assert rayserve.wanted_replicas(Told(5, 10.0), 2000, 1, 8) == 4
    assert rayserve.wanted_replicas(Told(1), 2000, 1, 8) == 1
    assert rayserve.wanted_replicas(Told(8, 1e9), 2000, 1, 8) == 8
