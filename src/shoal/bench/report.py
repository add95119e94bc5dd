"""From a result to a page with its plots. The same result gives the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench import tables
from shoal.bench.plots import PLOTS
from shoal.bench.results import Results

PAGE = "benchmarks.md"
_SOURCE = "<!-- Made by `shoal bench report {path}{others}` ({digest}). Do not edit. -->"


def markdown(results: Results, path: str, others: Sequence[Results] = ()) -> str:
    """The whole page; `path` is how it names the result. `others`: what else was measured, its tables at the end."""
    parts = [
        _SOURCE.format(path=path, others=" --others" if others else "", digest=results.digest),
        "# Benchmarks",
        _introduction(results, path),
        *_sections(results),
        *([] if results.levels("cold") else ["## Cold and warm", tables.cold(results)]),
        "## The same outputs",
        tables.equality(results),
        "## How it was measured",
        _method(results),
        "## Configurations",
        _configurations(results),
        *(part for other in others for part in _other(other)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def beside(path: Path) -> list[Results]:
    """The other results in the folder of the one at `path`, by name."""
    return [Results.read(other) for other in sorted(path.parent.glob("*.json")) if other != path]


def _other(results: Results) -> list[str]:
    """Another result's tables, a level deeper, without plots."""
    told = results.document
    return [
        f"## Also measured: {', '.join(dict.fromkeys(level['scenario'] for level in told['levels']))}. "
        f"{tables.subject(results)}",
        f"```sh\n{told['command']}\n```",
        _machine(told["machine"]),
        tables.said_pairs(results),
        *(re.sub("^## ", "### ", part) for part in _sections(results) if not part.startswith("![")),
        _configurations(results),
    ]


def measured(results: Results) -> str:
    """The tables of what was measured, for a terminal."""
    return "\n\n".join(part for part in _sections(results) if not part.startswith("!["))


def _sections(results: Results) -> list[str]:
    return [
        *_section(results, "scaling", "Streams", tables.scaling(results), ("scoreboard", "scaling")),
        *_precisions(results),
        *_section(results, "burst", "Burst", tables.burst(results), ("burst",)),
        *_section(results, "fanout", "Fan-out", tables.fanout(results), ("fanout",)),
        *_section(results, "uneven", "Prompts of different lengths", tables.plain(results, "uneven")),
        *_section(results, "staggered", "Staggered arrivals", tables.plain(results, "staggered")),
        *_section(results, "mixed", "A long prompt joins", tables.plain(results, "mixed")),
        *_section(results, "agents", "A graph of agents", tables.agents(results)),
        *_section(results, "overhead", "Overhead", tables.overhead(results)),
        *_section(results, "company", "Beside a busy process", tables.company(results)),
        *_section(results, "serve", "Over HTTP", tables.serve(results)),
        *_section(results, "cold", "Cold and warm", tables.cold(results)),
        *_section(results, "sustained", "A load that lasts", tables.sustained(results), ("sustained",)),
    ]


def write(path: Path, out: Path, name: str | None = None, others: Sequence[Results] = ()) -> list[Path]:
    """Write the page and its plots into the folder `out`, from the result at `path`, which the page calls `name`.

    Gives the files written. Raises `BenchmarkError` for a file that is no result.
    """
    results = Results.read(path)
    images = out / "img"
    images.mkdir(parents=True, exist_ok=True)
    written = []
    for plot, draw in PLOTS.items():
        target = images / f"bench-{plot}.svg"
        if draw(results, target):
            written.append(target)
        else:
            target.unlink(missing_ok=True)
    (out / PAGE).write_text(markdown(results, name or str(path), others), "utf-8")
    return [*written, out / PAGE]


def _section(results: Results, scenario: str, title: str, body: str, plots: Sequence[str] = ()) -> list[str]:
    if not results.levels(scenario):
        return []
    drawn = [f"![{plot}](img/bench-{plot}.svg)" for plot in plots if tables.drawable(results, plot)]
    return [f"## {title}", _ABOUT[scenario], body, *drawn]


def _precisions(results: Results) -> list[str]:
    body = tables.precisions(results)
    said = (
        "The same engine on several files of one model: fewer bytes a token, and one reading for more rows, multiply."
    )
    return ["## Precision and batch", said, body] if body else []


def _introduction(results: Results, path: str) -> str:
    told, model = results.document, results.document["model"]
    parts = [
        f"Measured {told['when'][:10]} with one command, all in one run of {told.get('took_s', 0) / 60:.0f} minutes:",
        f"```sh\n{told['command']}\nshoal bench report {path}\n```",
        _machine(told["machine"]),
        f"Model: {model['name']}, `{model['file']}`, SHA-256 `{model['sha256']}`.",
        _READING,
    ]
    if told["quick"]:
        parts.insert(
            2, "**This is a quick run: an eighth of the tokens, to try the path out. Its figures say nothing.**"
        )
    throttled = sum(result["throttled"] for level in told["levels"] for result in level["results"].values())
    relative = [f"{level['scenario']} {level['level']}" for level in told["levels"] if level.get("relative")]
    if throttled:
        parts.append(
            f"{throttled} runs were throttled (the machine was slower than at the start); they are not quoted"
            + (f", but in {', '.join(relative)}." if relative else ".")
        )
    if relative:
        parts.append(
            "There the machine was never fit for long enough: others used it. Systems ran in turns, so that ratios "
            "hold; rows with ~ are absolute numbers of that hour."
        )
    return "\n\n".join(parts)


