"""What agents share, measured; what breaks the sharing, named; the layout that shares most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.agents import Agent, Graph, Input
from shoal.agents.dry_run import dry_run
from shoal.agents.lint import lint_graph, lint_prompts, read_prompts
from shoal.errors import GraphFileError
from shoal.runners.fake import ByteTokenizer
from shoal.types import Message

RULES = "Rules that every agent of this graph has in common, and that are long enough to be worth a word."


def tokenize(messages: Sequence[Message]) -> Sequence[int]:
    return ByteTokenizer().encode_messages(messages)


def graph_of(shared: str = RULES, role: str = "You write.") -> Graph:
    graph = Graph(shared)
    plan = graph.add(Agent("planner", task="Plan it"))
    parts = graph.map(Agent("writer", task="Write {item}", role=role), over=["a", "b"], after=plan)
    graph.add(Agent("editor", role="You edit.", task="Merge"), after=parts)
    return graph


def test_it_counts_what_is_shared_and_says_where_it_ends() -> None:
    found = lint_graph(graph_of(), tokenize)
    by_name = {share.name: share for share in found.shares}
    assert found.findings == ()
    assert found.common == len(RULES) + 2  # the rules, and the marks of two turns
    first = by_name["writer[0]"]
    assert first.sibling == "writer[1]"
    assert first.ends_in == "task of writer"
    shared_text = "You write.\n\n## planner\n(planner)\n\nWrite (item "
    assert first.shared == len(RULES) + 2 + len(shared_text)
    assert by_name["planner"].ends_in == "task of planner"


@pytest.mark.parametrize(
    ("graph", "finding"),
    [
        (graph_of("It is 2026-05-04, 12:30. " + RULES), "a timestamp in the shared part ('2026-05-04')"),
        (graph_of("{now} " + RULES), "the shared part names {now}, which differs from run to run"),
        (graph_of("About {topic}. " + RULES), "{topic} stands before 98 tokens of the shared part"),
        (graph_of(role="You write {item}."), "writer: its role names {item}, so its siblings share nothing after that"),
        (graph_of(role="You are 7e57d004-2b97-0e7a-b45f-5387367791cd"), "an identifier in its role"),
        (graph_of(shared=""), "there is no shared part"),
    ],
)
def test_it_says_what_breaks_the_sharing(graph: Graph, finding: str) -> None:
    assert finding in "\n".join(lint_graph(graph, tokenize).findings)


def test_an_input_at_the_end_of_the_shared_part_is_fine() -> None:
    assert lint_graph(graph_of(RULES + " About {topic}"), tokenize).findings == ()


def test_roles_that_begin_alike_belong_into_the_shared_part() -> None:
    graph = Graph(RULES)
    for name in ("first", "second"):
        graph.add(Agent(name, role=f"You are an expert in everything there is, the {name}.", task="Go"))
    assert "first and second begin with the same words" in "\n".join(lint_graph(graph, tokenize).findings)


def test_prompts_from_elsewhere_are_measured_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = [
        {"agent": name, "messages": [{"role": "system", "content": f"You are the {name}. {RULES}"},
                                     {"role": "user", "content": "Go"}]}
        for name in ("writer", "critic")
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, prompts)))
    found = lint_prompts(read_prompts(path), tokenize)
    assert [share.ends_in for share in found.shares] == ["system", "system"]
    assert "writer leaves critic after 13 of" in found.findings[0]
    path.write_text('{"agent": "a", "messages": []}\n{"messages": []}')
    with pytest.raises(GraphFileError, match=r"prompts\.jsonl:2: no prompt"):
        read_prompts(path)


def test_outputs_that_several_roles_read_come_before_the_role() -> None:
    graph = Graph("Rules")
    draft = graph.add(Agent("draft", task="Draft"))
    for name in ("legal", "style"):
        graph.add(Agent(name, role=f"You check {name}.", task="Check"), after=draft)
    alone = graph.add(Agent("alone", task="Alone"), after=graph.nodes["legal"])
    graph.add(Agent("end", role="You end.", task="End"), after=alone)
    parts = {scene.node.id: [name for name, _ in scene.layout.parts(scene.agent.name)] for scene in dry_run(graph)}
    assert parts["legal"] == ["shared", "output of draft", "role of legal", "task of legal"]
    assert parts["style"] == ["shared", "output of draft", "role of style", "task of style"]
    assert parts["end"] == ["shared", "role of end", "output of alone", "task of end"]


def test_a_rehearsal_takes_every_kind_of_node() -> None:
    graph = Graph("Rules for {topic}")
    plan = graph.add(Agent("plan", task="Plan", schema={"type": "object", "properties": {"kind": {}, "parts": {}}}))
    parts = graph.map(Agent("part", task="Write {item.title} of {plan.kind}"), over=plan.parts, after=plan)
    one = graph.reduce(Agent("merge", task="Merge {round}"), over=parts)
    loop = graph.loop(Agent("w", task="Write"), Agent("c", task="Check"), until=bool, at_most=2, after=one)
    way = graph.branch(plan.kind, {"a": Agent("a", task="A {case}")}, otherwise=Agent("b", task="B"), after=loop)
    called = graph.call(lambda run, out: out, after=way)
    docs = graph.map(Agent("doc", task="Read {item}"), over=Input("docs"))
    graph.add(Agent("end", task="End"), after=[called, docs])
    scenes = {scene.node.id: scene for scene in dry_run(graph, {"topic": "bread"})}
    assert list(scenes) == [
        "plan", "doc[0]", "doc[1]", "part[0]", "part[1]", "merge.merge", "c-loop.w", "c-loop.c", "branch.a",
        "branch.b", "end",
    ]  # fmt: skip
    assert scenes["part[1]"].layout.task == "Write (item 1.title) of (plan.kind)"
    assert scenes["plan"].layout.shared == "Rules for bread"
    assert scenes["end"].level == 7
    chats: list[Any] = [scene.layout.messages() for scene in scenes.values()]
    assert all(chat[-1]["content"] for chat in chats)
