"""The same graph on a remote engine: our own server over the toy model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.agents import Agent, Graph, State, default
from shoal.cli.main import app
from shoal.engine.remote import RemoteEngine
from shoal.types import SamplingParams
from tests.support.agents import go
from tests.support.live import Live, toy

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_graph_runs_on_a_server() -> None:
    graph = Graph("Rules that all agents have in common, longer than a block.")
    plan = graph.add(Agent("plan", task="Plan", sampling=SHORT))
    slow = Agent("slow", task="Never stop", timeout_s=0.2, on_failure=default("late"),
                 sampling=SamplingParams(max_tokens=3000, ignore_eos=True))  # fmt: skip
    parts = graph.map(Agent("w", task="Write {item}", sampling=SHORT, priority="low"), over=[1, 2], after=plan)
    hung = graph.add(slow, after=plan)
    graph.add(Agent("end", task="End", sampling=SHORT, timeout_s=50), after=[parts, hung])
    with Live(toy(step_s=0.001)) as live:

        async def main() -> None:
            async with RemoteEngine(f"{live.url}/v1") as engine:
                result = await graph.run(engine)
            states = result.states
            assert states.pop("slow") is State.DEFAULTED
            assert set(states.values()) == {State.DONE}
            attempts = {r["agent_id"]: r for r in result.records if r["kind"] == "attempt"}
            assert attempts["slow"]["outcome"] == "timeout"
            assert attempts["slow"]["generated_tokens"] < 3000
            assert attempts["end"]["generated_tokens"] == 8
            assert attempts["end"]["prefix_tokens"] >= 32, "the server tells what it had cached"
            assert attempts["end"]["queue_ms"] is None
            assert attempts["end"]["kv_mb"] is attempts["end"]["process_mb"] is None

        go(main())
        live.wait_idle()


def test_graph_run_on_a_server(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text('nodes:\n  a: {task: "Say {word}", sampling: {max_tokens: 5, ignore_eos: true}}')
    with Live(toy()) as live:
        result = CliRunner().invoke(app, ["graph", "run", str(file), "-i", "word=hi", "--remote", f"{live.url}/v1"])
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()
        live.wait_idle()
    result = CliRunner().invoke(app, ["graph", "run", str(file), "-i", "word=hi", "--remote", f"{live.url}/v1"])
    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr
