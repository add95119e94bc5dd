"""Graphs as they are built and run: order, prompts, rules, cycles, cancelling."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from shoal.agents import Agent, EventKind, Graph, Input, Node, Run, State, default, skip
from shoal.errors import CycleError, GraphError, GraphFailedError
from shoal.types import Request, SamplingParams
from tests.support.agents import SHORT, ScriptedEngine, agent_of, go, toy


@dataclasses.dataclass
class Outline:
    title: str
    sections: list[str]


OUTLINE = '{"title": "T", "sections": ["one", "two", "three"]}'


def agent(name: str, task: str = "", **fields: Any) -> Agent:
    return Agent(name, task=task or f"Do {name}", sampling=fields.pop("sampling", SHORT), **fields)


def report() -> Graph:
    graph = Graph(shared="Rules for {question}")
    plan = graph.add(agent("planner", "Outline it", schema=Outline, sampling=SamplingParams()))
    parts = graph.map(agent("writer", "Write section {item} of {index}", role="You write."), over=plan.sections)
    review = graph.add(agent("reviewer", "Check", on_failure=default("no remarks")), after=parts)
    graph.add(agent("editor", "Merge", priority="high"), after=[*parts, review])
    return graph


def answer(request: Request) -> str:
    return OUTLINE if agent_of(request) == "planner" else f"<{agent_of(request)}>"


def test_the_graph_of_the_front_page() -> None:
    engine = ScriptedEngine(answer)
    result = go(report().run(engine, question="pools", task_id="t1"))
    assert result.output == "<editor>"
    assert result.outputs["planner"] == Outline("T", ["one", "two", "three"])
    assert result.outputs["writer"] == ["<writer[0]>", "<writer[1]>", "<writer[2]>"]
    assert set(result.states.values()) == {State.DONE}
    system = [(r.messages or [])[0] for r in engine.requests]
    assert all(m == {"role": "system", "content": "Rules for pools"} for m in system), "what is shared comes first"
    assert engine.prompts("writer[1]") == ["You write.\n\nWrite section two of 1"]
    parts = "## writer[0]\n<writer[0]>\n\n## writer[1]\n<writer[1]>\n\n## writer[2]\n<writer[2]>"
    assert engine.prompts("reviewer") == [f"{parts}\n\nCheck"]
    assert engine.prompts("editor") == [f"{parts}\n\n## reviewer\n<reviewer>\n\nMerge"]
    assert {r.group for r in engine.requests} == {"t1"}
    assert len({r.sampling.seed for r in engine.requests}) == len(engine.requests)


def test_it_runs_on_the_toy_model_and_shares() -> None:
    async def main() -> None:
        async with toy() as engine:
            graph = Graph(shared="Rules that are longer than a block of KV, so that there is something to share. ")
            plan = graph.add(agent("planner"))
            parts = graph.map(agent("writer", "Write {item}"), over=["a", "b", "c"], after=plan)
            graph.add(agent("editor"), after=parts)
            result = await graph.run(engine)
            attempts = [r for r in result.records if r["kind"] == "attempt"]
            assert [a["outcome"] for a in attempts] == ["ok"] * 5
            assert all(a["prefix_tokens"] >= 64 for a in attempts[1:]), "the shared part is computed once"
            assert all(a["kv_mb"] > 0 and a["queue_ms"] >= 0 for a in attempts)

    go(main())


def test_inputs_are_checked_by_name() -> None:
    engine = ScriptedEngine(answer)
    with pytest.raises(GraphError, match="lacks input 'question'"):
        go(report().run(engine))
    with pytest.raises(GraphError, match="no input 'colour'"):
        go(report().run(engine, question="?", colour="red"))
    assert report().inputs == {"question"}


def test_what_is_wrong_is_refused_when_it_is_built() -> None:
    graph = Graph()
    plan = graph.add(agent("planner", schema=Outline, sampling=SamplingParams()))
    with pytest.raises(GraphError, match="no field 'chapters'"):
        _ = plan.chapters
    text = graph.add(agent("text"))
    with pytest.raises(GraphError, match="plain text"):
        _ = text.sections
    with pytest.raises(GraphError, match="no node of this graph"):
        Graph().add(agent("other"), after=plan)
    with pytest.raises(GraphError, match="which is no node"):
        graph.add(agent("x"), after=plan.sections)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="task of an agent"):
        Agent("x", task=" ")
    with pytest.raises(GraphError, match="name of an agent"):
        Agent("no spaces", task="x")
    with pytest.raises(GraphError, match="timeout_s of an agent"):
        Agent("x", task="x", timeout_s=-1)
    with pytest.raises(GraphError, match="no nodes"):
        Graph().check()
    graph.add(agent("late", "Use {text}"))
    with pytest.raises(GraphError, match="does not wait for it"):
        graph.check()


def test_a_cycle_is_refused_with_its_path() -> None:
    graph = Graph()
    a = graph.add(agent("a"))
    b = graph.add(agent("b"), after=a)
    c = graph.add(agent("c"), after=b)
    with pytest.raises(CycleError, match="a -> c -> b -> a") as caught:
        graph.depend(a, on=c)
    assert caught.value.path == ("a", "c", "b", "a")
    with pytest.raises(CycleError, match="a -> a"):
        graph.depend(a, on=a)
    graph.depend(c, on=a)
    assert [n.id for n in graph.needs(c)] == ["b", "a"]


def test_a_cycle_is_refused_while_the_graph_runs() -> None:
    """A function adds a node that waits for one that waits for the function's own outcome."""
    graph = Graph()
    first = graph.add(agent("first"))
    after: list[Node] = []

    def grow(run: Run, output: str) -> Node:
        return run.add(agent("grown"), after=after[0])

    growth = graph.call(grow, after=first)
    after.append(graph.add(agent("last"), after=growth))
    with pytest.raises(GraphFailedError, match="last failed") as caught:
        go(graph.run(ScriptedEngine()))
    result: Any = caught.value.result
    assert "grow -> grown -> last -> grow" in result.outcomes["grow"].cause
    assert set(result.states.values()) == {State.DONE, State.FAILED}


