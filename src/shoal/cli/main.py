"""The `shoal` command: what its subcommands are, and what becomes of errors and signals.

Only what the parser needs is imported here; each command imports the rest when it runs, so `--help` stays quick.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.cli import (
    bench,
    cluster,
    compare,
    conform,
    doctor,
    graph,
    models,
    quantize,
    replay,
    run,
    serve,
    swarm,
    trace,
)
from shoal.cli.console import describe
from shoal.errors import ShoalError

INTERRUPTED = 130
BAD_INPUT = 2


class Commands(TyperGroup):
    """Runs a command so that an expected error is a message and an exit status, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Status 2 for a `ShoalError`, 130 for Ctrl-C; anything else is a defect and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            print(describe(error), file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Many agents, one pass through the weights: batches a fleet of agents through one local model.",
)
app.command("swarm")(swarm.swarm)
app.command("run")(run.run)
app.add_typer(models.app, name="models")
app.add_typer(graph.app, name="graph")
app.command("trace")(trace.trace)
app.command("serve")(serve.serve)
app.command("quantize")(quantize.quantize)
app.command("compare")(compare.compare)
app.command("conform")(conform.conform)
app.command("doctor")(doctor.doctor)
app.command("replay")(replay.replay)
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")


def _version(wanted: bool) -> None:
    if wanted:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script. Never returns."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows "?"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a reader that went away can still be told from a defect
    except BrokenPipeError:
        # The reader has gone (`shoal ... | head`). Python flushes once more at its exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
