"""The timeline of a trace as one self-contained HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.agents.trace.timeline import Bar, Record, Row, Timeline, at_ms, loose, note_text, timelines

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
:root { --queue: #9aa5b1; --read: #d9a441; --write: #3f7fbf; --bad: #c0392b; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .2rem .5rem; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); } tr + tr td { border-top: 1px solid var(--line); }
td:nth-child(4), td:nth-child(5) { white-space: nowrap; }
td.bars { width: 42%; position: relative; } .track { position: relative; height: 1.1rem; margin: .1rem 0; }
.track span { position: absolute; top: 0; bottom: 0; min-width: 1px; } .queue { background: var(--queue); }
.read { background: var(--read); } .write { background: var(--write); } .bad { background: var(--bad); }
.key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
.state-failed, .state-cancelled { color: var(--bad); } .critical td:first-child { font-weight: 700; }
small { opacity: .75; } .scroll { overflow-x: auto; }
"""


def page(records: Sequence[Record], title: str) -> str:
    """The page. Everything from the trace is escaped."""
    runs = "".join(_run(line) for line in timelines(records))
    others = "".join(f"<li>{escape(note_text(record))}</li>" for record in loose(records))
    rest = f"<h2>Outside of runs</h2><ul>{others}</ul>" if others else ""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>"
        '<p class="key"><span class="queue"></span>waits for a place in the batch'
        '<span class="read"></span>reads its prompt<span class="write"></span>writes'
        '<span class="bad"></span>an attempt that failed</p>'
        f"{runs}{rest}</html>\n"
    )


def _run(line: Timeline) -> str:
    critical = set(line.critical)
    rows = "".join(_row(row, line.wall_ms, row.node in critical) for row in line.rows)
    notes = "".join(
        f"<li><small>{at_ms(record):.0f} ms</small> {escape(note_text(record))}</li>" for record in line.notes
    )
    chain = escape(" → ".join(line.critical))
    return (
        f"<h2>{escape(line.graph)} <small>{escape(line.task_id)}: {escape(line.state)}, {line.wall_ms:.0f} ms"
        "</small></h2>"
        f"<p>The end waited for: <b>{chain}</b></p>"
        '<div class="scroll"><table><tr><th>node<th>state<th>waited for<th>joined, left (ms)<th>tokens'
        f"<th>0 to {line.wall_ms:.0f} ms</tr>{rows}</table></div>" + (f"<ul>{notes}</ul>" if notes else "")
    )


def _row(row: Row, wall_ms: float, critical: bool) -> str:
    times = "<br>".join(f"{_ms(bar.joined)}, {_ms(bar.left)}" for bar in row.bars)
    tokens = "<br>".join(escape(_tokens(bar)) for bar in row.bars)
    cause = f"<br><small>{escape(row.cause)}</small>" if row.cause else ""
    tracks = "".join(_track(bar, wall_ms) for bar in row.bars)
    return (
        f"<tr{' class=critical' if critical else ''}><td>{escape(row.node)}"
        f'<td class="state-{escape(row.state, quote=True)}">{escape(row.state)}{cause}'
        f"<td>{escape(', '.join(row.waited_for)) or '-'}<td>{times}<td>{tokens}<td class=bars>{tracks}</tr>"
    )


def _tokens(bar: Bar) -> str:
    facts = bar.facts
    cached = f"{facts.get('prefix_tokens', 0)} of {facts.get('prompt_tokens', '?')} cached"
    return f"{cached}, {facts.get('generated_tokens', 0)} written"


def _track(bar: Bar, wall_ms: float) -> str:
    joined = bar.submitted if bar.joined is None else bar.joined
    first = joined if bar.first is None else bar.first
    bad = bar.outcome != "ok"
    spans = [("queue", bar.submitted, joined), ("read", joined, first), ("bad" if bad else "write", first, bar.left)]
    scale = 100 / wall_ms if wall_ms > 0 else 0.0
    drawn = "".join(
        f'<span class="{name}" style="left:{begin * scale:.3f}%;width:{max(end - begin, 0) * scale:.3f}%"></span>'
        for name, begin, end in spans
    )
    told = f"attempt {bar.attempt}: {bar.outcome}" + (f", {bar.cause}" if bar.cause else "")
    return f'<div class="track" title="{escape(told, quote=True)}">{drawn}</div>'


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
