"""Single parts of the engine by themselves, each a few seconds: what whole workloads do not show.

Each part gives plain numbers: a name to a median with its range, or to a count. Milliseconds, unless a name says else.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from shoal.agents import Agent, Graph
from shoal.bench.results import Figure
from shoal.bench.systems.ours import sampling as greedy
from shoal.bench.tables import quoted
from shoal.bench.timeline import summary
from shoal.bench.workloads import TEXT, Job, Workload, make_jobs
from shoal.config import EngineConfig
from shoal.core.audit import check_integrity
from shoal.engine.engine import Engine
from shoal.engine.inflight import RequestState
from shoal.engine.inputs import InputProcessor
from shoal.engine.loading import make_runner
from shoal.engine.loop import StepLoop
from shoal.errors import BenchmarkError
from shoal.models import Store, load_tokenizer
from shoal.names import did_you_mean
from shoal.power import Governor, Level, PowerPolicy, Sensor, SimulatedSensor, find_sensors
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import ScheduledSequence, StepPlan, Want
from shoal.sampling.sampler import SamplerState, sample
from shoal.types import Event, FinishReason, Report, Request, Result, SamplingParams

_STEPS = 64
_PROMPTS = 100_000
_NODES = 200


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part is measured on: a model of the store, a runner, how many rounds."""

    model: str
    runner: str
    runs: int

    def loop(self, **settings: Any) -> StepLoop:
        """The synchronous loop on the real model, without a thread of its own."""
        store = Store()
        config = EngineConfig.of(runner=self.runner, **settings)
        runner = make_runner(store.resolve(self.model), config, store)
        return StepLoop(runner, InputProcessor(runner.spec, None, 0), config)

    def jobs(self, count: int, length: int, output: int, seed: int = 0) -> list[Job]:
        """Requests of real text that share nothing."""
        text = load_tokenizer(Store().resolve(self.model)).encode(TEXT.read_text("utf-8"), add_special=False)
        return make_jobs(Workload("parts", str(count), count, (length, length), output, count), text, seed)


def measure(name: str, bench: Bench) -> dict[str, Any]:
    """Measure one part. BenchmarkError for a name that is not known."""
    if name not in PARTS:
        raise BenchmarkError(f"no part {name!r}", value=name, limit=list(PARTS), hint=did_you_mean(name, PARTS))
    return {"part": name, "runner": bench.runner, **PARTS[name](bench)}


def scheduler(bench: Bench) -> dict[str, Any]:
    """Share of step time spent in scheduler and prefix tree at 32 streams."""
    loop = bench.loop(max_batch=32)
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            spent[0] += time.perf_counter() - begin
            return result

        return wrapper

    loop.scheduler.apply = timed(loop.scheduler.apply)  # type: ignore[method-assign]
    shares, per_step = [], []
    for number in range(bench.runs + 1):
        for i, job in enumerate(bench.jobs(32, 40, _STEPS, seed=number)):
            _add(loop, f"{number}-{i}", job)
        spent[0], begin, steps = 0.0, time.perf_counter(), 0
        while not loop.idle:
            loop.step()
            steps += 1
        if number:  # the first warms up
            shares.append(100 * spent[0] / (time.perf_counter() - begin))
            per_step.append(1e3 * spent[0] / steps)
    loop.runner.close()
    return {"percent_of_step": _spread(shares), "per_step": _spread(per_step)}


def sampling(bench: Bench) -> dict[str, Any]:
    """Sampling 8 rows of the logits of real text, by kind."""
    loop = bench.loop()
    some = bench.jobs(8, 40, 1)
    items = tuple(ScheduledSequence(i, job.prompt, 0, (2 * i, 2 * i + 1), Want.LOGITS) for i, job in enumerate(some))
    logits = np.array(loop.runner.execute(StepPlan(0, items)).logits)
    figures: dict[str, Any] = {}
    for name, params in {
        "temperature": SamplingParams(temperature=0.8),
        "top_p": SamplingParams(temperature=0.8, top_p=0.95),
        "top_k": SamplingParams(temperature=0.8, top_k=40),
        "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
    }.items():
        states = [SamplerState(params, i, loop.runner.spec.vocab_size, some[0].prompt) for i in range(8)]
        taken = []
        for _ in range(40 * bench.runs):
            begin = time.perf_counter()
            sample(logits, states)
            taken.append((time.perf_counter() - begin) * 1e3)
        figures[name] = _spread(taken)
    loop.runner.close()
    return figures


