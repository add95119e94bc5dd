"""The burst governor: what an engine does when its machine gets hot or runs out of energy, and a record of why.

with Engine.load("smollm2-135m", governor=Governor()) as engine:
    ...
    for decision in engine.governor.decisions:
        print(decision)
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self

from shoal.errors import ConfigError, PowerLimitError
from shoal.names import did_you_mean
from shoal.power.readings import Level, Reading, Sensor, Unit, level_of
from shoal.power.sensors import BATTERY, find_sensors

log = logging.getLogger("shoal.power")

_KEPT = 1000  # decisions in memory; listeners hear of all
_BUDGET = "energy budget"
_NOTHING = Reading("no sensor", 0.0, Unit.NONE)
_LEAST_DUTY = 0.01  # when the budget is used up; rests are bounded by max_pause_s anyway
_DUTY_STEP = 0.1
_BUDGET_SHARES = (0.6, 0.8, 1.0)  # of the joules of a window: where fair, serious and critical begin


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPolicy:
    """What is done at which level. Checked when built; raises `ConfigError`.

    duty: the share of time the model may compute, at nominal, fair, serious and critical. The batch stays as wide as
    ever; after each step the engine rests, for at most `max_pause_s`. defer_from: the level from which requests of
    priority low stay in the queue, for `max_defer_s` at most. refuse_from: the level from which new requests are
    refused with `PowerLimitError`. (None: never.) hold_s: how long the sensors must be better before the governor goes
    down one level; it goes up at once. sample_s: how often the sensors are read. joules: the most energy in any
    `window_s` seconds (None: no budget): fair begins at 60 % of it, serious at 80 %, critical where it is used up, and
    from half of it on the engine computes the less the less is left. battery: the percentages left, unplugged, at which
    fair, serious and critical begin, for the battery that the governor finds itself. batch: the share of `max_batch`
    that may run at each level (None: as wide as ever, the better way: see docs/power.md); what runs already goes on.
    """

    duty: tuple[float, float, float, float] = (1.0, 0.75, 0.4, 0.1)
    max_pause_s: float = 0.5
    defer_from: Level | None = Level.SERIOUS
    max_defer_s: float = 600.0
    refuse_from: Level | None = Level.CRITICAL
    hold_s: float = 10.0
    sample_s: float = 0.5
    joules: float | None = None
    window_s: float = 60.0
    battery: tuple[float, float, float] = BATTERY
    batch: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        duty = tuple(self.duty)
        falling = all(a >= b for a, b in itertools.pairwise(duty))
        if len(duty) != len(Level) or not falling or not all(0 < share <= 1 for share in duty):
            raise _wrong("duty", self.duty, "four shares above 0 and up to 1, none above the one before")
        object.__setattr__(self, "duty", duty)
        if self.batch is not None:
            batch = tuple(self.batch)
            falling = all(a >= b for a, b in itertools.pairwise(batch))
            if len(batch) != len(Level) or not falling or not all(0 < share <= 1 for share in batch):
                raise _wrong("batch", self.batch, "four shares above 0 and up to 1, none above the one before")
            object.__setattr__(self, "batch", batch)
        for name in ("defer_from", "refuse_from"):
            object.__setattr__(self, name, _level(name, getattr(self, name)))
        battery = tuple(self.battery)
        if len(battery) != 3 or not 100 >= battery[0] >= battery[1] >= battery[2] >= 0:
            raise _wrong("battery", self.battery, "three percentages from 100 to 0, none above the one before")
        object.__setattr__(self, "battery", battery)
        for name in ("max_pause_s", "max_defer_s", "hold_s", "sample_s", "window_s", "joules"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _wrong(name, value, "above 0")

    @classmethod
    def of(cls, fields_given: bool | Mapping[str, Any]) -> Self:
        """A policy from the setting `power` of an engine. ConfigError names an unknown field and the nearest one."""
        given = {} if isinstance(fields_given, bool) else dict(fields_given)
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"unknown field {name!r} of a power policy", value=name, limit=known, hint=hint)
        try:
            return cls(**given)
        except TypeError as error:  # a text where numbers belong
            raise ConfigError(f"the power policy is wrong: {error}", value=given, hint="see PowerPolicy") from error


def _level(name: str, value: object) -> Level | None:
    """A level as it is, or from its name."""
    if value is None or isinstance(value, Level):
        return value
    found = {str(level): level for level in Level}.get(str(value))
    if found is None:
        raise _wrong(name, value, f"one of {', '.join(map(str, Level))}, or None")
    return found


def _wrong(name: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", value=value, limit=limit, hint=f"it must be {limit}")


class Action(StrEnum):
    """What a decision was."""

    PACE = "pace"  # another share of the time is computed from here on
    DEFER = "defer"  # requests of priority low stay in the queue
    RELEASE = "release"  # they join again
    REFUSE = "refuse"  # new requests are refused
    ACCEPT = "accept"  # they are taken again
    REFUSED = "refused"  # this request was
    BLIND = "blind"  # a sensor, or every one, cannot be read: it counts as nominal
    SEEING = "seeing"  # it can be read again


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision and what led to it. `time` is in seconds since the epoch; `duty` the share computed from then on."""

    time: float
    action: Action
    level: Level
    duty: float
    cause: str
    sensor: str = ""
    value: float | None = None
    unit: str = ""
    request_id: str = ""

    def record(self) -> dict[str, Any]:
        """As a record of a trace, ready for JSON; `decision` tells it from others."""
        return {"kind": "decision", "decision": "governor", **asdict(self), "level": str(self.level)}

    def __str__(self) -> str:
        return f"{self.action} at {self.level} (duty {self.duty:g}): {self.cause}"


