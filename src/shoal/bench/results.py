"""Result files: read, checked, and looked up. `benchmarks/README.md` describes what stands in one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import BenchmarkError

SCHEMA = 1
_NEEDED = ("schema", "when", "command", "quick", "machine", "model", "gate", "systems", "missing", "levels")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: median of the runs that count, their range, and of how many runs."""

    median: float
    low: float
    high: float
    n: int


class Results:
    """One result document.

    `digest` changes with the file it was read from. Figures are of runs that were not throttled; where none is left,
    there is no figure.
    """

    def __init__(self, document: Mapping[str, Any], digest: str = "") -> None:
        lacking = [name for name in _NEEDED if name not in document]
        if lacking or document["schema"] != SCHEMA:
            raise BenchmarkError(
                "this is no result of `shoal bench`",
                value=lacking or document["schema"],
                limit=SCHEMA,
                hint="see benchmarks/README.md",
            )
        self.document = document
        self.digest = digest

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file. BenchmarkError when it cannot be, or is no result."""
        import hashlib

        try:
            data = path.read_bytes()
            document = json.loads(data)
        except (OSError, ValueError) as error:
            raise BenchmarkError(f"{path} cannot be read: {error}", value=str(path)) from error
        if not isinstance(document, dict):
            raise BenchmarkError(f"{path} is no result of `shoal bench`", value=type(document).__name__, limit="object")
        return cls(document, hashlib.sha256(data).hexdigest()[:16])

    @property
    def systems(self) -> Mapping[str, Any]:
        """What is known of each system, by key."""
        found: Mapping[str, Any] = self.document["systems"]
        return found

    def levels(self, scenario: str) -> list[Mapping[str, Any]]:
        """All levels of a scenario, in the order measured."""
        return [level for level in self.document["levels"] if level["scenario"] == scenario]

    def level(self, scenario: str, name: str) -> Mapping[str, Any] | None:
        """One level, or None when it was not measured."""
        return next((level for level in self.levels(scenario) if level["level"] == name), None)

    def label(self, key: str) -> str:
        """What a contender is called."""
        from shoal.bench.harness import variants_of
        from shoal.bench.systems import named

        system, _, variant = key.partition(":") if not key.startswith("url=") else (key, "", "")
        label = str(self.systems[system]["label"])
        said = variants_of(named(system)).get(variant, variant)
        return f"{label}, {said}" if variant else label

    def figures(self) -> Iterator[tuple[tuple[str, str, str, str], Figure]]:
        """Every figure as ((scenario, level, contender, metric), figure)."""
        for level in self.document["levels"]:
            for key, result in level["results"].items():
                for metric in result["summary"]:
                    found = figure(level, key, metric)
                    assert found is not None
                    yield (level["scenario"], level["level"], key, metric), found


def figure(level: Mapping[str, Any] | None, key: str, metric: str) -> Figure | None:
    """One figure of a level, or None when there is none."""
    if level is None or key not in level["results"]:
        return None
    found = level["results"][key]["summary"].get(metric)
    return None if found is None else Figure(found["median"], found["low"], found["high"], int(found["n"]))


def ratio(level: Mapping[str, Any] | None, metric: str, over: str, under: str) -> float | None:
    """Median of one contender over that of another, or None when either is missing or zero."""
    a, b = figure(level, over, metric), figure(level, under, metric)
    return a.median / b.median if a is not None and b is not None and b.median else None
