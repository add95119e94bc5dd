"""Imports point one way, and importing the package imports no backend."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
BASE = {"types", "errors", "plan", "config"}
ENGINE = {
    "sampling",
    "grammar",
    "intake",
    "record",
    "loop",
    "mailbox",
    "handles",
    "running",
    "state",
    "watchdog",
    "engine",
}
MAY_SEE = {
    "errors": set(),
    "types": {"errors", "plan"},
    "plan": set(),
    "config": {"errors", "types"},
    "core": BASE,
    "sampling": BASE | {"grammar"},
    "grammar": BASE | {"schema"},
    "schema": BASE,
    "models": BASE,
    "runners": BASE | {"models"},
    "power": BASE,
    **{name: BASE | ENGINE | {"core", "power", "runners.base"} for name in ENGINE - {"sampling", "grammar"}},
    "loading": BASE | ENGINE | {"models", "runners"},
    "aio": BASE | {"engine", "handles", "running"},
    "agents": BASE | ENGINE | {"aio", "remote"},
    "bench": BASE | ENGINE | {"aio", "agents", "core", "loading", "models", "runners"},
}
LAZY = {("engine", "loading"), ("engine", "state")}
"""Imported inside a function, so that they load only when used: they see the engine, and it calls them."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def seen_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoal."):
            found.add(node.module.removeprefix("shoal."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("shoal.") for alias in node.names if alias.name.startswith("shoal.")}
    return found


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_a_module_sees_only_what_lies_below_it(name: str, path: Path) -> None:
    part = name.split(".")[0]
    if part not in MAY_SEE:
        return
    for other in seen_by(path):
        below = other.split(".")[0]
        allowed = below == part or below in MAY_SEE[part] or other in MAY_SEE[part] or (part, below) in LAZY
        assert allowed, f"{name} imports {other}"


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_nothing_sees_the_server_or_the_command_line(name: str, path: Path) -> None:
    part = name.split(".")[0]
    for other in seen_by(path):
        below = other.split(".")[0]
        assert below != "cli" or part == "cli", f"{name} imports {other}"
        assert below != "server" or part in ("server", "cli"), f"{name} imports {other}"


def test_importing_the_package_imports_no_backend() -> None:
    code = "import sys, shoal; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"openvino", "mlx", "torch", "transformers", "tokenizers", "huggingface_hub", "fastapi", "rich", "jinja2"}
    assert not heavy & set(loaded)
