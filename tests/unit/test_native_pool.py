"""The native runner's pool of threads, without the rest of it: one that is held anywhere spoils no later run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="holds threads by signals")
def test_a_thread_held_while_it_ends_a_run_does_not_touch_the_next(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "scripts" / "native_build.py")
    assert spec is not None
    assert spec.loader is not None
    native_build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native_build)
    cxx = native_build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    csrc = native_build.ROOT / "csrc"
    sources = [str(ROOT / "tests" / "support" / "pool_held.cpp"), str(csrc / "pool.cpp")]
    program = tmp_path / "pool_held"
    native_build.run([*cxx, "-std=c++20", "-O2", f"-I{csrc}", *sources, "-pthread", "-o", str(program)])
    done = subprocess.run([str(program), "200"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout or "a run did not end"
