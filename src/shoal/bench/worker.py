"""A system in a process of its own: what runs there, and the harness's end of the pipe.

One JSON document a line, `{"op": ..., ...}` there and the answer, or `{"error": ...}`, back. Whatever a library prints
goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from shoal.bench.machine import Energy, Memory
from shoal.bench.systems import system_class
from shoal.bench.systems.base import Measured, Setup, System
from shoal.bench.timeline import RunTimes
from shoal.bench.workloads import Job
from shoal.errors import BenchmarkError, ShoalError
from shoal.models.oracle import mean_kl


class Worker:
    """The harness's end: one process with one system in it. Killed when it does not answer in time."""

    def __init__(self, kind: str, source: Measured) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "shoal.bench.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"bench-{kind}", daemon=True).start()
        paths = {"path": str(source.path), "cache_dir": str(source.cache_dir)}
        try:
            self.ask("open", kind=kind, source={**asdict(source), **paths})
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the process ended

    def ask(self, op: str, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        """One call. BenchmarkError with what the system said when it fails, dies, or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise BenchmarkError(f"{self.kind} did not answer in {timeout_s:g} s", value=op, limit=timeout_s) from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(f"the process of {self.kind} ended", value=self._process.poll())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self.kind}: {answer['error']}", value=op)
        return answer

    def prepare(self, setup: Setup) -> float:
        """Make ready; the seconds that took."""
        return float(self.ask("prepare", setup=asdict(setup))["seconds"])

    def run(self, jobs: Sequence[Job]) -> RunTimes:
        """One run."""
        return RunTimes.from_json(self.ask("run", jobs=[asdict(job) for job in jobs]))

    def kill(self) -> None:
        """End the process now, and the server that it may have started: nobody else would."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """Let it end; kill it when it does not."""
        with contextlib.suppress(BenchmarkError):
            self.ask("close", timeout_s=30)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Inside:
    """The other end: answers calls about one system."""

    def __init__(self) -> None:
        self._system: System | None = None
        self._energy = Energy()
        self._calls: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "prepare": self.prepare,
            "run": self.run,
            "describe": self.describe,
            "fidelity": self.fidelity,
            "close": self.close,
        }

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one call."""
        fields = {name: value for name, value in call.items() if name != "op"}
        return self._calls[call["op"]](**fields)

    @property
    def system(self) -> System:
        """What `open` made."""
        assert self._system is not None, "open comes first"
        return self._system

    def open(self, kind: str, source: Mapping[str, Any]) -> dict[str, Any]:
        """Make the system."""
        made = Measured(**{**source, "path": Path(source["path"]), "cache_dir": Path(source["cache_dir"])})
        self._system = system_class(kind)(made)
        return {}

    def prepare(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare for a workload, timed."""
        begin = time.perf_counter()
        self.system.prepare(Setup(**setup))
        return {"seconds": time.perf_counter() - begin}

    def run(self, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One run, with its peak memory and energy."""
        pid = self.system.pid
        memory = None if pid is None else Memory(pid)
        if memory is not None:
            memory.restart()
        before = self._energy.joules()
        timeline = self.system.run([Job(**{**job, "prompt": tuple(job["prompt"])}) for job in jobs])
        after = self._energy.joules()
        timeline.peak_bytes = None if memory is None else memory.peak()
        timeline.joules = after - before if before is not None and after is not None and after >= before else None
        return timeline.to_json()

    def describe(self) -> dict[str, Any]:
        """Settings."""
        return {"configuration": self.system.describe()}

    def fidelity(self, exact: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Mean divergence from the exact logits in the file `exact`, and how often the best token is the same."""
        rows = self.system.logits(tokens)
        reference = np.load(exact)
        top1 = float(np.mean(reference.argmax(-1) == rows.argmax(-1)))
        return {"mean_kl": mean_kl(reference, rows), "top1": top1}

    def close(self) -> dict[str, Any]:
        """Close the system."""
        if self._system is not None:
            self._system.close()
            self._system = None
        return {}


def serve(calls: TextIO, answers: TextIO) -> None:
    """Answer until `close` or the end of the calls."""
    inside = Inside()
    for line in calls:
        call = json.loads(line)
        try:
            answer = inside.answer(call)
        except (ShoalError, OSError, RuntimeError, ValueError, MemoryError, ImportError, AttributeError) as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if call["op"] == "close":
            break


def main() -> None:
    """Keep standard output for the answers; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
    os._exit(0)  # a peer's threads may not know how to end


if __name__ == "__main__":
    main()