def test_functions_add_nodes_and_give_values() -> None:
    graph = Graph()
    plan = graph.add(agent("planner"))

    async def hire(run: Run, output: str) -> list[Node]:
        await asyncio.sleep(0)
        return [run.add(agent(f"w{i}", f"Part {i} of {{planner}}"), after=plan) for i in range(3)]

    team = graph.call(hire, after=plan)
    count = graph.call(lambda run, outputs: len(outputs), after=team, name="count")
    result = go(graph.run(ScriptedEngine()))
    assert result.outputs[team.id] == ["<w0>", "<w1>", "<w2>"]
    assert result.output == result.outputs[count.id] == 3


def test_what_a_function_raises_ends_the_run() -> None:
    graph = Graph()

    def broken(run: Run) -> None:
        raise ZeroDivisionError("mine")

    graph.call(broken)
    graph.add(agent("slow"))
    engine = ScriptedEngine({"slow": [60.0]})
    with pytest.raises(ZeroDivisionError, match="mine"):
        go(graph.run(engine))
    assert engine.left == [r.id for r in engine.requests]


def test_maps_take_lists_inputs_and_fields() -> None:
    graph = Graph()
    docs = graph.map(agent("reader", "Read {item.title}"), over=Input("documents"))
    graph.reduce(agent("merger", "Merge"), over=docs, width=2)
    engine = ScriptedEngine()
    result = go(graph.run(engine, documents=[{"title": f"t{i}"} for i in range(5)]))
    assert engine.prompts("reader[3]") == ["Read t3"]
    assert sorted(n for n in result.states if n.startswith("merger[")) == [
        "merger[1.0]", "merger[1.1]", "merger[1.2]", "merger[2.0]", "merger[2.1]", "merger[3.0]",
    ]  # fmt: skip
    assert result.output == "<merger[3.0]>"
    assert engine.prompts("merger[3.0]") == ["## merger[2.0]\n<merger[2.0]>\n\n## merger[2.1]\n<merger[2.1]>\n\nMerge"]


def test_a_map_over_nothing_gives_nothing_and_over_no_list_fails() -> None:
    graph = Graph()
    graph.map(agent("w", "Write {item}"), over=Input("items"))
    assert go(graph.run(ScriptedEngine(), items=[])).output == []
    with pytest.raises(GraphFailedError, match="it must be a list"):
        go(graph.run(ScriptedEngine(), items="abc"))


