"""The governor's policy, on a clock and sensors of the test's own."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from shoal.errors import ConfigError, PowerLimitError
from shoal.power import Action, Decision, Governor, Level, PowerPolicy, SimulatedSensor


class Bench:
    """A governor, a sensor to turn, and a clock that moves by hand."""

    def __init__(self, sensor: SimulatedSensor | None = None, **policy: Any) -> None:
        self.now = 0.0
        self.sensor = sensor or SimulatedSensor()
        settings = {"hold_s": 10.0, "sample_s": 1.0, **policy}
        self.governor = Governor([self.sensor], PowerPolicy(**settings), clock=lambda: self.now)

    def after(self, seconds: float, level: Level | None = None) -> Level:
        """Let time pass, with the sensor at `level` from now on; a sample each second."""
        if level is not None:
            self.sensor.level = level
        for _ in range(int(seconds)):
            self.now += 1.0
            self.governor.sample()
        return self.governor.level

    @property
    def actions(self) -> list[tuple[Action, Level]]:
        return [(decision.action, decision.level) for decision in self.governor.decisions]


def test_up_at_once_and_down_one_level_for_each_hold() -> None:
    bench = Bench()
    assert bench.after(1, Level.CRITICAL) is Level.CRITICAL
    assert bench.after(10, Level.NOMINAL) is Level.CRITICAL
    assert bench.after(1) is Level.SERIOUS
    assert bench.after(9) is Level.SERIOUS
    assert bench.after(1) is Level.FAIR
    assert bench.after(10) is Level.NOMINAL
    assert bench.actions == [
        (Action.PACE, Level.CRITICAL), (Action.DEFER, Level.CRITICAL), (Action.REFUSE, Level.CRITICAL),
        (Action.PACE, Level.SERIOUS), (Action.ACCEPT, Level.SERIOUS),
        (Action.PACE, Level.FAIR), (Action.RELEASE, Level.FAIR),
        (Action.PACE, Level.NOMINAL),
    ]  # fmt: skip


def test_a_reading_as_bad_as_before_starts_the_hold_again() -> None:
    bench = Bench()
    bench.after(1, Level.SERIOUS)
    bench.after(9, Level.FAIR)
    bench.after(1, Level.SERIOUS)
    assert bench.after(10, Level.FAIR) is Level.SERIOUS
    assert bench.after(1) is Level.FAIR
    assert bench.after(60) is Level.FAIR


def test_a_sensor_that_jumps_does_not_make_it_flap() -> None:
    rng = random.Random(3)
    bench = Bench()
    levels = [bench.after(1, Level(rng.randrange(4))) for _ in range(2000)]
    falls = [i for i in range(1, len(levels)) if levels[i] < levels[i - 1]]
    assert all(b - a >= 10 for a, b in itertools.pairwise(falls))
    square = Bench()
    changes = 0
    for i in range(200):  # 5 s hot, 5 s cool, around one threshold
        before = square.governor.level
        changes += square.after(5, Level.SERIOUS if i % 2 else Level.FAIR) is not before
    assert changes == 2  # up to fair, up to serious, and it stays


def test_the_pause_follows_the_step_and_is_bounded() -> None:
    bench = Bench(duty=(1.0, 0.8, 0.5, 0.1), max_pause_s=0.4)
    assert bench.governor.pause_s(0.1) == 0
    bench.after(1, Level.FAIR)
    assert bench.governor.pause_s(0.1) == pytest.approx(0.025)
    bench.after(1, Level.SERIOUS)
    assert bench.governor.pause_s(0.1) == pytest.approx(0.1)
    bench.after(1, Level.CRITICAL)
    assert bench.governor.pause_s(0.1) == 0.4


def test_a_refusal_is_typed_and_recorded() -> None:
    bench = Bench()
    bench.governor.admit("early")
    bench.after(1, Level.CRITICAL)
    with pytest.raises(PowerLimitError, match="simulated 3 is critical: retry") as caught:
        bench.governor.admit("late")
    assert (caught.value.value, caught.value.limit, caught.value.retry_after_s) == (3.0, "critical", 10.0)
    last = bench.governor.decisions[-1]
    assert (last.action, last.request_id, last.sensor) == (Action.REFUSED, "late", "simulated")
    bench.after(11, Level.NOMINAL)
    bench.governor.admit("later")


def test_the_background_is_not_deferred_for_ever() -> None:
    bench = Bench(max_defer_s=30.0)
    bench.after(1, Level.SERIOUS)
    assert bench.governor.deferring
    bench.after(30)
    assert not bench.governor.deferring
    assert bench.governor.decisions[-1].cause == "deferred for 30 s"
    bench.after(100)
    assert not bench.governor.deferring
    bench.after(1, Level.CRITICAL)  # worse: again
    assert bench.governor.deferring


def test_a_policy_may_leave_things_out() -> None:
    bench = Bench(defer_from=None, refuse_from=None, duty=(1, 1, 1, 1))
    bench.after(1, Level.CRITICAL)
    bench.governor.admit("x")
    assert not bench.governor.deferring
    assert bench.governor.decisions == ()


def test_energy_in_a_sliding_window() -> None:
    bench = Bench(SimulatedSensor(joules=0.0), joules=100.0, window_s=10.0)
    levels = []
    for _ in range(12):
        assert bench.sensor.joules is not None
        bench.sensor.joules += 10.0
        levels.append(bench.after(1))
    assert levels[4] is Level.NOMINAL  # 50 J
    assert levels[5] is Level.FAIR
    assert levels[7] is Level.SERIOUS
    assert levels[9] is levels[11] is Level.CRITICAL
    assert "energy budget 100 J (of 100 J in 10 s) is critical" in {d.cause for d in bench.governor.decisions}
    assert bench.after(41) is Level.NOMINAL  # nothing is spent: the window empties


def test_a_plant_under_the_governor_stays_near_its_budget() -> None:
    """A machine of 20 W at full speed and 1 W at rest, held to 500 J a minute: 8.3 W on average."""
    bench = Bench(SimulatedSensor(joules=0.0), joules=500.0, window_s=60.0)
    spent = []
    for _ in range(600):
        duty = bench.governor.duty
        assert bench.sensor.joules is not None
        bench.sensor.joules += 1.0 + 19.0 * duty
        spent.append(bench.sensor.joules)
        bench.after(1)
    windows = [b - a for a, b in zip(spent, spent[60:], strict=False)]
    assert max(windows) <= 515  # the 1 W that rest costs cannot be saved
    assert spent[-1] / 600 >= 4.0  # and it is used: half of what is allowed at the least
    assert len(bench.governor.decisions) < 100  # of 600 samples: small changes are let be


def test_a_budget_without_a_counter_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a sensor that counts energy"):
        Governor([SimulatedSensor()], PowerPolicy(joules=5.0))


def test_a_sensor_that_fails_counts_as_nominal_and_is_told_once() -> None:
    bench = Bench()
    bench.after(1, Level.CRITICAL)
    bench.sensor.fails = True
    assert bench.after(40) is Level.NOMINAL
    bench.sensor.fails = False
    bench.after(3, Level.NOMINAL)
    told = [d.action for d in bench.governor.decisions if d.action in (Action.BLIND, Action.SEEING)]
    assert told == [Action.BLIND, Action.SEEING]


def test_a_machine_without_sensors_says_so() -> None:
    governor = Governor([])
    assert [d.action for d in governor.decisions] == [Action.BLIND]
    assert governor.level is Level.NOMINAL


def test_records_are_json_listeners_hear_all_and_memory_is_bounded() -> None:
    bench = Bench()
    heard: list[Decision] = []
    bench.governor.listen(heard.append)
    bench.after(1, Level.CRITICAL)
    for i in range(3000):
        with pytest.raises(PowerLimitError):
            bench.governor.admit(str(i))
    assert len(heard) == 3003
    assert len(bench.governor.decisions) == 1000
    bench.governor.unlisten(heard.append)
    record = json.loads(json.dumps(heard[0].record()))
    assert (record["kind"], record["decision"]) == ("decision", "governor")
    assert (record["action"], record["level"], record["sensor"], record["value"]) == (
        "pace",
        "critical",
        "simulated",
        3,
    )
    described = json.loads(json.dumps(bench.governor.describe(), allow_nan=False))
    assert (described["level"], described["refusing"], len(described["decisions"])) == ("critical", True, 20)


def test_it_samples_no_more_often_than_it_was_told() -> None:
    bench = Bench()
    reads = bench.sensor.reads
    for _ in range(100):
        bench.governor.sample()
    assert bench.sensor.reads == reads
    bench.after(5)
    assert bench.sensor.reads == reads + 5


def test_a_policy_from_a_setting() -> None:
    policy = PowerPolicy.of(
        {"battery": [50, 20, 10], "defer_from": "fair", "refuse_from": None, "batch": [1, 1, 0.5, 0.25]}
    )
    assert (policy.defer_from, policy.refuse_from, policy.battery) == (Level.FAIR, None, (50, 20, 10))
    assert PowerPolicy.of(True) == PowerPolicy()
    with pytest.raises(ConfigError, match="did you mean joules"):
        PowerPolicy.of({"joule": 5})
    with pytest.raises(ConfigError, match="power policy is wrong"):
        PowerPolicy.of({"joules": "many"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"duty": (1, 1, 1)},
        {"duty": (0.5, 1, 0.4, 0.1)},
        {"duty": (1, 0.5, 0.4, 0)},
        {"hold_s": 0},
        {"joules": -1},
        {"batch": (1, 1, 1)},
        {"batch": (0.5, 1, 1, 1)},
        {"battery": (5, 10, 20)},
        {"defer_from": "warm"},
    ],
)
def test_a_policy_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="it must be"):
        PowerPolicy(**wrong)