def second(bench: Bench) -> dict[str, Any]:
    """A second identical request of 1,001 tokens: what it computes, and the time to its only token."""
    loop = bench.loop()
    job = bench.jobs(1, 1001, 1)[0]
    computed, times = [], []
    for number in range(4 * bench.runs):
        begin = time.perf_counter()
        state = _add(loop, f"r{number}", job)
        while not loop.idle:
            loop.step()
        if number:
            times.append((time.perf_counter() - begin) * 1e3)
        computed.append(state.seq.computed_tokens)
    loop.runner.close()
    return {"first_computed_tokens": computed[0], "computed_tokens": max(computed[1:]), "whole": _spread(times)}


def distinct(bench: Bench) -> dict[str, Any]:  # noqa: ARG001 - on the toy model, once
    """100,000 distinct prompts through a small budget of the toy model: memory and books."""
    runner = FakeRunner(num_blocks=64)
    loop = StepLoop(runner, InputProcessor(runner.spec, ByteTokenizer(), 0), EngineConfig(max_batch=16))
    process, sizes = psutil.Process(), []
    for number in range(_PROMPTS):
        _add(loop, str(number), Job(tuple(f"{number:07d} ".encode() * 5), 1))
        if number % 16 == 15:
            while not loop.idle:
                loop.step()
        if number % (_PROMPTS // 10) == _PROMPTS // 10 - 1:
            check_integrity(loop.scheduler)
            sizes.append(round(process.memory_info().rss / 2**20, 1))
    return {"rss_mib_each_tenth": sizes, "evictions": loop.stats().evictions}


def masks(bench: Bench) -> dict[str, Any]:
    """Steps of eight constrained rows, and of seven plain rows beside a constrained one, against eight plain rows."""
    whole, beside = [], []
    with Engine.load(bench.model, runner=bench.runner, max_batch=8) as engine:
        _constrained(engine, 8, 0, 99)
        for number in range(bench.runs):
            plain = _step_ms(_constrained(engine, 0, 8, 3 * number))
            whole.append(_step_ms(_constrained(engine, 8, 0, 3 * number + 1)) / plain)
            beside.append(_step_ms(_constrained(engine, 1, 7, 3 * number + 2)) / plain)
    return {"eight_constrained_ratio": _spread(whole), "one_constrained_ratio": _spread(beside)}


def _constrained(engine: Engine, constrained: int, plain: int, number: int) -> Report:
    requests = []
    for row in range(constrained + plain):
        # Any text is allowed: all rows decode all the time, and masks are as wide as they can be.
        fields: dict[str, Any] = {"regex": "(.|\n)*"} if row < constrained else {}
        params = SamplingParams(max_tokens=100, temperature=0.8, seed=row, logit_bias={0: -100, 2: -100}, **fields)
        requests.append(Request(prompt=f"Tell me about number {row + 100 * number}:", sampling=params))
    return engine.run(requests)


def _step_ms(report: Report) -> float:
    return statistics.median(s.ms for s in report.steps if s.batch == 8 and not s.prefill_tokens)


class _Instant:
    """Answers at once, on the event loop: all that is left is the graph's own work."""

    spec = FakeRunner().spec

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        name = request.id or ""
        yield Event(name, (1,), "text")
        yield Event(name, result=Result(name, (1,), "text", FinishReason.STOP, 9, 0.0, 0.0, 0))


def graph(bench: Bench) -> dict[str, Any]:
    """A node of a graph beside its engine: chains and fans of 200 nodes on an engine that answers at once."""
    figures: dict[str, list[float]] = {"chain": [], "fan": []}
    for _ in range(bench.runs):
        for name, made in (("chain", _chain(_NODES)), ("fan", _fan(_NODES))):
            begin = time.perf_counter()
            asyncio.run(made.run(_Instant()))
            figures[name].append((time.perf_counter() - begin) * 1e3 / _NODES)
    return {name: _spread(values) for name, values in figures.items()}


_PACES: dict[str, dict[str, Any]] = {
    "full": {},
    "wide_and_slow": {"duty": (1, 1, 0.4, 0.1)},
    "narrow": {"duty": (1, 1, 1, 1), "batch": (1, 1, 0.4, 0.1)},
}


def pace(bench: Bench) -> dict[str, Any]:
    """Ways to be gentle on a hot machine: all rows with rests between the steps, or fewer rows without.

    Processor milliseconds a token stand for energy (beside them joules, where a sensor counts them): the way that needs
    fewer at the same tokens a second is the better one.
    """
    counting = [sensor for sensor in find_sensors() if sensor.read().joules is not None]
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in _PACES}
    for number in range(bench.runs):
        for name, policy in _PACES.items():  # taken in turns: what else the machine does falls on all of them
            for figure, value in _paced(bench, PowerPolicy(**policy), name != "full", number, counting).items():
                figures[name].setdefault(figure, []).append(value)
    return {name: {figure: _spread(values) for figure, values in told.items()} for name, told in figures.items()}