def test_a_loop_ends_when_it_may_or_must() -> None:
    def loop(at_most: int) -> tuple[Any, ScriptedEngine]:
        graph = Graph()
        draft = graph.add(agent("draft"))
        graph.loop(agent("writer", "Round {round}"), agent("critic"), until=lambda out: "fine" in out,
                   at_most=at_most, after=draft)  # fmt: skip
        verdicts = iter(["bad", "bad", "fine", "never asked"])
        engine = ScriptedEngine(lambda r: next(verdicts) if agent_of(r).endswith("critic") else f"<{agent_of(r)}>")
        return go(graph.run(engine)), engine

    result, engine = loop(9)
    assert result.output == "fine"
    assert len(engine.requests) == 1 + 3 * 2
    assert agent_of(engine.requests[-1]) == "critic-loop[3].critic"
    assert "bad" in engine.prompts("critic-loop[2].writer")[0], "a round sees what the last one ended with"
    assert engine.prompts("critic-loop[2].writer")[0].endswith("Round 2")
    result, engine = loop(2)
    assert result.output == "bad"
    assert len(engine.requests) == 1 + 2 * 2
    decisions = [r for r in result.records if r["kind"] == "decision"]
    assert [d["round"] for d in decisions] == [1, 2]


@pytest.mark.slow
def test_a_long_loop_and_a_long_chain_end() -> None:
    """Nothing recurses over the graph: a thousand rounds, and a thousand nodes in a row."""
    graph = Graph()
    graph.loop(agent("w", "Round {round}"), until=lambda out: False, at_most=1000)
    engine = ScriptedEngine()
    result = go(graph.run(engine), timeout_s=60)
    assert result.output == "<w-loop[1000].w>"
    assert len(engine.requests) == 1000
    chain = Graph()
    last = chain.add(agent("a", "Begin"))
    for i in range(999):
        last = chain.add(agent(f"a{i}", f"Go on {i}"), after=last)
    assert go(chain.run(ScriptedEngine()), timeout_s=60).output == "<a998>"


def test_a_branch_takes_one_way() -> None:
    @dataclasses.dataclass
    class Kind:
        kind: str

    def run(kind: str, otherwise: Agent | None = None) -> Any:
        graph = Graph()
        judge = graph.add(agent("judge", schema=Kind, sampling=SamplingParams()))
        way = graph.branch(judge.kind, {"short": agent("brief"), "long": agent("essay")}, otherwise=otherwise)
        graph.add(agent("end"), after=[judge, way])
        engine = ScriptedEngine(lambda r: f'{{"kind": "{kind}"}}' if agent_of(r) == "judge" else f"<{agent_of(r)}>")
        return go(graph.run(engine))

    assert run("long").outputs["branch"] == "<branch.essay>"
    assert run("odd", agent("rest")).outputs["branch"] == "<branch.rest>"
    odd = run("odd")
    assert odd.states["branch"] is State.SKIPPED
    assert odd.output == "<end>"
    assert [r["chosen"] for r in odd.records if r["kind"] == "decision"] == [None]


def test_cancelling_takes_the_subtree_and_no_more() -> None:
    async def main() -> None:
        graph = Graph()
        a = graph.add(agent("a"))
        b = graph.add(agent("b"), after=a)
        c = graph.add(agent("c"), after=b)
        d = graph.add(agent("d"))
        engine = ScriptedEngine({"a": [60.0]})
        async with graph.start(engine) as run:
            await asyncio.sleep(0.1)
            run.cancel(a)
            result = await run.result()
            assert [run.state(n) for n in (a, b, c, d)] == [State.CANCELLED] * 3 + [State.DONE]
            assert not result.ok
            assert engine.left == [engine.requests[0].id]
            assert [r["outcome"] for r in result.records if r["kind"] == "attempt"] == ["ok", "cancelled"]
            with pytest.raises(GraphError, match="over"):
                run.add(agent("late"))

    go(main())


def test_discarded_branches_leave_the_others_alone() -> None:
    """Best of n: the first that is good enough ends the others, and the judge goes on with what there is."""

    async def main() -> None:
        graph = Graph()
        tries = graph.map(agent("try", "Try {item}"), over=["a", "b", "c"])
        graph.add(agent("judge"), after=tries)
        engine = ScriptedEngine(lambda r: 60.0 if agent_of(r) in ("try[0]", "try[2]") else f"<{agent_of(r)}>")
        async with graph.start(engine) as run:
            async for event in run:
                if event.kind is EventKind.ENDED and event.node is not None and event.node.id == "try[1]":
                    for other in run.members(tries):
                        run.discard(other)
                result = event.result
            assert result is not None
            assert result.outputs["try"] == ["<try[1]>"]
            assert result.output == "<judge>"
            assert engine.prompts("judge") == ["## try[1]\n<try[1]>\n\nDo judge"]
            assert sorted(engine.left) == sorted(
                r.id or "" for r in engine.requests if agent_of(r) in ("try[0]", "try[2]")
            )

    go(main())


