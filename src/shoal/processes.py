"""This process and others: what it holds, and whether one that left something behind still lives.

Ids are reused, so a process is named with its beginning.
"""

from __future__ import annotations

import os

import psutil  # type: ignore[import-untyped, unused-ignore]

_this = psutil.Process()


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


def process_mb() -> float:
    """Memory that this process holds, in 10**6 bytes: weights, all KV, the interpreter, everything."""
    return round(float(_this.memory_info().rss) / 1e6, 1)


def kv_mb(bytes_per_token: int, tokens: int) -> float:
    """KV of so many tokens, in 10**6 bytes."""
    return round(bytes_per_token * tokens / 1e6, 6)
