"""A log of everything a scheduler was told and decided, and the replay that decides it again.

One JSON document per line: first the model's facts and the settings, then each call in order. A schedule depends on
nothing else (times come from the log), so a replay must plan every step the same; where it does not, the
scheduler has changed since, and the replay says at which step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shoal.config import EngineConfig
from shoal.core.scheduler import Scheduler
from shoal.core.sequence import Sequence
from shoal.core.stop import StopChecker, Verdict
from shoal.errors import ModelFormatError, ShoalError, StoreError
from shoal.runners.plan import ModelSpec, ScheduledSequence, SeqId, StepPlan, Want
from shoal.types import FinishReason, Namespace, SamplingParams

_SEQUENCE_FIELDS = (
    "arrival", "deadline", "greedy", "group", "max_tokens", "path", "prefill_only", "prompt_len", "rank", "scored",
    "seq_id", "timeout", "tokens", "top",
)  # fmt: skip


class RecordingScheduler(Scheduler):
    """A scheduler that writes every call to a log. StoreError when the log cannot be written."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        assert config.record is not None
        super().__init__(spec, config)
        self._path = Path(config.record)
        self._verdicts: list[tuple[SeqId, str | None, bool]] = []
        try:
            self._file: TextIO = self._path.open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        self._write("begin", spec=dataclasses.asdict(spec), config=dataclasses.asdict(config))

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(f"the record cannot be written: {error}", value=str(self._path), hint="give another path")

    def _write(self, kind: str, **fields: Any) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, seq: Sequence) -> None:
        """Log and do."""
        fields = {name: getattr(seq, name) for name in _SEQUENCE_FIELDS}
        self._write("add", **fields, namespace=dataclasses.asdict(seq.namespace))
        seq.checker = _LoggingChecker(seq.checker, seq.seq_id, self._verdicts)
        super().add(seq)

    def abort(
        self, seq_id: SeqId, reason: FinishReason = FinishReason.ABORTED, error: ShoalError | None = None
    ) -> None:
        """Log and do."""
        self._write("abort", seq_id=seq_id, reason=reason)
        super().abort(seq_id, reason, error)

    def schedule(self, now: float) -> StepPlan | None:
        """Do and log the plan."""
        plan = super().schedule(now)
        self._write("schedule", now=now, plan=None if plan is None else dataclasses.asdict(plan))
        return plan

    def commit(self, plan: StepPlan, sampled: Mapping[SeqId, tuple[int, ...]], now: float, ms: float) -> None:
        """Do and log what was sampled and what the stop rules said to it."""
        self._verdicts.clear()
        super().commit(plan, sampled, now, ms)
        tokens = {str(seq_id): list(chosen) for seq_id, chosen in sampled.items()}
        self._write("commit", sampled=tokens, now=now, ms=ms, verdicts=list(self._verdicts))

    def fail_sequence(self, seq_id: SeqId, error: ShoalError) -> None:
        """Log and do."""
        self._write("fail_sequence", seq_id=seq_id, error=str(error))
        super().fail_sequence(seq_id, error)

    def unpin(self, seq_id: SeqId) -> None:
        """Log and do."""
        self._write("unpin", seq_id=seq_id)
        super().unpin(seq_id)

    def defer(self, deferring: bool) -> None:
        """Log and do."""
        self._write("defer", deferring=deferring)
        super().defer(deferring)

    def expect(self, tokens: tuple[int, ...], namespace: Namespace, due: int) -> None:
        """Log and do."""
        self._write("expect", tokens=tokens, namespace=dataclasses.asdict(namespace), due=due)
        super().expect(tokens, namespace, due)

    def cancel_expectation(self, tokens: tuple[int, ...], namespace: Namespace, due: int) -> None:
        """Log and do."""
        self._write("cancel_expectation", tokens=tokens, namespace=dataclasses.asdict(namespace), due=due)
        super().cancel_expectation(tokens, namespace, due)

    def preempt_all(self, *, drop_cached: bool = False) -> None:
        """Log and do."""
        self._write("preempt_all", drop_cached=drop_cached)
        super().preempt_all(drop_cached=drop_cached)

    def share(self, seq: Sequence) -> None:
        """Log and do."""
        self._write("share", seq_id=seq.seq_id)
        super().share(seq)

    def set_max_stall(self, ms: float) -> None:
        """Log and do."""
        self._write("max_stall", ms=ms)
        super().set_max_stall(ms)

    def close(self) -> None:
        """Close the log."""
        self._file.close()


class _LoggingChecker(StopChecker):
    """Passes everything on to a checker and notes its verdicts."""

    __slots__ = ("_checker", "_log", "_seq_id")

    def __init__(self, checker: StopChecker, seq_id: SeqId, log: list[tuple[SeqId, str | None, bool]]) -> None:
        self._checker, self._seq_id, self._log = checker, seq_id, log

    def push(self, token: int) -> Verdict:
        verdict = self._checker.push(token)
        self._log.append((self._seq_id, verdict.reason, verdict.is_output))
        return verdict

    def flush(self) -> str:
        return self._checker.flush()