def test_whoever_reads_events_may_add_nodes_up_to_the_last() -> None:
    async def main() -> None:
        graph = Graph()
        first = graph.add(agent("first"))
        kinds = []
        async with graph.start(ScriptedEngine()) as run:
            async for event in run:
                kinds.append(event.kind)
                if event.kind is EventKind.ENDED and event.node is first:
                    run.add(agent("second"), after=first)
                result = event.result
        assert result is not None
        assert result.output == "<second>"
        assert kinds[-1] is EventKind.FINISHED
        assert EventKind.ADDED in kinds

    go(main())


def test_leaving_a_stream_cancels_the_run() -> None:
    async def main() -> None:
        async with toy() as engine:
            graph = Graph()
            graph.map(
                agent("w", "Write {item}", sampling=SamplingParams(max_tokens=3000, ignore_eos=True)), over=[1, 2, 3]
            )
            async for event in graph.stream(engine):
                if event.kind is EventKind.TEXT:
                    break

    go(main())


def test_a_node_that_has_begun_waits_for_nothing_more() -> None:
    async def main() -> None:
        graph = Graph()
        a = graph.add(agent("a"))
        b = graph.add(agent("b"), after=a)
        async with graph.start(ScriptedEngine()) as run:
            await asyncio.sleep(0.1)
            with pytest.raises(GraphError, match="has begun"):
                run.depend(a, on=b)
            assert (await run.result()).ok

    go(main())


def test_a_skipped_input_is_left_out_and_one_that_is_named_skips_too() -> None:
    graph = Graph()
    a = graph.add(agent("a", on_failure=skip))
    b = graph.add(agent("b"))
    both = graph.add(agent("both"), after=[a, b])
    named = graph.add(agent("named", "Use {a}"), after=[a, b])
    only = graph.add(agent("only"), after=a)
    mapped = graph.map(agent("m", "Map {item}"), over=a)
    engine = ScriptedEngine({"a": [GraphError("no")]})
    result = go(graph.run(engine))
    states = result.states
    assert states["a"] is State.SKIPPED
    assert engine.prompts("both") == ["## b\n<b>\n\nDo both"]
    assert [states[n.id] for n in (both, named, only, mapped)] == [State.DONE, *[State.SKIPPED] * 3]


def test_a_child_goes_on_with_its_parents_conversation() -> None:
    async def main() -> None:
        async with toy() as engine:
            graph = Graph(shared="Rules of some length, which all of the agents have in common.")
            plain = SamplingParams(max_tokens=12, regex="[a-z]{8}")  # reads back as it was written
            first = graph.add(agent("first", "Write something about the sea.", sampling=plain))
            graph.add(agent("second", "Shorter."), continues=first)
            result = await graph.run(engine)
            a, b = (r for r in result.records if r["kind"] == "attempt")
            assert b["prompt_tokens"] > a["prompt_tokens"] + 8
            assert b["prefix_tokens"] >= a["prompt_tokens"] + a["generated_tokens"] - 1, (
                "it goes on from the parent's KV"
            )

    go(main())


def test_identical_greedy_calls_are_computed_once() -> None:
    engine = ScriptedEngine()
    graph = Graph()
    graph.map(agent("same", "Same words"), over=[1, 2, 3])
    result = go(graph.run(engine))
    assert len(engine.requests) == 1
    assert len(result.output) == 3
    attempts = [r for r in result.records if r["kind"] == "attempt"]
    assert [a["generated_tokens"] for a in attempts].count(0) == 2
    sampled = Graph()
    sampled.map(agent("same", "Same words", sampling=SamplingParams(temperature=1.0)), over=[1, 2, 3])
    engine = ScriptedEngine()
    go(sampled.run(engine))
    assert len(engine.requests) == 3


def test_when_the_first_of_identical_calls_goes_away_another_computes() -> None:
    async def main() -> None:
        answers: list[Any] = [60.0, "second"]
        engine = ScriptedEngine(lambda r: answers.pop(0))
        graph = Graph()
        a, b = (graph.add(agent(name, "Same words")) for name in "ab")
        async with graph.start(engine) as run:
            await asyncio.sleep(0.1)
            run.discard(a)
            await run.result()
            assert run.output(b) == "second"

    go(main())
