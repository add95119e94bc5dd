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
BASE = {"types", "errors", "checks", "config", "names", "processes", "splitmix", "wire"}
MAY_SEE = {
    "checks": set(),
    "errors": set(),
    "names": set(),
    "processes": set(),
    "splitmix": set(),
    "wire": {"errors"},
    "types": {"checks", "errors", "names"},
    "config": {"checks", "errors", "names", "types"},
    "core": BASE | {"runners.plan"},
    "sampling": BASE,
    "models": BASE,
    "runners": BASE | {"models"},
    "power": BASE,
    "engine": BASE | {"core", "sampling", "models", "runners", "power"},
    "diagnostics": BASE | {"core", "sampling", "models", "runners", "engine"},
    "agents": BASE | {"sampling", "runners.plan", "engine"},
    "server": BASE | {"core", "sampling", "models", "runners", "power", "engine", "agents"},
    "cluster": BASE | {"core", "sampling", "models", "runners", "power", "engine", "agents", "server"},
    "bench": BASE | {"core", "sampling", "models", "runners", "power", "engine", "agents"},
}
"""What each folder of the package may import: only what lies below it, so that no circle crosses a folder."""


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
        allowed = below in (part, "__version__") or below in MAY_SEE[part] or other in MAY_SEE[part]
        assert allowed, f"{name} imports {other}"


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_nothing_sees_the_server_or_the_command_line(name: str, path: Path) -> None:
    part = name.split(".")[0]
    for other in seen_by(path):
        below = other.split(".")[0]
        assert below != "cli" or part == "cli", f"{name} imports {other}"
        assert below != "server" or part in ("server", "cluster", "cli"), f"{name} imports {other}"
        assert below != "cluster" or part in ("cluster", "cli"), f"{name} imports {other}"


def test_no_class_name_stands_twice() -> None:
    seen: dict[str, str] = {}
    for module, path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen, f"{node.name} stands in {seen[node.name]} and in {module}"
                seen[node.name] = module


def loaded_by(code: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after some code."""
    told = f"import sys; {code}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_nothing_and_an_engine_no_backend() -> None:
    assert not {"numpy", "asyncio", "msgspec", "dataclasses"} & loaded_by("import shoal")
    heavy = {"openvino", "mlx", "torch", "transformers", "tokenizers", "huggingface_hub", "fastapi", "rich", "jinja2"}
    everything = loaded_by("import shoal; [getattr(shoal, name) for name in shoal.__all__ if name != 'RemoteEngine']")
    assert "numpy" in everything
    assert not heavy & everything
