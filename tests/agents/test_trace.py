"""The trace: the record of an attempt, the timeline, the page, the spans, the command line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console
from typer.testing import CliRunner, Result

from shoal.agents import Agent, Graph, Trace, default, read_trace, retry, skip
from shoal.agents.trace.page import page
from shoal.agents.trace.summary import Spread, summarise
from shoal.agents.trace.timeline import timelines
from shoal.cli.main import app
from shoal.cli.trace import draw
from shoal.errors import RunnerError, StoreError
from tests.support.agents import SHORT, ScriptedEngine, go, toy
from tests.support.cli_fake import opened

FIELDS = [
    "request_id", "task_id", "agent_id", "attempt", "cache_hit", "prefix_tokens", "generated_tokens", "queue_ms",
    "ttft_ms", "latency_ms", "kv_mb", "process_mb", "outcome", "cause",
]  # fmt: skip


def agent(name: str, **fields: Any) -> Agent:
    return Agent(name, task=fields.pop("task", f"Do {name}"), sampling=SHORT, **fields)


def troubled() -> Graph:
    graph = Graph("Rules", name="troubled")
    a = graph.add(agent("a", on_failure=retry(1, backoff_s=0.01)))
    b = graph.add(agent("b", on_failure=skip), after=a)
    c = graph.add(agent("c", on_failure=default("none")), after=a)
    graph.add(agent("end<script>".removesuffix("<script>")), after=[b, c])
    return graph


def answers() -> dict[str, list[Any]]:
    return {"a": [RunnerError("once"), "well"], "b": [RunnerError("<b>&")], "c": [RunnerError("no")]}


def test_every_attempt_has_its_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    async def main() -> None:
        async with toy() as engine:
            graph = Graph("Rules that are longer than one block of KV of the toy model.")
            first = graph.add(agent("first"))
            graph.add(agent("second", priority="high"), after=first)
            with Trace(path) as records:
                await graph.run(engine, trace=records, task_id="task-7")

    go(main())
    records = read_trace(path)
    attempts = [r for r in records if r["kind"] == "attempt"]
    assert len(attempts) == 2
    for record in attempts:
        assert [name for name in record if name in FIELDS] == FIELDS, "the names of the contract, in its order"
        assert record["task_id"] == "task-7"
        assert record["request_id"] == f"task-7/{record['agent_id']}/1"
        assert 0 <= record["queue_ms"] <= record["ttft_ms"] <= record["latency_ms"]
        assert record["joined_at_ms"] >= record["submitted_at_ms"]
        assert record["generated_tokens"] == 8
        added = record["prompt_tokens"] - record["prefix_tokens"] + 8
        assert record["kv_mb"] == round(8 * added / 1e6, 6), "what was shared counts with whoever computed it"
        assert record["process_mb"] > 10
        assert (record["outcome"], record["cause"]) == ("ok", None)
    assert [r["cache_hit"] for r in attempts] == [False, True]
    assert attempts[1]["prefix_tokens"] >= 60
    assert [r["kind"] for r in records] == ["graph", "attempt", "node", "attempt", "node", "graph"]
    assert records[-1]["state"] == "done"


def test_a_trace_takes_records_of_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Trace(path) as records:
        records.write({"decision": "governor", "level": "serious", "cadence_ms": 40})
        records.write({"kind": "decision", "decision": "rollout", "task_id": "t", "at_ms": 5.0, "arm": "new"})
    told = read_trace(path)
    assert told[0]["kind"] == "decision"
    assert told[0]["time"] > 1.7e9
    assert len(timelines(told)) == 1
    text = page(told, "x")
    assert "governor: level serious, cadence_ms 40" in text
    assert "rollout: arm new" in text


def test_traces_that_are_none_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind": "graph"}\nnot json\n')
    with pytest.raises(StoreError, match=r"trace\.jsonl:2: no JSON"):
        read_trace(path)
    path.write_text('{"no": "kind"}\n')
    with pytest.raises(StoreError, match=r"trace\.jsonl:1: no record"):
        read_trace(path)
    with pytest.raises(StoreError, match="no trace can be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(StoreError, match="cannot be written"):
        Trace(tmp_path / "none" / "x")


def test_the_timeline_says_who_waited_for_whom() -> None:
    result = go(troubled().run(ScriptedEngine(answers())))
    (line,) = timelines(result.records)
    rows = {row.node: row for row in line.rows}
    assert [bar.outcome for bar in rows["a"].bars] == ["failed", "ok"]
    assert rows["b"].state == "skipped"
    assert rows["c"].state == "defaulted"
    assert rows["end"].waited_for == ["b", "c"]
    assert line.critical[0] == "a"
    assert line.critical[-1] == "end"


class _Strict(HTMLParser):
    """Collects tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes_everything() -> None:
    graph = Graph(name="<img src=x onerror=alert(1)>")
    bad = '"><script>alert(1)</script>'
    a = graph.add(agent("a", on_failure=default(bad)))
    graph.add(agent("b"), after=a)
    engine = ScriptedEngine({"a": [RunnerError(bad)]})
    result = go(graph.run(engine, task_id="<svg onload=x>"))
    text = page([*result.records, {"kind": "<b>", "decision": bad}], bad)
    parser = _Strict()
    parser.feed(text)
    assert not {"script", "img", "svg", "link", "iframe"} & set(parser.tags)
    assert parser.links == []
    assert "http" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<tr") == 1 + 2


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9), lambda one: st.lists(one, max_size=2)
)
NAMES = st.sampled_from([*FIELDS, "state", "graph", "waited_for", "at_ms", "submitted_at_ms", "left_at_ms", "time"])
KINDS = st.sampled_from(["graph", "node", "attempt", "decision", "other"])


