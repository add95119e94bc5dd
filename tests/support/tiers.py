"""Engines whose KV outlives them: loops on the toy model that share a directory, and disks that misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.audit import check_integrity
from shoal.core.tiers import Digest
from shoal.engine.inflight import RequestState
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.disk import DiskTier
from shoal.engine.kv.files import KVFiles
from shoal.engine.kv.host import HostTier
from shoal.engine.kv.tiering import Tiering
from shoal.engine.loop import StepLoop
from shoal.runners.base import Runner
from shoal.runners.fake import FakeRunner
from shoal.types import Event, Namespace, Receipt, Request, Result, SamplingParams
from tests.support.engines import toy_loop

SIZE = 8


class Lab:
    """One engine's life: a loop on the toy model with tiers. Everybody is told the same tokens as without tiers."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        host: int | None = None,
        blocks: int = 64,
        files: KVFiles | None = None,
        quota: int = 1 << 20,
        runner: Runner | None = None,
        **settings: object,
    ) -> None:
        self.runner: Runner = runner or FakeRunner(num_blocks=blocks, block_size=SIZE, keep_plans=True)
        self.loop: StepLoop = toy_loop(self.runner, **settings)
        access = self.runner.access
        assert access is not None
        if path is not None:
            files = KVFiles(path, access.identity, {"model": "fake"}, quota)
        buffers = Buffers(access.block_bytes, 1 << 16 if host is None else 0)
        self.disk = DiskTier(files, buffers) if files is not None else None
        kept = HostTier(host) if host is not None else None
        self.tiers = Tiering(self.loop.scheduler, access, kept, self.disk, buffers)
        self.loop.tiering = self.tiers
        self.idle_steps = 0  # that computed nothing while somebody ran

    def add(
        self, prompt: Sequence[int], max_tokens: int = 4, *, namespace: Namespace | None = None, **fields: object
    ) -> tuple[RequestState, list[Event]]:
        events: list[Event] = []
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            prompt_tokens=tuple(prompt),
            sampling=sampling,
            namespace=namespace or Namespace(),
            **fields,  # type: ignore[arg-type]
        )
        return self.loop.add(f"r{self.loop._next_id}", self.loop.inputs.prepare(request), events.append), events

    def step(self) -> None:
        ran = len(self.loop.scheduler.running)
        record = self.loop.step()
        if record is None and ran and len(self.loop.scheduler.running) == ran:
            self.idle_steps += 1
        check_integrity(self.loop.scheduler)
        if record is None and not self.loop.idle:
            time.sleep(0.001)

    def drain(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.loop.idle:
            assert time.monotonic() < end, "the loop does not come to an end"
            self.step()

    def ask(
        self, prompt: Sequence[int], max_tokens: int = 4, *, namespace: Namespace | None = None
    ) -> tuple[tuple[int, ...], Receipt]:
        """Tokens and receipt of one request, run to its end; then all of it is copied out."""
        _, events = self.add(prompt, max_tokens, namespace=namespace)
        self.drain()
        self.settle()
        result = events[-1].result
        assert isinstance(result, Result)
        return result.tokens, result.receipt

    def result_of(self, prompt: Sequence[int], sampling: SamplingParams, name: str) -> Result:
        """The result of one request with these parameters, run to its end."""
        events: list[Event] = []
        request = Request(prompt_tokens=tuple(prompt), sampling=sampling)
        self.loop.add(name, self.loop.inputs.prepare(request), events.append)
        self.drain()
        result = events[-1].result
        assert result is not None
        return result

    def settle(self) -> None:
        """Copy out what is to be, and wait until the disk has it."""
        while self.loop.copy_out():
            pass
        if self.disk is not None:
            self.disk.flush(60.0)

    def close(self) -> None:
        self.loop.close()


def alone(prompt: Sequence[int], max_tokens: int = 4, **runner: object) -> tuple[int, ...]:
    """What the toy model writes when nothing is kept."""
    loop = toy_loop(FakeRunner(block_size=SIZE, **runner), prefix_sharing=False)  # type: ignore[arg-type]
    events: list[Event] = []
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    loop.add("r", loop.inputs.prepare(Request(prompt_tokens=tuple(prompt), sampling=sampling)), events.append)
    while not loop.idle:
        loop.step()
    result = events[-1].result
    assert result is not None
    return result.tokens


class BadFiles(KVFiles):
    """A directory whose disk is full, slow, stuck or gone, as it is told.

    `error` is raised by every write and read; `slow_s` is slept in each, and the time that its bytes take at `rate`
    bytes a second; while `stuck` is set, nothing returns. `threads` are those that waited for it.
    """

    error: OSError | None = None
    slow_s = 0.0
    rate = float("inf")

    def __init__(self, path: Path, identity: str, quota: int = 1 << 20) -> None:
        super().__init__(path, identity, {"model": "fake"}, quota)
        self.stuck = threading.Event()
        self.freed = threading.Event()
        self.asked = 0
        self.threads: set[int] = set()

    def free(self) -> None:
        self.stuck.clear()
        self.freed.set()

    def write(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        self._suffer(data.nbytes)
        super().write(digest, data)

    def read(self, digest: Digest, buffers: Buffers) -> NDArray[np.uint8] | None:
        self._suffer(0)
        data = super().read(digest, buffers)
        time.sleep((0 if data is None else data.nbytes) / self.rate)
        return data

    def _suffer(self, size: int) -> None:
        self.asked += 1
        self.threads.add(threading.get_ident())
        time.sleep(size / self.rate)
        if self.stuck.is_set():
            self.freed.wait(60.0)
        time.sleep(self.slow_s)
        if self.error is not None:
            raise self.error
