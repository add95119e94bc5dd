"""A cluster with the face of one engine: the server, graphs and callers take it as any other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shoal.cluster.links import Link
from shoal.cluster.loop import ClusterLoop
from shoal.cluster.router import Router, RouterConfig
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.inputs import Codec, InputProcessor
from shoal.engine.loop import StepLoop
from shoal.errors import EngineClosedError
from shoal.runners.base import BlockAccess, Runner
from shoal.runners.plan import ModelSpec, SeqId, StepOutput, StepPlan

BLOCK_TOKENS = 32  # where a replica does not say how long its blocks are


class _Elsewhere:
    """Stands where a runner stands; it says what the replicas run."""

    peak_bytes: int | None = None
    access: BlockAccess | None = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def execute(self, plan: StepPlan) -> StepOutput:
        """Never called: there are no steps here."""
        raise AssertionError(f"step {plan.step} of a cluster's door")

    def release(self, seq_ids: Sequence[SeqId]) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """Nothing is held here."""


class ClusterEngine(Engine):
    """Sends requests to replicas of one model. Prompts are made into tokens here, so that the router sees them.

    What the face of an engine has beside requests goes as far as it can: `expect` is a hint that ends here, `prefill`
    computes a prefix on one replica, where it is cached and not pinned.
    """

    def __init__(
        self,
        spec: ModelSpec,
        codec: Codec | None,
        config: EngineConfig | None = None,
        *,
        routing: RouterConfig | None = None,
        silence_s: float = 5.0,
    ) -> None:
        """`spec` and `codec` are the replicas'; a replica that answers nothing for `silence_s` is given up."""
        self._routing = routing or RouterConfig()
        self._silence_s = silence_s
        super().__init__(lambda: _Elsewhere(spec), codec, config)
        self.feed = None  # no blocks lie here

    def _make_loop(self, runner: Runner) -> StepLoop:
        inputs = InputProcessor(runner.spec, self.codec, self.config.seed)
        router = Router(runner.spec.block_size, self._routing)
        self.cluster = ClusterLoop(runner, inputs, router, self._thread.post, self._silence_s)
        return cast(StepLoop, self.cluster)

    def connect(self, links: Mapping[str, Link]) -> None:
        """Use these replicas from now on, and no others."""
        self.cluster.connect(links)

    def describe(self) -> dict[str, Any]:
        """The replicas as they are now: their load, what they hold, what was sent elsewhere."""
        return self.cluster.describe()

    def wait_until_well(self, count: int, timeout_s: float) -> None:
        """Until so many replicas answer. EngineClosedError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while sum(bool(row["well"]) for row in self.describe()["replicas"]) < count:
            if time.monotonic() > end:
                raise EngineClosedError(
                    f"fewer than {count} replicas answer after {timeout_s:g} s", hint="see their logs"
                )
            time.sleep(0.05)