@pytest.mark.slow
@given(st.lists(st.tuples(KINDS, st.dictionaries(NAMES, JSON)), max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_record_can_be_drawn(drawn: list[tuple[str, dict[str, Any]]]) -> None:
    records = [{"task_id": "t", "agent_id": "a", **fields, "kind": kind} for kind, fields in drawn]
    assert page(records, "any").startswith("<!doctype html>")
    console = Console(file=io.StringIO(), width=120)
    for line in timelines(records):
        draw(line, console)


def test_a_bar_stays_inside_of_its_axis() -> None:
    far = {"kind": "attempt", "task_id": "t", "agent_id": "a", "submitted_at_ms": 1e14, "left_at_ms": 2.0}
    drawn = io.StringIO()
    for line in timelines([far]):
        draw(line, Console(file=drawn, width=120))
    lines = drawn.getvalue().splitlines()
    assert any(line.startswith("a ") for line in lines)
    assert max(map(len, lines)) <= 120


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel, "get_tracer", lambda name: provider.get_tracer(name))
    yield exporter
    provider.shutdown()


def test_spans_of_run_nodes_and_attempts(spans: InMemorySpanExporter) -> None:
    go(troubled().run(ScriptedEngine(answers()), task_id="t"))
    done = {span.name: span for span in spans.get_finished_spans()}
    assert set(done) == {
        "graph troubled", "node a", "node b", "node c", "node end",
        "attempt t/a/1", "attempt t/a/2", "attempt t/b/1", "attempt t/c/1", "attempt t/end/1",
    }  # fmt: skip
    names = {span.context.span_id: name for name, span in done.items() if span.context is not None}
    parents = {name: names[span.parent.span_id] for name, span in done.items() if span.parent is not None}
    assert parents["node b"] == "graph troubled"
    assert parents["attempt t/a/2"] == "node a"
    failed = done["attempt t/b/1"]
    assert failed.status.status_code is otel.StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["shoal.cause"] == "<b>&"
    assert failed.attributes["shoal.outcome"] == "failed"
    skipped: Any = done["node b"].attributes
    assert skipped["shoal.state"] == "skipped"
    assert all(span.end_time and span.start_time and span.end_time >= span.start_time for span in done.values())


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.agents.trace import spans as module

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(module.make_spans("t", "g"), module.NoSpans)
    assert go(troubled().run(ScriptedEngine(answers()))).ok


# -- the command line -------------------------------------------------------------------------------------------

FILE = """
name: small
shared: Rules that all agents have, longer than a block of the toy model.
nodes:
  a: {task: "Begin with {topic}", sampling: {max_tokens: 6, ignore_eos: true}}
  b: {map: [1, 2], after: a, task: "Write {item}", sampling: {max_tokens: 6, ignore_eos: true}}
  c: {after: b, task: End, sampling: {max_tokens: 6, ignore_eos: true}, on_failure: {default: "-"}}
"""
Shoal = Callable[..., Result]


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shoal:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.yaml").write_text(FILE)

    def run(*arguments: str, **fake: Any) -> Result:
        monkeypatch.setattr("shoal.engine.loading.open_model", lambda *_, **__: opened(**fake))
        monkeypatch.setattr("shoal.cli.console.ensure_model", lambda model: None)
        return CliRunner().invoke(app, arguments)

    return run


def test_graph_run_prints_the_output_and_writes_the_trace(shoal: Shoal) -> None:
    result = shoal("graph", "run", "g.yaml", "--input", "topic=bread", "--trace", "t.jsonl")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"[a-z]{6}\n", result.stdout)
    drawn = shoal("trace", "t.jsonl", "--html", "t.html")
    assert drawn.exit_code == 0, drawn.stderr
    assert re.search(r"^small small-\w+: done, \d+ ms$", drawn.stdout, re.M)
    assert re.search(r"^b\[1\] +done +\d+ +\d+ +\d+/\d+ +6 .*█", drawn.stdout, re.M)
    assert "the end waited for: a -> " in drawn.stdout
    assert Path("t.html").read_text().startswith("<!doctype html>")


