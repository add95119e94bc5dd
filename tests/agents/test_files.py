"""Graph files: what they build, and what is refused, with file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.agents import Graph, State
from shoal.agents.build.files import load_graph
from shoal.agents.build.policy import Default, Fallback, Retry, Skip
from shoal.errors import CycleError, GraphFileError
from shoal.types import Priority, Request
from tests.support.agents import ScriptedEngine, agent_of, go

EXAMPLE = Path(__file__).parents[2] / "examples" / "graphs" / "report.yaml"

EVERYTHING = """
name: everything
shared: Rules for {topic}.
deadline_s: 30
reserve_s: 5
namespace: {task: t, agent: a, version: 2}
nodes:
  last: {after: [merged, way, talk], task: Sum up, priority: high}   # stands before what it needs
  plan:
    task: Plan
    schema: {type: object, properties: {parts: {type: array}, kind: {type: string}}}
    sampling: {max_tokens: 50, temperature: 0.5}
    on_failure: {retry: 2, backoff_s: 0, then: {default: {parts: [a], kind: short}}}
  part:
    map: plan.parts
    task: Write {item}
    timeout_s: 3
    deadline_s: 9
    on_failure: skip
  fixed: {map: [1, 2], task: "Count {item}"}
  given: {map: names, task: "Greet {item}"}
  merged:
    reduce: part
    task: Merge
    on_failure: {fallback: {name: cheap, task: Merge shortly}, reserve_s: 1}
  way:
    branch:
      on: plan.kind
      cases:
        short: {task: Briefly}
        long: {task: At length}
      otherwise: {name: other, task: Somehow}
  talk:
    after: plan
    loop:
      agents:
        writer: {task: Write}
        critic: {task: Criticise}
      until: {contains: fine}
      at_most: 2
  again: {continues: talked, task: And now}
  talked: {task: Talk}