def _paced(bench: Bench, policy: PowerPolicy, hot: bool, number: int, counting: Sequence[Sensor]) -> dict[str, float]:
    """Sixteen requests under a policy: tokens a second, processor time and energy for each."""
    governor = Governor([SimulatedSensor(Level.SERIOUS if hot else Level.NOMINAL)], policy)
    requests = [Request(prompt_tokens=job.prompt, sampling=greedy(job)) for job in bench.jobs(16, 40, _STEPS, number)]
    with Engine.load(bench.model, runner=bench.runner, max_batch=16, governor=governor) as engine:
        engine.run(requests[:1])
        begin, before = time.process_time(), sum(sensor.read().joules or 0.0 for sensor in counting)
        report = engine.run(requests)
        spent, joules = time.process_time() - begin, sum(sensor.read().joules or 0.0 for sensor in counting) - before
    told = {
        "tokens_per_s": report.output_tokens / report.wall_s,
        "processor_ms_per_token": 1e3 * spent / report.output_tokens,
    }
    return {**told, "joules_per_token": joules / report.output_tokens} if counting else told


def page(bench: Bench) -> dict[str, Any]:
    """The page over `shoal serve`: from the click until eight agents have ended on the screen, and what that costs."""
    from shoal.bench.page import measure_page  # here: it needs the server

    return measure_page(bench.model, bench.runner, bench.runs)


_ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def _chain(count: int) -> Graph:
    made = Graph("Rules that all have in common.")
    last = made.add(Agent("a", task="Begin", sampling=_ONE))
    for i in range(count - 1):
        last = made.add(Agent("a", task=f"Go on {i}", sampling=_ONE), after=last)
    return made


def _fan(count: int) -> Graph:
    made = Graph("Rules that all have in common.")
    parts = made.map(Agent("w", task="Write {item}", sampling=_ONE), over=list(range(count - 2)))
    made.add(Agent("end", task="Sum up", sampling=_ONE), after=parts)
    return made


def _add(loop: StepLoop, name: str, job: Job) -> RequestState:
    request = Request(prompt_tokens=job.prompt, sampling=greedy(job))
    return loop.add(name, loop.inputs.prepare(request), _ignore)


def _ignore(event: Event) -> None:  # noqa: ARG001 - a sink's face
    return


def _spread(values: Sequence[float]) -> str:
    """The median, and the range without the extremes where there are five values or more."""
    return quoted(Figure(**summary(values)))  # type: ignore[arg-type]


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "scheduler": scheduler,
    "sampling": sampling,
    "second": second,
    "distinct": distinct,
    "masks": masks,
    "graph": graph,
    "pace": pace,
    "page": page,
}
