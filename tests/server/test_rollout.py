"""A second configuration on trial behind a server: who is served by it, what is told, how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncEngine, EngineConfig
from shoal.agents import Rollout, Trace
from shoal.agents.rollout.rollout import fraction
from shoal.engine.engine import Engine
from shoal.errors import ConfigError
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.server.hub import local_candidate
from tests.support.live import Live, error_of, toy

ON, OFF = (
    next(name for name in map(str, range(100)) if (fraction(name) < 0.5) is side) for side in (True, False)
)  # tasks on either side at a share of one half


class Trial:
    """A server with a plan in a file; the candidate is a toy engine that can be told from the stable one."""

    def __init__(self, tmp_path: Path, **plan: Any) -> None:
        self.path = tmp_path / "plan.json"
        self.write(**plan)
        self.trace = Trace()
        self.candidates: list[Engine] = []
        self.live = Live(toy(), rollout=self._rollout)

    def write(self, **plan: Any) -> None:
        margins = {"min_samples": 4, "max_slowdown": 1e6, "compare": 1.0}
        self.path.write_text(json.dumps({"share": 0.5, "candidate": {"model": "other"}, **margins, **plan}))

    def _rollout(self, stable: AsyncEngine) -> Rollout:
        return Rollout(stable, self.path, trace=self.trace, every_s=0.02, load=self._load)

    def _load(self, settings: Mapping[str, Any]) -> AsyncEngine:
        if "base_url" in settings:
            return local_candidate(settings, None)
        self.candidates.append(Engine(FakeRunner, ByteTokenizer(), EngineConfig()))
        return AsyncEngine(self.candidates[-1])

    def ask(self, task: str, **fields: Any) -> int:
        return self.live.chat("hello", task_id=task, max_tokens=4, **fields).status_code

    @property
    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = self.live.http.get("/stats").json()["rollout"]
        return told

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < end, self.state
            time.sleep(0.01)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    with made.live:
        yield made
    assert made.live.hub.served is None
    assert all(engine.closed for engine in made.candidates)


def test_a_share_of_the_tasks_is_served_by_the_candidate_and_compared(trial: Trial) -> None:
    assert trial.ask(ON) == trial.ask(OFF) == trial.ask(OFF) == 200
    assert trial.candidates[0].stats().finished == 1
    trial.until(lambda: trial.state["compared"] == 1)
    state = trial.state
    assert (state["share"], state["settings"], state["problem"]) == (0.5, {"model": "other"}, None)
    assert (state["stable"]["requests"], state["candidate"]["requests"], state["agreement"]) == (2, 1, 1.0)
    refused = trial.live.post("/models/load", {"model": "another"})
    assert (refused.status_code, error_of(refused)["code"]) == (409, "rollout")
    trial.live.wait_idle()


def test_it_is_rolled_back_by_the_plan_without_a_restart(trial: Trial) -> None:
    trial.write(share=0)
    trial.until(lambda: trial.state["share"] == 0)
    trial.until(lambda: trial.candidates[0].closed)
    assert trial.ask(ON) == 200
    trial.write()
    trial.until(lambda: trial.state["share"] == 0.5)
    assert trial.ask(ON) == 200
    assert [engine.stats().finished for engine in trial.candidates] == [0, 1]


def test_a_candidate_that_dies_costs_one_call_and_is_given_up(trial: Trial) -> None:
    assert trial.ask(ON) == 200
    trial.candidates[0].close()
    assert trial.ask(ON) == 503
    assert trial.ask(ON) == 200, "the stable engine serves it now"
    assert "rolled back: the candidate has failed" in trial.state["problem"]


def test_callers_faults_count_for_neither_side(trial: Trial) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
    assert trial.ask(ON, response_format=schema) == 400
    assert trial.state["candidate"]["requests"] == 0
    assert trial.live.hub.rollout is not None
    trial.until(lambda: trial.live.idle)


def test_a_candidate_elsewhere_is_refused_and_the_state_says_so(tmp_path: Path) -> None:
    made = Trial(tmp_path, candidate={"base_url": "http://localhost:1/v1"})
    with made.live:
        assert "must run in its process" in made.state["problem"]
        assert made.ask(ON) == 200
    with pytest.raises(ConfigError):
        local_candidate({"base_url": "x"}, None)
