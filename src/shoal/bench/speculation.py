"""What speculation gains: the same work with it and without, in turns.

Real texts on the model under measurement; on a random-weight shape, whose own text means nothing, the texts that the
real model wrote are forced, so that its passes cost what they cost and its drafts are right as often as real ones.
The two engines write the same tokens, which is checked, so that times can be compared.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.bench.hindsight import WrittenText, step_costs
from shoal.bench.shapes import write_shape
from shoal.bench.workloads import TEXT
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.loading import make_runner, open_model
from shoal.errors import BenchmarkError
from shoal.models import Store
from shoal.models.files import local_files
from shoal.runners.base import BlockAccess, Runner
from shoal.runners.plan import ModelSpec, SeqId, StepOutput, StepPlan, Want
from shoal.types import Namespace, Request, Result, SamplingParams

Tell = Callable[[str], None]
_SHAPE, _FORMAT = "qwen3-0.6b", "q4_k_m"
_ASKED = {
    "copy": "Repeat the following text exactly, word for word, and write nothing else.\n\n{text}",
    "edit": "Repeat the following text, but write HARBOUR in capital letters wherever it says harbour.\n\n{text}",
    "summary": "Summarise the following text in bullet points. Quote its own words.\n\n{text}",
    "quote": "You are a critic. Judge the following text, and quote three of its sentences word for word.\n\n{text}",
    "story": "Write a long story about a {text}",
}
_HEROES = ("tailor", "ferryman", "cook", "mapmaker", "night watchman", "gardener", "bell founder", "clerk")


@dataclass(frozen=True, slots=True)
class TaskLevel:
    """So many streams of one task at once; `forced` on the random-weight shape. `bar` is times plain."""

    task: str
    streams: int
    bar: float
    forced: bool = False
    output: int = 200
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.task}, {self.streams}{' on ' + _SHAPE if self.forced else ''}"


LEVELS = (
    TaskLevel("copy", 1, 2.2),
    TaskLevel("edit", 1, 1.8),
    TaskLevel("summary", 1, 1.5),
    TaskLevel("quote", 1, 1.1),
    TaskLevel("copy", 4, 1.2),
    TaskLevel("copy", 8, 1.0),
    TaskLevel("copy", 1, 2.4, forced=True),
    TaskLevel("copy", 4, 1.4, forced=True),
    TaskLevel("copy", 8, 1.1, forced=True),
    TaskLevel("story", 1, 0.99, temperature=0.7),
    TaskLevel("story", 8, 0.99, temperature=0.7),
    TaskLevel("story", 32, 0.99, temperature=0.7, output=120),
    TaskLevel("random tokens", 8, 0.99, temperature=100.0, output=100),
)


class Forced:
    """A runner whose most likely token is always the next one of a text: what its passes cost, and no meaning.

    `texts` holds, by prompt, what follows it.
    """

    def __init__(self, runner: Runner, texts: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
        self.inner = runner
        self.spec: ModelSpec = runner.spec
        self.texts = texts
        self._whole: dict[SeqId, tuple[int, ...]] = {}
        self._fed: dict[SeqId, list[int]] = {}

    @property
    def peak_bytes(self) -> int | None:
        """As the runner under it."""
        return self.inner.peak_bytes

    @property
    def access(self) -> BlockAccess | None:
        """As the runner under it."""
        return self.inner.access

    def execute(self, plan: StepPlan) -> StepOutput:
        """One pass; each row's arg-max is replaced by the token of the text."""
        output = self.inner.execute(plan)
        argmax = {}
        for item in plan.sequences:
            if item.start == 0 and item.seq_id not in self._whole:
                self._fed[item.seq_id] = []
            if item.seq_id in self._fed:
                self._fed[item.seq_id] += item.tokens
            if item.want is not Want.ARGMAX:
                continue
            if item.seq_id not in self._whole:
                prompt = tuple(self._fed.pop(item.seq_id))
                self._whole[item.seq_id] = (*prompt, *self.texts[prompt])
            whole, end = self._whole[item.seq_id], item.start + len(item.tokens)
            argmax[item.seq_id] = tuple(whole[end - item.rows + 1 : end + 1])
        return StepOutput(argmax, output.logits, output.top, rows=output.rows)

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Forget these sequences."""
        for seq_id in seq_ids:
            self._whole.pop(seq_id, None)
            self._fed.pop(seq_id, None)
        self.inner.release(seq_ids)

    def close(self) -> None:
        """Close the runner under it."""
        self.inner.close()


@dataclass(slots=True)
class MeasuredLevel:
    """A level's runs: seconds of the steps that only decode, with speculation and without."""

    level: TaskLevel
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    results: list[Result] = field(default_factory=list)  # of all rounds, with speculation
    texts: list[list[WrittenText]] = field(default_factory=list)  # by round

    @property
    def gain(self) -> float:
        """Times plain: the median over rounds, each held against the plain run beside it."""
        return statistics.median(
            plain / with_drafts for plain, with_drafts in zip(self.seconds[False], self.seconds[True], strict=True)
        )


