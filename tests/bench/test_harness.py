"""The harness over workers that do as they are told: order, throttling, failures, budgets, equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from shoal.bench import harness
from shoal.bench.ceiling import ModelFacts
from shoal.bench.harness import Harness, Rounds
from shoal.bench.machine import Check, ThermalGate
from shoal.bench.systems import named
from shoal.bench.systems.base import Measured, Setup
from shoal.bench.timeline import RunTimes, TokenTimes
from shoal.bench.workloads import Job, Workload
from shoal.errors import BenchmarkError

LEVEL = Workload("scaling", "2", 2, (8, 8), 4, 2)
SOURCE = Measured("model", Path("model.gguf"), 2, Path())


class FakeWorker:
    """Writes down what is asked. "genai" fails in its second measured run; others write 1, 2, 3, 4."""

    log: ClassVar[list[str]] = []
    alive: ClassVar[set[str]] = set()

    def __init__(self, kind: str, source: Measured) -> None:
        self.kind, self.runs = kind, 0
        self.variant = ""
        self.alive.add(kind)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return {"configuration": {"kind": self.kind}}

    def prepare(self, setup: Setup) -> float:
        self.variant = setup.variant
        return 0.0

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        if jobs[0].max_tokens == LEVEL.output and len(jobs) == LEVEL.requests:
            self.runs += 1
            self.log.append(f"{self.kind}:{self.variant}" if self.variant else self.kind)
            if self.kind == "genai" and self.runs == 2:
                raise BenchmarkError("genai: out of luck")
        step = {"shoal": 0.1, "llama": 0.4}.get(self.kind, 0.2)
        times = [step * (i + 1) for i in range(4)]
        return RunTimes([TokenTimes(0.0, [1, 2, 3, 4], list(times)) for _ in jobs], times[-1])

    def kill(self) -> None:
        self.alive.discard(self.kind)

    def close(self) -> None:
        self.alive.discard(self.kind)


class Scripted(ThermalGate):
    """A gate that says what it was told to."""

    def __init__(self, slow: set[int]) -> None:
        super().__init__(kernel=lambda: 1.0)
        self.count, self.slow = 0, slow
        self.given_up = False

    @property
    def shut(self) -> bool:
        return self.given_up

    def check(self) -> Check:
        self.count += 1
        hot = self.count - 1 in self.slow
        return Check(2.0 if hot else 1.0, 1.0, 0.0, True)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(harness, "Worker", FakeWorker)
    monkeypatch.setattr(harness, "_PAUSE_S", 0.0)
    monkeypatch.setattr(FakeWorker, "log", [])
    monkeypatch.setattr(FakeWorker, "alive", set())

    def build(*names: str, slow: set[int] | None = None) -> Harness:
        return Harness(
            {named(name): SOURCE for name in names},
            Scripted(slow or set()),
            text=list(range(1000)),
            facts=ModelFacts(10, 1, 10, 1),
            machine={"read_bytes_per_s": 1.0, "int8_ops_per_s": 1.0},
            tell=lambda line: None,
        )

    return build


def test_systems_take_turns_and_the_order_turns_around(make: Any) -> None:
    level = make("shoal", "llama", "llama@q8").level(LEVEL, Rounds(3))
    assert FakeWorker.log == ["shoal", "llama", "llama", "llama", "llama", "shoal", "shoal", "llama", "llama"]
    assert [len(result["runs"]) for result in level["results"].values()] == [3, 3, 3]
    assert level["results"]["shoal"]["summary"]["wall_s"]["median"] == pytest.approx(0.4)
    assert level["results"]["llama"]["summary"]["wall_s"]["n"] == 3
    assert level["equality"] == {"llama": {"equal": 2, "of": 2, "common_tokens": 4.0}}, "8 bits are other weights"


def test_a_run_that_ends_hot_is_marked_and_not_quoted(make: Any) -> None:
    """A look before the first run, then one after each: the one after the second finds the machine slow."""
    level = make("shoal", slow={2}).level(LEVEL, Rounds(3))
    result = level["results"]["shoal"]
    assert [run["throttled"] for run in result["runs"]] == [False, True, False]
    assert result["throttled"] == 1
    assert result["summary"]["wall_s"]["n"] == 2
    assert "throttled" not in result["summary"]


def test_wanted_rounds_are_repeated_until_all_have_enough_fit_runs(make: Any) -> None:
    """Two of the first rounds are hot for one of the two; budgets do not count."""
    level = make("shoal", "llama", slow={1, 5}).level(replace(LEVEL, budget_s=0.1), Rounds(3, wanted=True))
    told = level["results"]
    assert [[run["throttled"] for run in told[key]["runs"]].count(False) for key in told] >= [3, 3]
    assert all(len(told[key]["runs"]) == len(told["shoal"]["runs"]) >= 4 for key in told), "always whole rounds"
    assert level["relative"] is False
    assert told["llama"]["summary"]["wall_s"]["n"] >= 3


def test_where_the_gate_gives_up_figures_are_ratios_of_what_ran_in_turns(make: Any) -> None:
    made = make("shoal", "llama", slow=set(range(100)))
    made.gate.given_up = True
    level = made.level(LEVEL, Rounds(5, wanted=True))
    assert [len(result["runs"]) for result in level["results"].values()] == [5, 5], "no round more: none would be fit"
    assert level["relative"] is True
    assert level["results"]["llama"]["throttled"] == 5
    assert level["results"]["llama"]["summary"]["wall_s"]["n"] == 5
    assert level["pairs"]["llama"]["wall_s"] == {
        "ratio": pytest.approx(0.25), "low": pytest.approx(0.25), "high": pytest.approx(0.25), "pairs": 5,
    }  # fmt: skip
    never = make("shoal", slow=set(range(1000))).level(LEVEL, Rounds(2, wanted=True, limit_s=0.05))
    assert never["relative"] is True, "the limit ends it"


def test_a_system_that_fails_leaves_the_others_alone(make: Any) -> None:
    made = make("shoal", "genai")
    level = made.level(LEVEL, Rounds(3))
    assert level["results"]["genai"]["error"] == "genai: out of luck"
    assert len(level["results"]["genai"]["runs"]) == 1
    assert len(level["results"]["shoal"]["runs"]) == 3
    assert FakeWorker.alive == {"shoal"}
    assert "error" not in made.level(replace(LEVEL, level="3"), Rounds(1))["results"]["genai"], (
        "a new process, a new chance"
    )


def test_a_slow_system_stops_after_two_runs(make: Any) -> None:
    level = make("shoal", "llama").level(replace(LEVEL, budget_s=1.0), Rounds(5))
    assert len(level["results"]["llama"]["runs"]) == 2
    assert len(level["results"]["shoal"]["runs"]) == 3


def test_variants_run_where_systems_know_them(make: Any) -> None:
    level = make("shoal", "llama", "genai").level(replace(LEVEL, variants=("", "unshared", "copied")), Rounds(1))
    assert list(level["results"]) == ["shoal", "shoal:unshared", "llama", "llama:copied", "genai", "genai:unshared"]
    alone = make("shoal", "llama", "shoal-http").level(replace(LEVEL, variants=("", "http"), peers=False), Rounds(1))
    assert list(alone["results"]) == ["shoal", "shoal-http:http"]


def test_the_static_batch_runs_in_the_process_of_the_engine(make: Any) -> None:
    made = make("shoal")
    made.level(replace(LEVEL, variants=("", "static")), Rounds(2))
    assert FakeWorker.log == ["shoal", "shoal:static", "shoal:static", "shoal"]
    assert len(made._workers) == 1
    assert made.loaded["shoal"]["cold"]["warm_run_s"] == pytest.approx(0.4)
    made.close()
    assert not FakeWorker.alive


def test_unknown_systems_are_named() -> None:
    with pytest.raises(BenchmarkError, match="lama"):
        named("lama")
    with pytest.raises(BenchmarkError, match="genai@q4"):
        named("genai@q4")
    assert named("url=http://127.0.0.1:1/v1/").url == "http://127.0.0.1:1/v1"
    assert named("llama@q8").label == "llama.cpp, 8 bits (Q8_0)"


def test_a_busy_process_is_there_while_it_is_measured_and_gone_after(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def children() -> list[int]:
        return [child.nice() for child in psutil.Process().children()]

    class Looking(FakeWorker):
        def run(self, jobs: Sequence[Job]) -> RunTimes:
            seen.append(children())
            return super().run(jobs)

    monkeypatch.setattr(harness, "Worker", Looking)
    before = children()
    made = make("shoal")
    made.level(replace(LEVEL, beside="other group, nice 19"), Rounds(1))
    made.level(LEVEL, Rounds(1))
    beside = [nices for nices in seen if nices != before]
    assert beside == [[*before, 19]]
    assert children() == before
