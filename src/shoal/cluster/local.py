"""A cluster on this machine, for commands that try one out: replicas as processes, and a door before them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shoal.cluster.config import ClusterConfig
from shoal.cluster.door import open_door
from shoal.cluster.engine import ClusterEngine
from shoal.cluster.links import ReplicaLink
from shoal.cluster.processes import ReplicaProcess
from shoal.runners.plan import ModelSpec

_WELL_S = 60.0  # that replicas may take to answer a new door


class LocalCluster:
    """Starts replicas of one model and ends them, and only them. Usable in `with`.

    `door` is the engine before them, `spec` what they say of their model.
    """

    def __init__(
        self,
        model: str,
        replicas: int,
        settings: Mapping[str, Any],
        *,
        link: type[ReplicaLink] = ReplicaLink,
        silence_s: float = 30.0,
        quiet: bool = False,
    ) -> None:
        """`settings` are those of each replica's engine; `quiet`: what replicas log is not seen."""
        self._model = model
        self._settings = dict(settings)
        self._link = link
        self._quiet = quiet
        self._config = ClusterConfig(model=model, engine={"max_batch": 4}, silence_s=silence_s)
        self.processes: dict[str, ReplicaProcess] = {}
        try:
            for name in [f"replica-{number}" for number in range(replicas)]:
                self.processes[name] = self._start(name)
            self.spec = asyncio.run(self._card())
            self.door = self.open()
        except BaseException:
            self._stop()
            raise

    def _start(self, name: str, port: int = 0) -> ReplicaProcess:
        return ReplicaProcess(name, self._model, self._settings, port, quiet=self._quiet)

    async def _card(self) -> ModelSpec:
        link = ReplicaLink("first", next(iter(self.processes.values())).url, None)
        try:
            return await link.card()
        finally:
            await link.close()

    def open(self, *names: str) -> ClusterEngine:
        """Another door to the same replicas, or to these; returns when it knows that they are well."""
        door = open_door(self._config, self.spec)
        there = names or tuple(self.processes)
        door.connect({name: self._link(name, self.processes[name].url, None) for name in there})
        door.wait_until_well(len(there), _WELL_S)
        return door

    def wait(self) -> None:
        """Until the door knows that all replicas are well."""
        self.door.wait_until_well(len(self.processes), _WELL_S)

    def restart(self, name: str) -> None:
        """Another process in the place of one that is gone, and wait until the door knows it."""
        gone = self.processes[name]
        gone.stop()
        self.processes[name] = self._start(name, gone.port)
        self.wait()

    def _stop(self) -> None:
        for process in self.processes.values():
            process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.door.close()
        self._stop()