"""


def load(tmp_path: Path, text: str) -> Graph:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    return load_graph(path)


def test_a_file_builds_the_graph_it_describes(tmp_path: Path) -> None:
    graph = load(tmp_path, EVERYTHING)
    assert graph.inputs == {"topic", "names"}
    assert (graph.name, graph.deadline_s, graph.reserve_s, graph.namespace.version) == ("everything", 30, 5, 2)
    nodes = graph.nodes
    assert [n.id for n in graph.needs(nodes["last"])] == ["merged", "way", "talk"]
    assert nodes["last"].agents[0].priority is Priority.HIGH
    plan = nodes["plan"].agents[0]
    assert plan.sampling.max_tokens == 50
    assert isinstance(plan.on_failure, Retry)
    assert plan.on_failure.then == Default({"parts": ["a"], "kind": "short"})
    part = nodes["part"].agents[0]
    assert (part.timeout_s, part.deadline_s, part.on_failure) == (3, 9, Skip())
    merged = nodes["merged"].agents[0].on_failure
    assert isinstance(merged, Fallback)
    assert (merged.agent.name, merged.reserve_s) == ("cheap", 1)
    assert nodes["again"].continues is nodes["talked"]


def test_it_runs(tmp_path: Path) -> None:
    def answer(request: Request) -> str:
        return '{"parts": ["x", "y"], "kind": "odd"}' if agent_of(request) == "plan" else f"<{agent_of(request)}>"

    engine = ScriptedEngine(answer)
    result = go(load(tmp_path, EVERYTHING).run(engine, topic="bread", names=["Ann", "Bo"]))
    assert set(result.states.values()) == {State.DONE}
    assert engine.prompts("part[1]") == ["Write y"]
    assert engine.prompts("given[0]") == ["Greet Ann"]
    assert result.outputs["way"] == "<way.other>"
    assert result.outputs["talk"] == "<talk[2].critic>"


def test_the_example_is_sound() -> None:
    graph = load_graph(EXAMPLE)
    assert graph.inputs == {"question"}
    assert list(graph.nodes) == ["planner", "writer", "reviewer", "editor"]


LAUGHS = "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
WRONG: list[tuple[str, int, str]] = [
    ("", 1, "empty"),
    ("shared: x", 1, "has no nodes"),
    ("nodes: [a]", 1, "no mapping"),
    ("nodes:\n  a: {task: x}\nshard: y", 3, "unknown key 'shard' in the graph: did you mean shared"),
    ("nodes:\n  a:\n    taks: x", 3, "unknown key 'taks' in a: did you mean task"),
    ("nodes:\n  a:\n    role: x", 2, "a has no task"),
    ("nodes:\n  a: {task: x}\n  a: {task: y}", 3, "has 'a' twice, also in line 2"),
    ("nodes:\n  a:\n    task: x\n    after: b", 4, "after names 'b', which is no node"),
    ("nodes:\n  a:\n    task: x\n  b:\n    task: y\n    after: [a, aa]", 6, "did you mean a"),
    ("nodes:\n  a:\n    task: x\n    timeout_s: soon", 4, "timeout_s of an agent is 'soon'"),
    ("nodes:\n  a:\n    task: x\n    priority: urgent", 4, "priority of an agent is 'urgent'"),
    ("nodes:\n  a:\n    task: x\n    sampling:\n      temprature: 1", 5, "unknown key 'temprature' in sampling"),
    ("nodes:\n  a:\n    task: x\n    sampling: {temperature: -1}", 4, "temperature is -1"),
    ("nodes:\n  a:\n    task: x\n    on_failure: ignore", 4, "on_failure is 'ignore'"),
    ("nodes:\n  a:\n    task: x\n    on_failure: {retry: 0}", 4, "times is 0"),
    ("nodes:\n  a:\n    task: x\n    on_failure: {retry: 1, then: {retry: 1}}", 4, "then is another retry"),
    ("nodes:\n  a: {task: x}\n  b:\n    map: a.parts\n    task: y", 4, "plain text"),
    ("nodes:\n  b:\n    map: q.parts\n    task: y", 3, "names 'q', which is no node"),
    ("nodes:\n  a: {task: x}\n  b:\n    map: [1]\n    reduce: a\n    task: y", 5, "b has map and reduce"),
    ("nodes:\n  a:\n    loop: {agents: {w: {task: x}}, at_most: 2}", 3, "the loop a lacks until"),
    ("nodes:\n  a:\n    task: x\n    branch: {on: q, cases: {w: {task: x}}}", 3, "task belongs to the agents"),
    ("nodes:\n  a: {task: x}\n  b: {task: 'use {a}'}", 3, "does not wait for it"),
    ("deadline_s: -3\nnodes:\n  a: {task: x}", 1, "deadline_s of an agent is -3"),
    ("nodes:\n  a: {task: x", 2, "no YAML"),
    ("nodes:\n  a: {task: !!python/object:os.system x}", 2, "no plain data"),
    ("shared: 2024-01-31\nnodes:\n  a: {task: x}", 1, "'timestamp' is no plain data: put it in quotes"),
    ("shared: 2024-13-45\nnodes:\n  a: {task: x}", 1, "put it in quotes"),
    ("nodes:\n  a:\n    task: x\n    on_failure: {default: [2024-01-31 25:00:00]}", 4, "put it in quotes"),
    ("nodes:\n  a:\n    task: x\n    schema: {const: 2024-01-31}", 4, "put it in quotes"),
    ("nodes:\n  a:\n    map: 2024-01-31\n    task: x", 3, "put it in quotes"),
    ("nodes:\n  2024-01-31: {task: x}", 2, "put it in quotes"),
    ("nodes:\n  a:\n    task: x\n    on_failure: {default: !!set {a, b}}", 4, "'set' is no plain data: give text"),
    ("nodes:\n  a:\n    task: x\n    timeout_s: !!int soon", 4, "not plain data: invalid literal"),
    ("nodes:\n  a:\n    task: x\n    timeout_s: !!bool soon", 4, "not plain data: 'soon'"),
    (f"nodes:\n  a:\n    task: x\n    timeout_s: {'9' * 5000}", 4, "not plain data: Exceeds"),
    ("[" * 3000, 1, "nests deeper than 100"),
    (f"nodes:\n  a:\n    task: x\n    on_failure: {{default: {'[' * 3000}{']' * 3000}}}", 1, "nests deeper than 100"),
    (f"nodes:\n  a:\n    task: x\n    on_failure: {{default: {'[' * 99}{']' * 99}}}", 4, "nests deeper than 100"),
    (
        f"nodes:\n  a:\n    task: x\n    on_failure: {'{fallback: {task: x, on_failure: ' * 60}skip{'}}' * 60}",
        4,
        "deeper",
    ),
    ("nodes:\n  a:\n    task: x\n    on_failure: {default: &a [*a]}", 4, "nests deeper than 100"),
    ("nodes: &a\n  a: *a", 1, "nests deeper than 100"),
    (f"shared: x\nnodes:\n  a: {{task: x, map: [&a0 x{LAUGHS}]}}", 3, "more than 100000 values"),
]


@pytest.mark.parametrize(("text", "line", "message"), WRONG, ids=[message[:30] for _, _, message in WRONG])
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(GraphFileError) as caught:
        load(tmp_path, text)
    told: Any = caught.value
    assert message in str(told), str(told)
    assert told.line == line, str(told)
    assert str(told).startswith(f"{tmp_path / 'graph.yaml'}:{line}: ")


def test_a_cycle_in_a_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CycleError, match="a -> c -> b -> a"):
        load(tmp_path, "nodes:\n  a: {task: x, after: c}\n  b: {task: x, after: a}\n  c: {task: x, after: b}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match="cannot be read"):
        load_graph(tmp_path / "none.yaml")