class _ScriptedChecker(StopChecker):
    """Gives the verdicts of the log."""

    __slots__ = ("script",)

    def __init__(self, script: list[Verdict]) -> None:
        super().__init__(SamplingParams(), (), lambda token: b"")  # noqa: ARG005
        self.script = script

    def push(self, token: int) -> Verdict:  # noqa: ARG002 - the log knows
        return self.script.pop(0)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One line of a replay: a step as it was planned then, and whether it is planned so now.

    `joined` and `left` are the sequences that entered and ended around this step.
    """

    now: float
    ms: float
    plan: StepPlan
    same: bool
    joined: tuple[SeqId, ...]
    left: tuple[tuple[SeqId, str], ...]


def replay(path: Path) -> Iterator[ReplayedStep]:
    """Run a log's schedule again, step by step. StoreError if it cannot be read, ModelFormatError if it is broken."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise StoreError(f"no record can be read: {error}", value=str(path), hint="give what `record` wrote") from error
    try:
        yield from _Replay(json.loads(lines[0])).steps(map(json.loads, lines[1:]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelFormatError(f"the record {path} is broken: {error}", value=str(path)) from error


class _Replay:
    def __init__(self, begin: Mapping[str, Any]) -> None:
        spec = ModelSpec(**begin["spec"])
        self._scheduler = Scheduler(spec, EngineConfig.of(**{**begin["config"], "record": None}))
        self._scripts: dict[SeqId, list[Verdict]] = {}
        self._sequences: dict[SeqId, Sequence] = {}
        self._known: set[SeqId] = set()
        self._planned: tuple[float, StepPlan, bool] | None = None

    def steps(self, entries: Iterator[Mapping[str, Any]]) -> Iterator[ReplayedStep]:
        actions: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "add": self._add,
            "abort": lambda e: self._scheduler.abort(e["seq_id"], FinishReason(e["reason"])),
            "schedule": self._schedule,
            "fail_sequence": lambda e: self._scheduler.fail_sequence(e["seq_id"], ShoalError(e["error"])),
            "expect": lambda e: self._scheduler.expect(tuple(e["tokens"]), Namespace(**e["namespace"]), e["due"]),
            "cancel_expectation": lambda e: self._scheduler.cancel_expectation(
                tuple(e["tokens"]), Namespace(**e["namespace"]), e["due"]
            ),
            "unpin": lambda e: self._scheduler.unpin(e["seq_id"]),
            "defer": lambda e: self._scheduler.defer(e["deferring"]),
            "max_stall": lambda e: self._scheduler.set_max_stall(e["ms"]),
            "preempt_all": lambda e: self._scheduler.preempt_all(drop_cached=e["drop_cached"]),
            "share": lambda e: self._scheduler.share(self._sequences[e["seq_id"]]),
        }
        for entry in entries:
            if entry["kind"] == "commit":
                yield self._commit(entry)
            else:
                actions[entry["kind"]](entry)

    def _add(self, entry: Mapping[str, Any]) -> None:
        fields = {name: entry[name] for name in _SEQUENCE_FIELDS}
        seq_id, tokens, scored = fields.pop("seq_id"), fields.pop("tokens"), fields.pop("scored")
        script: list[Verdict] = []
        namespace = Namespace(**entry["namespace"])
        seq = Sequence(seq_id, tokens, checker=_ScriptedChecker(script), namespace=namespace, **fields)
        seq.scored = scored
        self._scripts[seq_id] = script
        self._sequences[seq_id] = seq
        self._scheduler.add(seq)

    def _schedule(self, entry: Mapping[str, Any]) -> None:
        plan = self._scheduler.schedule(entry["now"])
        logged = None if entry["plan"] is None else _plan(entry["plan"])
        if logged is not None:
            self._planned = (entry["now"], logged, plan == logged)

    def _commit(self, entry: Mapping[str, Any]) -> ReplayedStep:
        assert self._planned is not None
        now, plan, same = self._planned
        for seq_id, reason, is_output in entry["verdicts"]:
            self._scripts[seq_id].append(Verdict("", None if reason is None else FinishReason(reason), is_output))
        sampled = {int(seq_id): tuple(tokens) for seq_id, tokens in entry["sampled"].items()}
        self._scheduler.commit(plan, sampled, entry["now"], entry["ms"])
        joined = tuple(item.seq_id for item in plan.sequences if item.seq_id not in self._known)
        self._known.update(joined)
        left = tuple((p.seq.seq_id, str(p.finish)) for p in self._scheduler.take_progress() if p.finish is not None)
        self._scheduler.take_released()
        return ReplayedStep(now, entry["ms"], plan, same, joined, left)


def _plan(fields: Mapping[str, Any]) -> StepPlan:
    sequences = tuple(
        ScheduledSequence(
            item["seq_id"],
            tuple(item["tokens"]),
            item["start"],
            tuple(item["block_table"]),
            Want(item["want"]),
            item["generated"],
            item["load"],
            item["save"],
            item.get("top", 0),
            item.get("rows", 1),
        )
        for item in fields["sequences"]
    )
    copies = tuple((source, destination) for source, destination in fields["copies"])
    return StepPlan(fields["step"], sequences, copies, fields["chain"])
