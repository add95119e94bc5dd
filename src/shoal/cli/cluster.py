"""`shoal cluster`: replicas of a model behind one door, and what that is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.cluster.figures import PolicyRow

app = typer.Typer(no_args_is_help=True, help="Replicas of a model behind one door.")


@app.callback()
def _cluster() -> None:
    pass


@app.command("simulate")
def simulate(
    replicas: Annotated[
        list[int] | None, typer.Option(help="How many replicas; may be given again (4, 16, 64 and 256).", min=2)
    ] = None,
    late: Annotated[float, typer.Option(help="How late events come in the runs with late events, seconds.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of arrivals.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write all figures there, as JSON.")] = None,
) -> None:
    """Compare routers without a model: the real router and scheduler on a simulated clock. Status 1 below a bar."""
    from shoal.cluster import figures

    print("workload  replicas policy    late  calls/s   p50 s   p90 s   hits    us")
    rows, bars = figures.simulate(replicas or [4, 16, 64, 256], late_s=late, seed=seed, tell=_print_row)
    for bar in bars:
        sign = "at most" if bar.most else "at least"
        print(f"{'ok ' if bar.met else 'LOW'} {bar.name}: {bar.value:.2f} ({sign} {bar.limit:g})")
    if out is not None:
        told = [
            {"workload": r.workload, "replicas": r.replicas, "policy": r.policy, "late_s": r.late_s, **r.figures}
            for r in rows
        ]
        out.write_text(json.dumps({"rows": told, "bars": {bar.name: bar.value for bar in bars}}, indent=1) + "\n")
    if not all(bar.met for bar in bars):
        raise typer.Exit(1)


def _print_row(row: PolicyRow) -> None:
    f = row.figures
    print(
        f"{row.workload:9}{row.replicas:9} {row.policy:9}{row.late_s:5.0f}{f['calls_per_s']:9.1f}"
        f"{f['ttft_p50_s']:8.2f}{f['ttft_p90_s']:8.2f}{f['hit_rate']:7.3f}{f['route_us']:6.0f}",
        flush=True,
    )