def _machine(machine: Mapping[str, Any]) -> str:
    measured = [f"{machine['read_bytes_per_s'] / 1e9:.0f} GB/s read"]
    for name in ("f32", "bf16"):
        rate = machine[f"gemm_{name}_ops_per_s"]
        if rate is not None:
            measured.append(f"{rate / 1e9:.0f} GFLOP/s in {name}")
    return (
        f"Machine: {machine['cpu']}, {machine['threads']} of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {', '.join(machine['features'])}; {machine['system']}. "
        f"Measured on the spot: {', '.join(measured)}; load {machine['load']:.2f} when it began."
    )


_READING = """Figures are medians, of five or more runs with the highest and the lowest left out; ranges stand in
brackets. Absolute numbers are this machine's; compare ratios. *Ceiling* is what the machine could give at best with
this file, bytes over bandwidth or operations over the peak of matrix products, whichever takes longer; *of ceiling*
is the share of it that was reached (`bench/ceiling.py`)."""

_METHOD = """- Every system runs in a process of its own, one at a time, half a second after the one before. Within
  a level they take turns, in an order that turns around from round to round, and each round has prompts that no
  cache has seen.
- All get the same token ids, the same number of tokens to write (greedy, end tokens ignored) and the same threads.
- Before and after each run a small matrix product must take no more than {slowest:.2f} times its baseline
  ({baseline_ms:.2f} ms); else the next run waits. It waited {waits:.0f} times, {waited_s:.0f} s in all. A run that
  began or ended on a slower machine is marked as throttled and not quoted.
- A system whose runs are long does fewer of them, at least two; n tells how many.
- KL is the mean divergence in nats from exact float32 arithmetic over the file's own weights, on 512 tokens of
  English; top-1 is how often the most likely token is the same. OpenVINO GenAI's pipeline tells no logits: its
  figures are those of the model that it makes of the file, run beside it.
- *8 bits* is the same model requantised to Q8_0 by llama.cpp, whose kernels for it are faster than those for Q4_1;
  GenAI's conversion of Q4_1 loses too much (see its KL)."""


def _method(results: Results) -> str:
    gate, levels = results.document["gate"], results.document["levels"]
    lines = [_METHOD.format(slowest=1 + gate["margin"], **gate)]
    runs = [run for level in levels for result in level["results"].values() for run in result["runs"]]
    if not any("joules" in run for run in runs):
        why = results.document["machine"].get("energy", {}).get("not_readable", {})
        told = "; ".join(f"{name}: {cause}" for name, cause in why.items())
        lines.append(f"- Energy is not readable here{f' ({told})' if told else ''}.")
    lines += [f"- Without `{key}`: {why}." for key, why in results.document["missing"].items()]
    return "\n".join(lines)


def _configurations(results: Results) -> str:
    lines = []
    for system in results.systems.values():
        if "configuration" in system:
            lines.append(f"- **{system['label']}** (`{system['file']}`): `{json.dumps(system['configuration'])}`")
    return "\n".join(lines)


_ABOUT = {
    "scaling": """Prompts of 40 tokens, 64 tokens out, all at once. Tokens a second while all decode; prefill is four
prompts of 512 tokens.""",
    "burst": "16 requests of 1,000 to 1,075 prompt tokens that share nothing, 128 tokens out, all at once.",
    "fanout": """Eight branches of a shared trunk that the engine has not seen, 20 tokens of their own, 32 out.
llama.cpp's server computes each slot's prompt by itself; *copied by hand* is what a caller that knows it can do.""",
    "cold": "One request, eight prompts at once, eight agents on one beginning; the files are in the page cache.",
    "uneven": "Prompts of 64 to 95 tokens that arrive at once, 96 tokens out.",
    "staggered": "16 requests of 200 to 400 prompt tokens, 64 out, that arrive at random, 4 a second.",
    "mixed": """Eight streams of 200 tokens decode; after 0.3 s a prompt of 4,000 tokens joins. The worst gap is the
longest that any of the eight waits for a token.""",
    "agents": """A planner, three writers, a reviewer and an editor on a shared beginning: as a graph in the engine, as
independent requests without sharing, and one after another. They write 48 tokens each, the writers 192.""",
    "overhead": "The whole engine against a static batch of eight by hand over the same runner, in the same process.",
    "company": """One stream and eight beside one busy process: of this scheduling group (session) or another, with nice
0 or 19. On all threads and on one.""",
    "sustained": """Bursts of 200 prompt tokens and 128 out, one after another without a pause, eight together or one at
a time. Throttled is what stays for five seconds below nine tenths of the rate of the first five; after the load the
calibration kernel tells when the machine is as quick as before.""",
    "serve": "The same requests in process and through `shoal serve`, whose client runs on the same cores.",
}