def test_graph_run_with_a_rollout_tells_which_side_it_was_on(shoal: Shoal) -> None:
    Path("plan.json").write_text('{"share": 1, "candidate": {"model": "other"}}')
    result = shoal("graph", "run", "g.yaml", "-i", "topic=bread", "--rollout", "plan.json", "--trace", "t.jsonl")
    assert result.exit_code == 0, result.stderr
    decided = [r for r in read_trace(Path("t.jsonl")) if r.get("decision") == "rollout"]
    assert [r["action"] for r in decided] == ["begin", "assign", "end"] or decided[2]["action"] == "compare"
    assert decided[1]["side"] == "candidate"
    assert decided[-1]["candidate"]["requests"] == 4


def test_graph_run_json_is_one_document(shoal: Shoal) -> None:
    result = shoal("graph", "run", "g.yaml", "-i", "topic=bread", "--json", "--seed", "5")
    document = json.loads(result.stdout)
    assert document["nodes"]["c"]["state"] == "done"
    assert len(document["nodes"]["b"]["output"]) == 2
    assert (
        json.loads(shoal("graph", "run", "g.yaml", "-i", "topic=bread", "--json", "--seed", "5").stdout)["output"]
        == (document["output"])
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graph", "run", "g.yaml"], "lacks input 'topic'"),
        (["graph", "run", "g.yaml", "-i", "topic"], "is no NAME=VALUE"),
        (["graph", "run", "g.yaml", "-i", "topic=@none"], "cannot be read"),
        (["graph", "run", "none.yaml"], "cannot be read"),
        (["trace", "none.jsonl"], "no trace can be read"),
    ],
)
def test_what_is_wrong_is_status_2(shoal: Shoal, arguments: list[str], message: str) -> None:
    result = shoal(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_interrupt_cancels_the_run_and_says_so(shoal: Shoal) -> None:
    result = shoal("graph", "run", "g.yaml", "-i", "topic=x", "--trace", "t.jsonl", step_s=0.05, interrupt_at=(3,))
    assert result.exit_code == 130, result.stderr
    states = {r["agent_id"]: r["state"] for r in read_trace(Path("t.jsonl")) if r["kind"] == "node"}
    assert states["c"] == "cancelled"


def test_graph_show_draws_levels_and_prefixes(shoal: Shoal) -> None:
    result = shoal("graph", "show", "g.yaml")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^2 +b: b for each of 2 items +a ", result.stdout, re.M)
    assert re.search(r"^3 +c \(final\) +b .* default '-'", result.stdout, re.M)
    assert "shared (65)" in result.stdout


def test_graph_lint_measures_and_ends_with_1_when_it_finds_something(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.graph.ensure_model", lambda model: None)
    monkeypatch.setattr("shoal.cli.graph._tokenizer", lambda model: opened().codec.encode_messages)
    result = shoal("graph", "lint", "g.yaml")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert re.search(r"^b\[0\] +\d+ +\d+ \(\d+%\) +b\[1\] +task of b", result.stdout, re.M)
    path = Path("g.yaml")
    path.write_text(path.read_text().replace("shared: Rules", "shared: At 12:30 rules"))
    result = shoal("graph", "lint", "g.yaml", "--json")
    assert result.exit_code == 1
    assert "a timestamp in the shared part ('12:30')" in json.loads(result.stdout)["findings"][0]


def test_a_trace_that_cannot_be_written_any_more_ends_and_the_run_goes_on() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    with Trace(full) as trace:
        result = go(troubled().run(ScriptedEngine(answers()), trace=trace))
        assert "cannot be written" in str(trace.error)
    assert result.records
    assert trace.records


def attempt(agent: str, end_s: float, latency_ms: float, **facts: Any) -> dict[str, Any]:
    plain = {"kind": "attempt", "agent": agent, "outcome": "ok", "time": end_s, "latency_ms": latency_ms}
    return {**plain, "prompt_tokens": 100, "prefix_tokens": 0, "queue_ms": 10.0, "kv_mb": 2.0, **facts}


def test_a_summary_is_arithmetic() -> None:
    records = [
        attempt("a", 11.0, 1000.0),
        attempt("b", 12.0, 1500.0, prefix_tokens=80, kv_mb=1.0),  # half a second beside the first
        attempt("b", 13.0, 500.0, prefix_tokens=20, outcome="invalid", queue_ms=None, process_mb=300.0),
        {"kind": "graph", "wall_s": 3.0, "time": 13.0},
    ]
    told = summarise(records)
    assert (told.calls.calls, told.calls.ok, told.calls.invalid) == (3, 2, 1)
    assert told.calls.hit_rate == pytest.approx(1 / 3)
    assert told.calls.latency_ms == Spread(1000.0, 1000.0, 1500.0)
    assert told.calls.queue_ms == Spread(10.0, 10.0, 10.0)
    assert (told.calls.kv_peak_mb, told.calls.process_mb) == (3.0, 300.0)
    assert told.calls.per_minute == pytest.approx(60)
    assert (told.agents["b"].calls, told.agents["b"].hit_rate) == (2, 0.5)
    assert (told.graphs, told.graphs_per_minute, told.graph_s) == (1, 20.0, 3.0)
    assert summarise([]).calls.calls == summarise([{"kind": "attempt", "latency_ms": "x"}]).graphs == 0


def test_two_traces_are_put_side_by_side(shoal: Shoal) -> None:
    for name, seed in (("one", "1"), ("two", "2")):
        assert shoal("graph", "run", "g.yaml", "-i", "topic=bread", "--seed", seed, "--trace", name).exit_code == 0
    alone = shoal("trace", "one", "--summary").stdout
    assert re.search(r"^all +4 +4 +0 +\d+% ", alone, re.M)
    assert re.search(r"^one: 1 graphs, ", alone)
    both = shoal("trace", "one", "two").stdout
    assert re.search(r"^all +one +4 ", both, re.M)
    assert re.search(r"^ +two +4 ", both, re.M)
    assert "change" in both
    first, second = json.loads(shoal("trace", "one", "two", "--json").stdout)
    assert first["agents"].keys() == second["agents"].keys() == {"a", "b", "c"}


def test_two_models_on_one_chain(shoal: Shoal) -> None:
    Path("inputs.jsonl").write_text('{"topic": "bread"}\n{"topic": "the sea"}\n')
    arguments = ["compare", "one", "two", "--graph", "g.yaml", "--inputs", "inputs.jsonl"]
    told = json.loads(shoal(*arguments, "--json").stdout)
    assert told["models"]["one"]["trace"]["calls"]["calls"] == 8
    assert {node["equal"] for node in told["nodes"].values()} == {1.0}, "the same toy model on both sides"
    shown = shoal(*arguments).stdout
    assert re.search(r"^schema failures +0 +0$", shown, re.M)
    assert re.search(r"^c +100% of the words, 100% of 2 outputs equal$", shown, re.M)
    refused = shoal("compare", "one", "two")
    assert (refused.exit_code, "give one of them" in refused.stderr) == (2, True)
