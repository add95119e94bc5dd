"""Runs that are killed and resumed: outputs as if never killed, nothing twice, and what is refused by name."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.agents import Agent, EventKind, Graph, GraphEvent, State, default
from shoal.agents.run.journal import Journal
from shoal.errors import CheckpointError, EngineClosedError, GraphError, RunnerError
from shoal.types import SamplingParams
from tests.support.agents import ScriptedEngine, agent_of, go, toy
from tests.support.random_graphs import (
    INPUTS,
    HashEngine,
    RandomGraph,
    facts_of,
    killed_and_resumed,
    recorded,
    whole_run,
)


@pytest.mark.parametrize("first", [0, 6])
def test_random_graphs_killed_while_they_write_end_as_if_never_killed(first: int, tmp_path: Path) -> None:
    kills = [killed_and_resumed(seed, tmp_path / str(seed)) for seed in range(first, first + 6)]
    assert sum(kills) > 10


@pytest.mark.parametrize("seed", [3, 8])
def test_a_process_that_is_killed_is_resumed_by_another(seed: int, tmp_path: Path) -> None:
    luck, path = random.Random(seed), tmp_path / "run"
    command = [sys.executable, "-m", "tests.support.killed_child", str(seed), str(path)]
    for how in ("begin", "resume"):
        wanted = path.stat().st_size + luck.randint(1, 2000) if path.exists() else 1
        with subprocess.Popen([*command, how], cwd=Path(__file__).parents[2]) as child:
            while child.poll() is None and not (path.exists() and path.stat().st_size >= wanted):
                time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
    graph, engine, before = RandomGraph(seed), HashEngine(), recorded(path)
    resumed = go(whole_run(graph, engine, checkpoint=path, resumed=True))
    assert not [name for name in before if engine.calls[name] or graph.called[name]]
    assert facts_of(resumed) == facts_of(go(whole_run(RandomGraph(seed), HashEngine(), seed=seed, **INPUTS)))


def three_steps(**changed: Any) -> Graph:
    graph = Graph(shared="On {topic}.")
    first = graph.add(Agent("first", **{"task": "Begin.", **changed}))
    second = graph.add(Agent("second", task="Go on."), continues=first)
    graph.add(Agent("third", task="End."), after=second)
    return graph


async def stopped_after(graph: Graph, name: str, path: Path, engine: Any = None, **settings: Any) -> None:
    async with graph.start(engine or ScriptedEngine(), checkpoint=path, **settings) as run:
        async for event in run:
            if ended(event) == name:
                run.interrupt()


def ended(event: GraphEvent) -> str | None:
    return event.node.id if event.kind is EventKind.ENDED and event.node is not None else None


def test_only_what_is_left_is_done(tmp_path: Path) -> None:
    path = tmp_path / "run"
    go(stopped_after(three_steps(), "first", path, topic="tea", seed=1, task_id="tea"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert recorded(path) == {"first"}
    engine = ScriptedEngine()
    result = go(three_steps().resume(engine, path))
    assert [agent_of(request) for request in engine.requests] == ["second", "third"]
    assert result.task_id == "tea"
    assert engine.requests[0].messages == [  # the conversation it goes on with came from the file
        {"role": "system", "content": "On tea."},
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "<first>"},
        {"role": "user", "content": "Go on."},
    ]
    again = ScriptedEngine()
    assert go(three_steps().resume(again, path)).outputs == result.outputs
    assert not again.requests  # a run that has ended gives its result and computes nothing


def test_a_run_goes_on_from_earlier_turns_also_when_it_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    turns = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes."}]
    engine = ScriptedEngine()
    go(stopped_after(three_steps(), "first", path, engine, topic="tea", earlier=turns))
    rules = {"role": "system", "content": "On tea."}
    assert engine.requests[0].messages == [rules, *turns, {"role": "user", "content": "Begin."}]
    again = ScriptedEngine()
    go(three_steps().resume(again, path))
    assert [agent_of(request) for request in again.requests] == ["second", "third"]
    for request in again.requests:
        assert request.messages is not None
        assert request.messages[:3] == [rules, *turns]
        assert sum(message in turns for message in request.messages) == 2
    with pytest.raises(GraphError, match="earlier turns from its checkpoint"):
        go(three_steps().resume(again, path, earlier=turns))


def test_another_graph_or_input_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    go(stopped_after(three_steps(), "first", path, topic="tea"))
    with pytest.raises(CheckpointError, match="first is another"):
        go(three_steps(task="Begin otherwise.").resume(ScriptedEngine(), path))
    more = three_steps()
    more.add(Agent("fourth", task="And more."))
    with pytest.raises(CheckpointError, match="fourth is new"):
        go(more.resume(ScriptedEngine(), path))
    with pytest.raises(CheckpointError, match="another input topic"):
        go(three_steps().resume(ScriptedEngine(), path, topic="coffee"))
    with pytest.raises(CheckpointError, match="already"):
        go(three_steps().run(ScriptedEngine(), checkpoint=path, topic="tea"))
    with pytest.raises(GraphError, match="seed, task_id"):
        go(three_steps().resume(ScriptedEngine(), path, seed=3))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        go(three_steps().resume(ScriptedEngine(), tmp_path / "none"))
    assert go(three_steps(timeout_s=5).resume(ScriptedEngine(), path)).ok  # limits of time may change


def test_a_broken_file_is_refused_and_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    go(three_steps().run(ScriptedEngine(), checkpoint=path, topic="tea"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert go(three_steps().resume(ScriptedEngine(), path)).ok
    path.write_bytes(whole.replace(b"Begin.", b"Begun.", 1))
    with pytest.raises(CheckpointError, match="broken in record"):
        go(three_steps().resume(ScriptedEngine(), path))
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))  # a record is missing
    with pytest.raises(CheckpointError, match="broken in record 3"):
        go(three_steps().resume(ScriptedEngine(), path))
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        go(three_steps().resume(ScriptedEngine(), path))


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    held = Journal.begin(path, {"kind": "run"})
    with pytest.raises(CheckpointError, match="in use"):
        Journal.resume(path)
    held.close()
    Journal.resume(path)[0].close()


def test_a_full_disk_ends_the_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    graph = three_steps()

    async def go_on() -> tuple[bool, str]:
        async with graph.start(ScriptedEngine(), checkpoint=path, topic="tea") as run:
            monkeypatch.setattr("shoal.agents.run.journal._write", full_after(path))
            result = await run.result()
        return result.ok, str(run.checkpoint.error)

    ok, why = go(go_on())
    assert ok
    assert "No space left" in why
    monkeypatch.undo()
    assert recorded(path) == set()  # what was half written is gone, the file is whole
    assert go(graph.resume(ScriptedEngine(), path)).ok


def full_after(path: Path) -> Callable[[Any, bytes], None]:
    def write(file: Any, data: bytes) -> None:
        file.write(data[:10])
        raise OSError(28, os.strerror(28), str(path))

    return write


def test_an_engine_that_closes_is_no_failure_of_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    closing = ScriptedEngine({"second": [EngineClosedError("the engine is closed")]})

    async def broken_off() -> State:
        async with three_steps().start(closing, checkpoint=path, topic="tea") as run:
            return (await run.result()).states["third"]

    assert go(broken_off()) is State.FAILED
    assert go(three_steps().resume(ScriptedEngine(), path)).outputs["third"] == "<third>"


def test_what_had_failed_stays_failed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    graph = Graph()
    bad = graph.add(Agent("bad", task="Fail.", on_failure=default(("a", "tuple"))))
    graph.add(Agent("slow", task="Wait."), after=bad)
    engine = ScriptedEngine({"bad": [RunnerError("no luck")], "slow": [30.0]})

    async def broken_off() -> None:
        async with graph.start(engine, checkpoint=path) as run:
            async for event in run:
                if event.kind is EventKind.STARTED and event.node is not None and event.node.id == "slow":
                    break

    go(broken_off())
    again = ScriptedEngine()
    result = go(graph.resume(again, path))
    assert [agent_of(request) for request in again.requests] == ["slow"]
    assert (result.states["bad"], result.outputs["bad"]) == (State.DEFAULTED, ("a", "tuple"))


def test_a_value_that_no_file_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    graph = Graph()
    graph.call(lambda run: {1, 2}, name="odd")
    with pytest.raises(CheckpointError, match="odd gave a set"):
        go(graph.run(ScriptedEngine(), checkpoint=tmp_path / "run"))


def test_nodes_added_from_outside_have_to_be_added_again(tmp_path: Path) -> None:
    path = tmp_path / "run"

    async def with_judge(add: bool, resumed: bool) -> Any:
        graph = three_steps()
        given: dict[str, Any] = {"resumed": True} if resumed else {"topic": "tea"}
        engine = ScriptedEngine()
        async with graph.start(engine, checkpoint=path, **given) as run:
            async for event in run:
                if ended(event) == "first" and add:
                    run.add(Agent("judge", task="Judge."), after=graph.nodes["first"])
                if ended(event) == "judge" and not resumed:
                    run.interrupt()
            return await run.result(), [agent_of(request) for request in engine.requests]

    go(with_judge(add=True, resumed=False))
    with pytest.raises(CheckpointError, match="judge"):
        go(with_judge(add=False, resumed=True))
    result, called = go(with_judge(add=True, resumed=True))
    assert result.outputs["judge"] == "<judge>"
    assert "judge" not in called


@dataclass
class Plan:
    parts: list[str]


def test_the_memo_and_typed_outputs_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    greedy = SamplingParams(max_tokens=4)

    def built() -> Graph:
        graph = Graph()
        plan = graph.add(Agent("plan", task="Plan.", schema=Plan, sampling=greedy))
        graph.add(Agent("same", task="Plan.", schema=Plan, sampling=greedy), after=[graph.add(Agent("slow", task="x"))])
        graph.map(Agent("part", task="{item}"), over=plan.parts)
        return graph

    def answer(request: Any) -> str:
        return json.dumps({"parts": ["a", "b"]}) if request.sampling.json_schema else "text"

    go(stopped_after(built(), "plan", path, ScriptedEngine(answer)))
    engine = ScriptedEngine(answer)
    result = go(built().resume(engine, path))
    assert result.outputs["plan"] == Plan(["a", "b"])
    assert result.outputs["part"] == ["text", "text"]
    assert "plan" not in [agent_of(request) for request in engine.requests]


def test_on_an_engine_a_resumed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    async def work() -> tuple[Any, Any]:
        async with toy() as engine:
            whole = await three_steps().run(engine, topic="tea", seed=4)
            async with three_steps().start(engine, checkpoint=tmp_path / "run", topic="tea", seed=4) as run:
                async for event in run:
                    if event.kind is EventKind.ENDED:
                        break
            return whole.outputs, (await three_steps().resume(engine, tmp_path / "run")).outputs

    whole, resumed = go(work())
    assert whole == resumed
