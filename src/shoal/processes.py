"""Whether a process that left something behind still lives. Ids are reused: a process is named with its beginning."""

from __future__ import annotations

import os

import psutil  # type: ignore[import-untyped, unused-ignore]


def this_process() -> str:
    """This process, told apart from a later one of the same id: "ID-SECONDS", without any other hyphen."""
    return f"{os.getpid()}-{int(psutil.Process().create_time())}"


def is_alive(name: str) -> bool:
    """Whether the process that `this_process` named lives, on this host. False for a name of another form."""
    pid, _, began = name.partition("-")
    try:
        return bool(abs(psutil.Process(int(pid)).create_time() - int(began)) < 2)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True
