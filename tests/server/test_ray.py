"""`examples/ray_serve.py` with two tiny replicas: the same API, one prefix on one replica (extra `cluster`)."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

ray: Any = pytest.importorskip("ray", reason="ray is not installed (extra `cluster`)")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve

    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["ray_serve_example"] = example
    spec.loader.exec_module(example)
    ray.cloudpickle.register_pickle_by_value(example)  # replicas have no such module
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = example.build("toy", 2, max_batch=4)
        serve.run(application, name="shoal")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **fields}


def test_the_api_is_the_same(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok", "model": "toy"}
        answer = http.post("/v1/chat/completions", json=body("hello"))
        assert answer.status_code == 200
        assert "," not in answer.headers["x-request-id"]
        text = answer.json()["choices"][0]["message"]["content"]
        streamed = http.post("/v1/chat/completions", json=body("hello", stream=True)).text
        deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(d["choices"][0]["delta"].get("content", "") for d in deltas) == text
        assert streamed.endswith("data: [DONE]\n\n")
        bad = http.post("/v1/chat/completions", json=body("hello", temperature=9))
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
        assert http.post("/v1/chat/completions", content=b"{").status_code == 400


def test_one_prefix_goes_to_one_replica(url: str) -> None:
    """Were the calls of a task spread over both replicas, each would have computed the task's prefix for itself."""
    tasks = {name: f"You are the agent {name}. " + name * 200 for name in "abcd"}
    with httpx.Client(base_url=url, timeout=60) as http:

        def call(task: str, number: int) -> int:
            answer = http.post("/v1/chat/completions", json=body(f"{tasks[task]} Question {number}"))
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        cold = [call(task, 0) for task in tasks]
        assert max(cold) < 50
        with ThreadPoolExecutor(4) as pool:
            warm = list(pool.map(lambda n: call("abcd"[n % 4], n), range(1, 25)))
    assert min(warm) > 200
