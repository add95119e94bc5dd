"""`shoal cluster`: replicas of a model behind one door, and what that is worth."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import BackendError

if TYPE_CHECKING:
    from shoal.cluster.config import ClusterConfig
    from shoal.cluster.figures import PolicyRow

app = typer.Typer(no_args_is_help=True, help="Replicas of a model behind one door.")


@app.callback()
def _cluster() -> None:
    pass


@app.command("up")
def up(
    file: Annotated[Path, typer.Argument(help="The cluster, in YAML (docs/cluster.md).", exists=True, dir_okay=False)],
) -> None:
    """Run the replicas that a file describes, and a door before them, until a signal comes."""
    require("fastapi", "server")
    require("httpx", "remote")
    from shoal.cluster.config import read_config

    config = read_config(file)
    if config.addresses:
        from shoal.cluster.door import serve_addresses

        serve_addresses(config, lambda port: _tell(config, port))
        return
    require("ray", "cluster")
    from shoal.cluster import rayserve

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        rayserve.start(config)
        _tell(config, config.port)
        stopped.wait()
    finally:
        rayserve.stop()


def _tell(config: ClusterConfig, port: int) -> None:
    print(f"a cluster serves {config.model} on http://{config.host}:{port}/v1", flush=True)


def require(module: str, extra: str) -> None:
    """BackendError when what an extra brings is not installed."""
    if importlib.util.find_spec(module) is None:
        raise BackendError(f"{module} is not installed", hint=f"pip install 'shoal[{extra}]'")


@app.command("faults")
def faults(
    times: Annotated[int, typer.Option(help="How often each fault.", min=1)] = 50,
    model: Annotated[str, typer.Option(help="What the replicas run.")] = "toy",
    replicas: Annotated[int, typer.Option(help="How many replicas.", min=2)] = 3,
    only: Annotated[list[str] | None, typer.Option(help="This fault alone; may be given again.")] = None,
) -> None:
    """Kill, stop, slow and starve replicas started here, under load. Status 1 when a request is not accounted for."""
    require("fastapi", "server")
    require("httpx", "remote")
    from shoal.cluster import faults

    logging.getLogger("shoal").setLevel(logging.CRITICAL)  # a warning for each request that is sent elsewhere
    ok = True
    for name in only or list(faults.FAULTS):
        tally = faults.run_fault(name, times, model=model, replicas=replicas)
        print(tally, flush=True)
        ok = ok and tally.sound
    if not ok:
        raise typer.Exit(1)


@app.command("compare")
def compare(
    replicas: Annotated[list[int] | None, typer.Option(help="How many; may be given again (2 and 4).", min=1)] = None,
    model: Annotated[str, typer.Option(help="What the replicas run.")] = "smollm2-135m",
    calls: Annotated[int, typer.Option(help="Calls in all.", min=8)] = 48,
) -> None:
    """Prompt tokens that real replicas on this machine compute, beside the simulation's. Status 1 beyond 5 %."""
    require("fastapi", "server")
    require("httpx", "remote")
    from shoal.cluster.compare import compare_tokens

    ok = True
    for count in replicas or [2, 4]:
        told = compare_tokens(model, count, calls)
        print(told, flush=True)
        ok = ok and told.close
    if not ok:
        raise typer.Exit(1)


@app.command("equal")
def equal(
    replicas: Annotated[int, typer.Option(help="How many replicas.", min=1)] = 2,
    model: Annotated[str, typer.Option(help="What the replicas run.")] = "smollm2-135m",
    requests: Annotated[int, typer.Option(help="Requests in all.", min=8)] = 32,
) -> None:
    """Hold the answers of a cluster started here against one engine's, bit for bit. Status 1 where one differs."""
    require("fastapi", "server")
    require("httpx", "remote")
    from shoal.cluster.equal import compare_answers

    told = compare_answers(model, replicas, requests)
    print(told, flush=True)
    if not told.equal:
        raise typer.Exit(1)


@app.command("simulate")
def simulate(
    replicas: Annotated[
        list[int] | None, typer.Option(help="How many replicas; may be given again (4, 16, 64 and 256).", min=2)
    ] = None,
    late: Annotated[float, typer.Option(help="How late events come in the runs with late events, seconds.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of arrivals.", min=0)] = 0,
    calls: Annotated[int, typer.Option(help="Calls of tenants, per replica.", min=10)] = 200,
    out: Annotated[Path | None, typer.Option(help="Write all figures there, as JSON.")] = None,
) -> None:
    """Compare routers without a model: the real router and scheduler on a simulated clock. Status 1 below a bar."""
    from shoal.cluster import figures

    print("workload  replicas policy    late  calls/s   p50 s   p90 s   hits    us")
    rows, bars = figures.simulate(replicas or [4, 16, 64, 256], late_s=late, seed=seed, calls=calls, tell=_print_row)
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
