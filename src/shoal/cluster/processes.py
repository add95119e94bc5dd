"""Replicas as processes of this machine: what faults are tried on, and what the simulation is held against."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shoal.errors import BackendError

_START_S = 120.0


class ReplicaProcess:
    """One replica in a process of its own, on the loopback. Usable in `with`; ends only what it started."""

    def __init__(
        self, name: str, model: str, settings: Mapping[str, Any], port: int = 0, *, quiet: bool = False
    ) -> None:
        """`port` 0 takes a free one. `quiet`: what it logs is not seen."""
        self.name = name
        order = json.dumps({"model": model, "settings": dict(settings), "port": port})
        command = [sys.executable, "-m", "shoal.cluster.processes", order]
        errors = subprocess.DEVNULL if quiet else None
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.stop()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _wait_for_port(self) -> int:
        out = self._process.stdout
        assert out is not None
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            ready, _, _ = select.select([out], [], [], 0.2)
            if ready and (line := out.readline()).startswith("port "):
                return int(line.split()[1])
        raise BackendError(f"the replica {self.name} did not start", value=self._process.poll(), hint="see its log")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it as the system does when memory runs out, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self._process.poll() is None:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve_replica(model: str, settings: Mapping[str, Any], port: int) -> None:
    """Be a replica until a signal comes; tells its port on standard output."""
    from shoal.cluster.door import hub_of, load_replica
    from shoal.cluster.replica import add_replica
    from shoal.server.config import ServerConfig
    from shoal.server.run import bind, make_server

    listening = bind("127.0.0.1", port)
    engine = load_replica(model, settings)
    config = ServerConfig(api_key=os.environ.get("SHOAL_API_KEY"), drain_s=1.0)

    def ready(port: int) -> None:
        print(f"port {port}", flush=True)

    make_server(hub_of(engine, model), config, listening, ready, mounts=(add_replica,)).run()


if __name__ == "__main__":
    serve_replica(**json.loads(sys.argv[1]))