class SpeculationBench:
    """Two engines over one model, with and without speculation, and what they did."""

    def __init__(self, model: str, runner: str, threads: int | None, tell: Tell) -> None:
        self._store, self._tell = Store(), tell
        self._settings: dict[str, Any] = {
            "runner": runner,
            "threads": threads,
            "max_batch": 32,
            "prefix_sharing": False,  # so that forced texts are known by their whole prompts
        }
        self._model = model
        self._text = TEXT.read_text("utf-8")

    def run(self, rounds: int, levels: Sequence[TaskLevel] = LEVELS) -> dict[str, Any]:
        """Measure every level; its document, which `table` prints."""
        found, costs = [], {}
        engines = self._engines(partial(open_model, self._model), None)
        try:
            costs["model"] = step_costs(engines[True], _runner_of(engines[True]), _streams(levels, forced=False))
            for level in levels:
                if not level.forced:
                    found.append(self._level(engines, level, rounds))
            texts = self._texts(engines[False], [level for level in levels if level.forced], rounds)
        finally:
            _close(engines)
        if any(level.forced for level in levels):
            with tempfile.TemporaryDirectory() as folder:
                path = write_shape(Path(folder) / "shape.gguf", _SHAPE, _FORMAT)
                engines = self._engines(None, (path, texts))
                try:
                    costs["shape"] = step_costs(engines[True], _runner_of(engines[True]), _streams(levels, forced=True))
                    found += [self._level(engines, level, rounds, texts) for level in levels if level.forced]
                finally:
                    _close(engines)
        rows = [_document(measured) for measured in found]
        return {"scenario": "speculation", "rounds": rounds, "costs_ms": costs, "levels": rows}

    def _engines(self, opening: Callable[..., Any] | None, forced: Any) -> dict[bool, Engine]:
        engines = {}
        for on in (True, False):
            config = EngineConfig.of(**self._settings, speculation=on)
            if opening is not None:
                opened = opening(config)
                engines[on] = Engine(opened.make_runner, opened.codec, config)
            else:
                path, texts = forced
                engines[on] = Engine(partial(_forced_runner, path, texts, config), None, config)
        return engines

    def _requests(self, level: TaskLevel, number: int) -> list[Request]:
        """The requests of one round; no two rounds share a text or a namespace."""
        rng = random.Random(f"{level.task} {level.streams} {number}")
        space = Namespace(task=f"{level.name} {number}")
        words = self._text.split()
        requests = []
        for stream in range(level.streams):
            sampling = SamplingParams(max_tokens=level.output, temperature=level.temperature, seed=stream)
            if level.task == "random tokens":
                sampling = replace(sampling, ignore_eos=True)
            at = rng.randrange(max(len(words) - 130, 1))
            text = " ".join(words[at : at + 130])
            if level.task == "story":
                text = f"{rng.choice(_HEROES)} and {rng.choice(words)}."
            asked = _ASKED.get(level.task, "{text}").format(text=text)
            requests.append(Request(messages=[{"role": "user", "content": asked}], sampling=sampling, namespace=space))
        return requests

    def _texts(
        self, engine: Engine, levels: Sequence[TaskLevel], rounds: int
    ) -> dict[tuple[int, ...], tuple[int, ...]]:
        """What the real model writes to the forced levels, by prompt."""
        texts = {}
        for level in levels:
            for number in range(rounds):
                requests = self._requests(level, number)
                for request, result in zip(requests, engine.run(requests).results, strict=True):
                    texts[tuple(engine.tokenize(request))] = (*result.tokens, 0)
        return texts

    def _level(
        self,
        engines: Mapping[bool, Engine],
        level: TaskLevel,
        rounds: int,
        texts: Mapping[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> MeasuredLevel:
        measured = MeasuredLevel(level)
        for number in range(rounds):
            requests = self._requests(level, number)
            if texts is not None:
                requests = [_forced(self._tokens(request), request, texts) for request in requests]
            outputs = {}
            for on in (True, False) if number % 2 else (False, True):
                report = engines[on].run(requests)
                for result in report.results:
                    if result.error is not None:
                        raise result.error
                steps = [step for step in report.steps if step.decode_tokens and not step.prefill_tokens]
                measured.seconds[on].append(sum(step.ms for step in steps) / 1e3)
                outputs[on] = [result.tokens for result in report.results]
                if on:
                    measured.results += report.results
                    prompts = [tuple(engines[on].tokenize(request)) for request in requests]
                    measured.texts.append(
                        [WrittenText(p, r.tokens) for p, r in zip(prompts, report.results, strict=True)]
                    )
            if outputs[True] != outputs[False]:
                raise BenchmarkError(f"{level.name}: what was written differs with speculation", value=number)
        self._tell(f"{level.name}: {measured.gain:.2f} times plain, bar {level.bar}")
        return measured

    def _tokens(self, request: Request) -> tuple[int, ...]:
        from shoal.engine.loading import ModelCodec
        from shoal.models import load_tokenizer

        codec = ModelCodec(load_tokenizer(self._store.resolve(self._model)))
        assert request.messages is not None
        return tuple(codec.encode_messages(request.messages))


def _forced_runner(path: Path, texts: Mapping[tuple[int, ...], tuple[int, ...]], config: EngineConfig) -> Runner:
    return Forced(make_runner(local_files("shape", path), config, Store(path.parent)), texts)


def _forced(prompt: tuple[int, ...], request: Request, texts: Mapping[tuple[int, ...], tuple[int, ...]]) -> Request:
    length = len(texts[prompt]) - 1
    return replace(request, messages=None, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=length))


def _runner_of(engine: Engine) -> Runner:
    """What computes an engine's passes, without what forces their texts."""
    runner = engine._loop.runner
    return runner.inner if isinstance(runner, Forced) else runner


def _close(engines: Mapping[bool, Engine]) -> None:
    for engine in engines.values():
        engine.close()


def _streams(levels: Sequence[TaskLevel], *, forced: bool) -> list[int]:
    return sorted({level.streams for level in levels if level.forced is forced})


def _document(measured: MeasuredLevel) -> dict[str, Any]:
    level = measured.level
    receipts = [result.receipt for result in measured.results]
    passes = sum(max(len(text.output) - 1, 0) for group in measured.texts for text in group)
    accepted = sum(receipt.accepted for receipt in receipts)
    return {
        "level": level.name,
        "model": "shape" if level.forced else "model",
        "streams": level.streams,
        "temperature": level.temperature,
        "bar": level.bar,
        "gain": measured.gain,
        "plain_s": measured.seconds[False],
        "drafting_s": measured.seconds[True],
        "drafted": sum(receipt.drafted for receipt in receipts),
        "accepted": accepted,
        "tokens_a_pass": passes / max(passes - accepted, 1),
        "texts": measured.texts,
    }


def table(document: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'workload, streams':28}{'times plain':>12}{'bar':>6}{'tokens a pass':>15}{'drafted':>9}{'right':>7}"]
    for row in document["levels"]:
        lines.append(
            f"{row['level']:28}{row['gain']:12.2f}{row['bar']:6}{row['tokens_a_pass']:15.2f}{row['drafted']:9}"
            f"{row['accepted']:7}"
        )
    for name, costs in document["costs_ms"].items():
        for streams, times in costs.items():
            shown = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in times.items())
            lines.append(f"ms a pass of the {name}, {streams} streams, by rows: {shown}")
    return "\n".join(lines)
