"""`shoal trace`: the timeline of a trace, in the terminal and as an HTML page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import print_json, printable
from shoal.errors import StoreError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shoal.agents.trace.summary import CallSummary, TraceSummary
    from shoal.agents.trace.timeline import Bar, Row, Timeline

_WIDTH = 44  # columns of the time axis


def trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `shoal graph run --trace` or `Trace(path)` wrote.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="A second trace, whose numbers are put beside the first's.")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Numbers, of all calls and of each agent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON document.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as one self-contained page there.")] = None,
) -> None:
    """Draw who ran when and who waited for whom: queue, prompt, writing, for each attempt."""
    from rich.console import Console

    from shoal.agents.trace.summary import summarise
    from shoal.agents.trace.timeline import loose, note_text, timelines
    from shoal.agents.trace.trace import read_trace

    records = read_trace(file)
    if html is not None:
        from shoal.agents.trace.page import page

        try:
            html.write_text(page(records, f"Trace {file.name}"), encoding="utf-8")
        except OSError as error:
            raise StoreError(f"the page cannot be written: {error}", value=str(html)) from error
    console = Console(highlight=False)
    if summary or as_json or other is not None:
        told = [summarise(records)] + ([summarise(read_trace(other))] if other is not None else [])
        if as_json:
            print_json([dataclasses.asdict(one) for one in told])
        else:
            _numbers_of(told, [path.name for path in (file, other) if path is not None], console)
        return
    for line in timelines(records):
        draw(line, console)
    for record in loose(records):
        console.print(printable(note_text(record)), markup=False)


def _numbers_of(told: list[TraceSummary], names: list[str], console: Console) -> None:
    """A table of all calls and one of each agent; with two traces theirs in turns, and what changed."""
    from rich.table import Table
    from rich.text import Text

    for one, name in zip(told, names, strict=True):
        graphs = f"{one.graphs} graphs, {one.graphs_per_minute:.1f} a minute, {one.graph_s:.2f} s each (median)"
        console.print(Text(printable(f"{name}: {graphs}")), soft_wrap=True)
    table = Table(
        "agent", *(["trace"] if len(told) > 1 else []), "calls", "ok", "invalid", "hit rate", "latency mean, ms",
        "median", "max", "queue median, ms", "max", "TTFT median, ms", "KV peak, MB", "process, MB", "a minute",
        box=None, pad_edge=False,
    )  # fmt: skip
    agents = list(dict.fromkeys(name for one in told for name in one.agents))
    for agent in [None, *agents]:
        sides = [one.calls if agent is None else one.agents.get(agent) for one in told]
        for number, side in enumerate(sides):
            first = "all" if agent is None else agent
            cells = [printable(first if number == 0 else ""), *([printable(names[number])] if len(told) > 1 else [])]
            table.add_row(*(Text(cell) for cell in [*cells, *_cells(side)]))
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            table.add_row("", "change", *(Text(cell, style="dim") for cell in _changes(sides[0], sides[1])))
    console.print(table)


def _values(side: CallSummary) -> list[float]:
    latency, queue = side.latency_ms, side.queue_ms
    return [
        side.calls, side.ok, side.invalid, side.hit_rate, latency.mean, latency.median, latency.most,
        queue.median, queue.most, side.ttft_ms.median, side.kv_peak_mb, side.process_mb, side.per_minute,
    ]  # fmt: skip


def _cells(side: CallSummary | None) -> list[str]:
    if side is None:
        return []
    counts, rate, rest = _values(side)[:3], side.hit_rate, _values(side)[4:]
    return [*(f"{count:.0f}" for count in counts), f"{rate:.0%}", *(f"{value:.1f}" for value in rest)]


def _changes(before: CallSummary, after: CallSummary) -> list[str]:
    """Percent for each number; nothing where there is nothing to compare with."""
    pairs = zip(_values(before), _values(after), strict=True)
    return [f"{new / old - 1:+.0%}" if old and new != old else "" for old, new in pairs]


def draw(line: Timeline, console: Console) -> None:
    """Print one run."""
    from rich.table import Table
    from rich.text import Text

    from shoal.agents.trace.timeline import at_ms, note_text

    console.print(Text(printable(f"{line.graph} {line.task_id}: {line.state}, {line.wall_ms:.0f} ms")))
    table = Table(
        "node", "state", "joined", "left", "cached", "written", f"0 to {line.wall_ms:.0f} ms", "waited for",
        box=None, pad_edge=False,
    )  # fmt: skip
    for row in line.rows:
        for i, bar in enumerate(row.bars or [None]):
            first = i == 0
            last = i == len(row.bars) - 1 or bar is None
            cells = [
                Text(printable(row.node if first else "")),
                _state(row, bar, last),
                *(Text(cell, justify="right") for cell in _numbers(bar)),
                _track(bar, line.wall_ms),
                Text(printable(", ".join(_short(row.waited_for)) if first else ""), style="dim"),
            ]
            table.add_row(*cells)
    console.print(table)
    console.print(Text(printable(f"the end waited for: {' -> '.join(line.critical)}")))
    for row in line.rows:
        if row.cause and row.state != "done":
            console.print(Text(printable(f"  {row.node}: {row.state}, because {row.cause}")), soft_wrap=True)
    for record in line.notes:
        console.print(Text(printable(f"  {at_ms(record):.0f} ms  {note_text(record)}"), style="dim"), soft_wrap=True)


def _short(names: list[str]) -> list[str]:
    """At most three names and how many more there are."""
    return names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]


def _numbers(bar: Bar | None) -> list[str]:
    if bar is None:
        return ["", "", "", ""]
    joined = "-" if bar.joined is None else f"{bar.joined:.0f}"
    cached = f"{bar.facts.get('prefix_tokens', 0)}/{bar.facts.get('prompt_tokens', '?')}"
    return [joined, f"{bar.left:.0f}", cached, str(bar.facts.get("generated_tokens", 0))]


def _state(row: Row, bar: Bar | None, last: bool) -> Text:
    """The node's state at its last attempt, the attempt's outcome at those before."""
    from rich.text import Text

    told = row.state if last else bar.outcome if bar is not None else ""
    style = {"done": "green", "failed": "red", "cancelled": "red", "timeout": "red", "invalid": "red"}.get(
        told, "yellow"
    )
    return Text(printable(told), style=style)


def _track(bar: Bar | None, wall_ms: float) -> Text:
    """Dots while it waits, light while it reads its prompt, full while it writes; crosses for what came to nothing."""
    from rich.text import Text

    if bar is None or wall_ms <= 0:
        return Text("")
    joined = bar.submitted if bar.joined is None else bar.joined
    first = joined if bar.first is None else bar.first
    moments = (bar.submitted, joined, first, bar.left)
    at = [round(min(max(moment / wall_ms, 0.0), 1.0) * _WIDTH) for moment in moments]
    mark = "█" if bar.outcome == "ok" else "x"
    shown = bar.outcome != "ok" or at[3] == at[0]  # what failed, and the shortest attempt, still show
    written = max(at[3] - at[2], 1 if shown else 0)
    return Text(" " * at[0] + "·" * (at[1] - at[0]) + "▒" * (at[2] - at[1]) + mark * written)