class Governor:
    """Turns readings into a level, and the level into what the engine does. May serve several engines of one machine.

    It reads the sensors at most every `sample_s`, on a thread that is not an engine's, and counts a sensor that fails
    as nominal. The level is that of the worst reading: up at once, down one step for each `hold_s` of better readings,
    so that it comes down at most once a `hold_s`, however the readings jump.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor] | None = None,
        policy: PowerPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `sensors`, those of this machine. ConfigError for a budget of joules where none counts energy."""
        self.policy = policy or PowerPolicy()
        self.sensors = list(find_sensors(battery=self.policy.battery) if sensors is None else sensors)
        self.level = Level.NOMINAL
        self.deferring = False  # requests of priority low are to stay in the queue
        self._clock = clock
        self._sampling = threading.Lock()
        self._kept_lock = threading.Lock()
        self._decisions: deque[Decision] = deque(maxlen=_KEPT)
        self._listeners: list[Callable[[Decision], object]] = []
        self._readings: tuple[Reading, ...] = ()
        self._worst: Reading | None = None
        self._joules: dict[str, float] = {}
        self._spent: deque[tuple[float, float]] = deque()
        self._budget_duty = 1.0  # what the budget of energy allows
        self._blind: set[str] = set()
        self._better_since: float | None = None
        self._deferred_since: float | None = None
        self._let_go: Level | None = None  # the level at which deferring was given up
        self._due = float("-inf")
        self.sample()
        if self.policy.joules is not None and not self._joules:
            raise ConfigError(
                "a budget of joules needs a sensor that counts energy, and there is none",
                value=self.policy.joules,
                limit=[sensor.name for sensor in self.sensors],
                hint="`shoal doctor` lists the sensors; leave joules out or let this user read one",
            )
        if not self.sensors:
            self._decide(Action.BLIND, "this machine has no sensor that can be read")

    # -- what the engine asks -----------------------------------------------------------------------------------

    def pause_s(self, step_s: float) -> float:
        """How long to rest after a step that took `step_s`. Costs nothing worth counting."""
        return min(step_s * (1.0 / self.duty - 1.0), self.policy.max_pause_s)

    @property
    def duty(self) -> float:
        """The share of time the model may compute now."""
        return min(self.policy.duty[self.level], self._budget_duty)

    def most_running(self, max_batch: int) -> int:
        """How many of `max_batch` sequences may run together now."""
        shares = self.policy.batch
        return max_batch if shares is None else max(1, round(max_batch * shares[self.level]))

    @property
    def cause(self) -> str:
        """Why the machine is at its level: the reading that led there; empty where all is well."""
        return "" if self.level is Level.NOMINAL and self.duty == 1.0 else str(self._worst or _NOTHING)

    @property
    def summary(self) -> str:
        """What it does to requests now, in a line for people; empty while it does nothing."""
        if self.level is Level.NOMINAL and self.duty == 1.0:
            return ""
        parts = [f"{self.duty:.0%} speed"]
        parts += ["background agents wait"] if self.deferring else []
        parts += ["new requests are refused"] if self.refusing else []
        return f"power {self.level}: {', '.join(parts)} ({self.cause})"

    def admit(self, request_id: str | None) -> None:
        """Raise `PowerLimitError` when new requests are refused at this level, and note it."""
        if not self.refusing:
            return
        worst = self._worst
        self._decide(Action.REFUSED, f"request {request_id or 'without a name'}: {worst}", worst, request_id or "")
        raise PowerLimitError(
            f"the machine is at its limit: {worst} is {self.level}",
            value=None if worst is None else worst.value,
            limit=str(self.policy.refuse_from),
            retry_after_s=self.policy.hold_s,
        )

    @property
    def refusing(self) -> bool:
        """True while new requests are refused."""
        return _reached(self.level, self.policy.refuse_from)

    # -- the record ---------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The latest decisions, oldest first; a thousand are kept."""
        with self._kept_lock:
            return tuple(self._decisions)

    def listen(self, listener: Callable[[Decision], object]) -> None:
        """Call `listener` with every decision from here on, on whichever thread. It must not block."""
        with self._kept_lock:
            self._listeners = [*self._listeners, listener]

    def unlisten(self, listener: Callable[[Decision], object]) -> None:
        """Take a listener back."""
        with self._kept_lock:
            self._listeners = [known for known in self._listeners if known is not listener]

    def state(self) -> dict[str, Any]:
        """The level, what that does to requests, and why: ready for JSON."""
        cause = self.cause
        sensor = self._worst.sensor if cause and self._worst is not None else ""
        state = {"level": str(self.level), "duty": self.duty, "cause": cause, "sensor": sensor}
        return {**state, "summary": self.summary, "deferring": self.deferring, "refusing": self.refusing}

    def describe(self) -> dict[str, Any]:
        """The state, the readings and the latest decisions, ready for JSON."""
        readings = [{**asdict(reading), "level": str(reading.level)} for reading in self._readings]
        latest = [decision.record() for decision in self.decisions[-20:]]
        return {**self.state(), "readings": readings, "decisions": latest}

    def _decide(self, action: Action, cause: str, reading: Reading | None = None, request_id: str = "") -> None:
        decision = Decision(
            time=time.time(),
            action=action,
            level=self.level,
            duty=self.duty,
            cause=cause,
            sensor="" if reading is None else reading.sensor,
            value=None if reading is None else reading.value,
            unit="" if reading is None else str(reading.unit),
            request_id=request_id,
        )
        with self._kept_lock:
            self._decisions.append(decision)
            listeners = self._listeners
        for listener in listeners:
            try:
                listener(decision)
            except Exception:
                log.exception("a listener of the governor's decisions raised")

    # -- sampling -----------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Read the sensors and decide, unless that was done less than `sample_s` ago. May take some milliseconds."""
        now = self._clock()
        if now < self._due or not self._sampling.acquire(blocking=False):
            return
        try:
            self._due = now + self.policy.sample_s
            readings = [reading for sensor in self.sensors if (reading := self._read(sensor)) is not None]
            readings += self._budget(now)
            self._readings = tuple(readings)
            self._judge(max(readings, key=lambda reading: reading.level, default=_NOTHING), now)
        finally:
            self._sampling.release()

    def _read(self, sensor: Sensor) -> Reading | None:
        try:
            reading = sensor.read()
        except Exception as error:  # noqa: BLE001 - whatever a sensor raises, it cannot be read
            if sensor.name not in self._blind:
                self._blind.add(sensor.name)
                self._decide(Action.BLIND, str(error))
            return None
        if sensor.name in self._blind:
            self._blind.discard(sensor.name)
            self._decide(Action.SEEING, f"{sensor.name} can be read again", reading)
        if reading.joules is not None:
            self._joules[sensor.name] = reading.joules
        return reading

    def _budget(self, now: float) -> list[Reading]:
        """The energy of the last window as a reading of its own, if there is a budget."""
        budget, window_s = self.policy.joules, self.policy.window_s
        if budget is None or not self._joules:
            return []
        self._spent.append((now, sum(self._joules.values())))
        while len(self._spent) > 1 and self._spent[1][0] <= now - window_s:
            self._spent.popleft()
        used = self._spent[-1][1] - self._spent[0][1]
        fair, serious, critical = (budget * share for share in _BUDGET_SHARES)
        level = level_of(used, (fair, serious, critical))
        reading = Reading(_BUDGET, used, Unit.JOULES, level, detail=f"of {budget:g} J in {window_s:g} s")
        self._pace(reading, min(1.0, max(_LEAST_DUTY, round(2.0 * (1.0 - used / budget), 2))))
        return [reading]

    def _pace(self, reading: Reading, duty: float) -> None:
        """From half the budget on, compute the less the less is left of it; small changes are let be."""
        if abs(duty - self._budget_duty) < _DUTY_STEP and duty not in (1.0, _LEAST_DUTY):
            return
        before = self.duty
        self._budget_duty = duty
        if self.duty != before:
            self._decide(Action.PACE, f"{reading} leaves less" if self.duty < before else f"{reading}", reading)

    def _judge(self, worst: Reading, now: float) -> None:
        before = self.level
        if worst.level >= before:
            self._better_since = None
            self._worst = worst
            if worst.level > before:
                self._go_to(worst.level, f"{worst} is {worst.level}", worst)
        elif self._better_since is None:
            self._better_since = now
        elif now - self._better_since >= self.policy.hold_s:
            self._better_since = now
            self._go_to(Level(before - 1), f"{worst}, better than {before} for {self.policy.hold_s:g} s", worst)
        self._bound_deferral(worst, now)

    def _go_to(self, level: Level, cause: str, reading: Reading) -> None:
        """Take a level, and tell what that changes."""
        was_refusing, was_duty = self.refusing, self.duty
        self.level = level
        self._worst = reading
        if self.duty != was_duty:
            self._decide(Action.PACE, cause, reading)
        if self._let_go is not None and (level > self._let_go or not _reached(level, self.policy.defer_from)):
            self._let_go = None
        defer = _reached(level, self.policy.defer_from) and self._let_go is None
        if defer != self.deferring:
            self.deferring = defer
            self._deferred_since = None
            self._decide(Action.DEFER if defer else Action.RELEASE, cause, reading)
        if self.refusing != was_refusing:
            self._decide(Action.REFUSE if self.refusing else Action.ACCEPT, cause, reading)

    def _bound_deferral(self, reading: Reading, now: float) -> None:
        """Let the background go on after `max_defer_s`, at this level's pace: nobody waits for ever."""
        if not self.deferring:
            return
        if self._deferred_since is None:
            self._deferred_since = now
        elif now - self._deferred_since >= self.policy.max_defer_s:
            self.deferring = False
            self._let_go = self.level
            self._decide(Action.RELEASE, f"deferred for {self.policy.max_defer_s:g} s", reading)


def _reached(level: Level, threshold: Level | None) -> bool:
    return threshold is not None and level >= threshold
