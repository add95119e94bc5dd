"""A busy process beside a measurement: what a laptop always has."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_SPIN = "import os, sys\nos.nice(int(sys.argv[1]))\nprint(flush=True)\nwhile True: pass"
BESIDE: dict[str, tuple[bool, int]] = {
    "same group": (False, 0),
    "same group, nice 19": (False, 19),
    "other group": (True, 0),
    "other group, nice 19": (True, 19),
}
"""Kinds of it: whether it has a session, and so on Linux a scheduling group, of its own; its nice value."""


@contextlib.contextmanager
def busy(kind: str) -> Iterator[None]:
    """Keep a process of this kind of `BESIDE` computing; "" is none."""
    if not kind:
        yield
        return
    own_session, nice = BESIDE[kind]
    command = [sys.executable, "-c", _SPIN, str(nice)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        try:
            yield
        finally:
            process.kill()
