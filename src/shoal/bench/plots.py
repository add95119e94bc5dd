"""The plots of a report, as SVG, by matplotlib (the extra `bench`). The same result gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.bench.results import Results, figure
from shoal.bench.tables import drawable
from shoal.errors import BackendError

_OURS = "#0b7285"
_PEERS = ("#868e96", "#d9480f", "#f59f00", "#7048e8", "#c2255c", "#2f9e44", "#adb5bd", "#1971c2", "#a61e4d")
_SETTINGS = {
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def _drawing(results: Results, target: Path, width: float, height: float, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on; written to `target` afterwards, with the digest of the result in its metadata."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError("matplotlib is not installed", hint="pip install 'shoal[bench]'") from error
    with matplotlib.rc_context(_SETTINGS):
        figure_ = Figure(figsize=(width, height), layout="constrained")
        yield figure_.subplots(1, columns)
        figure_.savefig(
            target, format="svg", metadata={"Date": None, "Creator": "shoal", "Description": results.digest}
        )


def _colours(keys: list[str]) -> dict[str, str]:
    others = [key for key in keys if key != "shoal"]
    return {"shoal": _OURS, **{key: _PEERS[i % len(_PEERS)] for i, key in enumerate(others)}}


def _bars(axes: Any, results: Results, levels: Sequence[Mapping[str, Any]], metric: str) -> None:
    """A group of bars for each level, a bar for each contender that has the figure, with its range."""
    keys = list(dict.fromkeys(key for level in levels for key in level["results"]))
    colours, width = _colours(keys), 0.84 / len(keys)
    for i, key in enumerate(keys):
        found = [(place, f) for place, level in enumerate(levels) if (f := figure(level, key, metric)) is not None]
        places = [place + (i - (len(keys) - 1) / 2) * width for place, _ in found]
        errors = [[f.median - f.low for _, f in found], [f.high - f.median for _, f in found]]
        heights = [f.median for _, f in found]
        label, line = results.label(key), {"lw": 0.7}
        axes.bar(places, heights, width, yerr=errors, label=label, color=colours[key], error_kw=line)
    axes.set_xticks(range(len(levels)), [level["level"] for level in levels])
    axes.figure.legend(loc="outside lower center", ncols=2)


def scoreboard(results: Results, target: Path) -> bool:
    """Decode rate at 1, 2, 4 and 8 streams, bars by system."""
    if not drawable(results, "scoreboard"):
        return False
    levels = [level for level in results.levels("scaling") if level["level"] in ("1", "2", "4", "8")]
    with _drawing(results, target, 7.5, 3.6) as axes:
        _bars(axes, results, levels, "decode_tokens_per_s")
        axes.set_xlabel("streams")
        axes.set_ylabel("tokens/s, all streams")
    return True


def scaling(results: Results, target: Path) -> bool:
    """Decode rate over streams, with what the machine could give."""
    if not drawable(results, "scaling"):
        return False
    levels = [level for level in results.levels("scaling") if level["level"].isdigit()]
    keys = list(dict.fromkeys(key for level in levels for key in level["results"]))
    colours = _colours(keys)
    with _drawing(results, target, 7.5, 3.4) as axes:
        streams = [int(level["level"]) for level in levels]
        best = [level["ceiling"]["decode_tokens_per_s"] for level in levels]
        axes.plot(streams, best, "--", color="black", lw=1, label="ceiling of this machine")
        for key in keys:
            points = [
                (n, f.median)
                for n, level in zip(streams, levels, strict=True)
                if (f := figure(level, key, "decode_tokens_per_s"))
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", ms=3, color=colours[key], label=results.label(key))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(streams, [str(n) for n in streams])
        axes.set_xlabel("streams")
        axes.set_ylabel("tokens/s, all streams")
        axes.legend()
    return True


def burst(results: Results, target: Path) -> bool:
    """When each request of the burst had its first and its last token, by system."""
    level = results.level("burst", "16")
    if level is None or not drawable(results, "burst"):
        return False
    keys = [key for key, result in level["results"].items() if result["spans"] and result["summary"]]
    with _drawing(results, target, 7.5, 0.6 + 0.75 * len(keys)) as axes:
        for row, key in enumerate(reversed(keys)):
            for i, (arrival, first, last) in enumerate(
                sorted(level["results"][key]["spans"], key=lambda span: span[2])
            ):
                at = row + 0.8 * i / len(level["results"][key]["spans"])
                axes.plot([arrival, first], [at, at], color="#ced4da", lw=1)
                axes.plot([first, last], [at, at], color=_OURS if key == "shoal" else _PEERS[0], lw=1.6)
        axes.set_yticks([row + 0.4 for row in range(len(keys))], [results.label(key) for key in reversed(keys)])
        axes.set_xlabel("seconds; grey: waiting for the first token")
    return True


def fanout(results: Results, target: Path) -> bool:
    """Wall time of eight branches by trunk, bars by system and by whether the trunk is shared."""
    if not drawable(results, "fanout"):
        return False
    with _drawing(results, target, 7.5, 4.2) as axes:
        _bars(axes, results, results.levels("fanout"), "wall_s")
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the shared trunk")
        axes.set_ylabel("wall time of eight branches, s")
    return True


def sustained(results: Results, target: Path) -> bool:
    """Tokens a second over time under a load that lasts, by system and by how many run together."""
    if not drawable(results, "sustained"):
        return False
    with _drawing(results, target, 7.5, 3.2) as axes:
        for number, level in enumerate(results.levels("sustained")):
            colours = _colours(list(level["results"]))
            for key, result in level["results"].items():
                label = f"{results.label(key)}, {level['level']} at a time"
                rates = result.get("rates", [])
                axes.plot(range(len(rates)), rates, "-" if not number else ":", lw=1.2, color=colours[key], label=label)
        axes.set_xlabel("seconds of load")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.figure.legend(loc="outside lower center", ncols=2)
    return True


PLOTS: dict[str, Callable[[Results, Path], bool]] = {
    "scoreboard": scoreboard,
    "scaling": scaling,
    "burst": burst,
    "fanout": fanout,
    "sustained": sustained,
}
"""By name; each writes its SVG and is False when the result has nothing to draw for it."""
