"""`shoal bench`: the engine measured, against its peers and against what the machine can give."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options

if TYPE_CHECKING:
    from shoal.bench.suite import Options

app = typer.Typer(no_args_is_help=False, help="Measure the engine against peers and ceilings; report and compare.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Option(
            help="scaling, burst, uneven, staggered, fanout, mixed, agents, overhead, company, serve, cold, sustained; "
            "all; speculation."
        ),
    ] = "both",
    runs: Annotated[
        int | None,
        typer.Option(help="Fit runs of each level that all must get; if not given 5, or 2 of what takes long.", min=1),
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a level is not repeated for --runs.", min=1)] = 900,
    n: Annotated[int | None, typer.Option(help="Requests of a burst, or of staggered arrivals.", min=1)] = None,
    batch: Annotated[int | None, typer.Option(help="How many of them run together.", min=1)] = None,
    prompt: Annotated[int | None, typer.Option(help="Prompt tokens of each of them.", min=1)] = None,
    output: Annotated[int | None, typer.Option(help="Tokens that each of them writes.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="How long the sustained scenario goes on.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result to this file too, after each level.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Peers, by commas: llama, llama-server, ik, genai, mlx; llama@q8, shoal@q4_k_m, url=http://HOST/v1; "
            '"" for none.'
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    shape: Annotated[
        str, typer.Option(help="Not --model, but random weights in this shape: smollm2-135m, qwen3-0.6b, ...")
    ] = "",
    format: Annotated[str, typer.Option(help="Of the --shape: q4_k_m, q4_0, q8_0, ...")] = "q4_k_m",
    runner: Annotated[str, typer.Option(help="Backend of this engine.")] = "auto",
    threads: options.Threads = None,
    margin: Annotated[float, typer.Option(help="Share by which the machine may be slower.", min=0.0)] = 0.25,
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of the tokens, to try it out.")] = False,
) -> None:
    """Measure. Progress goes to standard error; the last line of standard output is the result as one JSON document."""
    if context.invoked_subcommand is not None:
        return
    from shoal.bench.harness import Rounds
    from shoal.bench.suite import Options as Wanted
    from shoal.bench.workloads import Sizes
    from shoal.cli.console import ensure_model
    from shoal.cli.machine import machine_facts, versions
    from shoal.errors import ConfigError

    if shape and model != options.DEFAULT_MODEL:
        raise ConfigError("--shape and --model are two models", value=f"{shape}, {model}", hint="give one of them")
    if not shape:
        ensure_model(model)
    facts = {**machine_facts(), "versions": versions()}
    if scenario == "speculation":
        document = _speculation(model, runner, threads, 1 if quick else runs or 3, facts)
    else:
        rounds, sizes = Rounds(runs or 5, runs is not None, limit), Sizes(n, batch, prompt, output, seconds)
        asked = None if peers is None else tuple(name for name in peers.split(",") if name)
        wanted = Wanted(scenario, rounds, sizes, asked, model, shape, format, runner, threads, quick, margin)
        document = _suite(wanted, facts, out)
    _save(out, document)
    print(json.dumps(document), flush=True)


def _suite(wanted: Options, facts: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Measure scenarios against peers, saving after each level; shows their tables."""
    from shoal.bench.report import measured
    from shoal.bench.results import Results
    from shoal.bench.suite import run_suite

    document = run_suite(wanted, facts, _command(), _tell, partial(_save, out))
    _tell(measured(Results(document)))
    return document


def _speculation(model: str, runner: str, threads: int | None, runs: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Measure the same work with drafts and without; shows the table, and what its texts and costs come to."""
    from shoal.bench import drafting
    from shoal.bench.speculation import SpeculationBench, table

    found = SpeculationBench(model, runner, threads, _tell).run(runs)
    _tell(table(found))
    calculated = drafting.replayed(found)
    _tell(drafting.table(calculated))
    return {**found, "calculated": calculated, "command": _command(), "machine": facts}


def _command() -> str:
    return shlex.join(["shoal", *sys.argv[1:]])


def _save(out: Path | None, document: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="RESULT", help="What --out wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and its plots.")] = Path(),
    others: Annotated[bool, typer.Option("--others", help="Also what the other results in its folder say.")] = False,
) -> None:
    """Write a page, benchmarks.md, with plots in img/, from a result."""
    from shoal.bench.report import beside, write

    for path in write(file, out, others=beside(file) if others else ()):
        print(path)


@app.command()
def drafts(
    file: Annotated[Path, typer.Argument(metavar="RESULT", help="What --scenario speculation --out wrote.")],
) -> None:
    """Calculate what drafts gain from a result's texts and costs of passes: no model, no timing."""
    from shoal.bench.drafting import replayed, table

    print(table(replayed(json.loads(file.read_text("utf-8")))))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="The result to compare with.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The new one.")],
) -> None:
    """Say which figures moved beyond noise: ranges that do not overlap. Exit status 1 when any got worse."""
    from shoal.bench.compare import moves, same_machine
    from shoal.bench.results import Results
    from shoal.bench.tables import number

    old, new = Results.read(before), Results.read(after)
    differing = same_machine(old, new)
    if differing:
        print(f"not the same {', '.join(differing)}: compare ratios only")
    found = list(moves(old, new))
    for move in found:
        verdict = {True: "better", False: "WORSE", None: "changed"}[move.better]
        place = f"{move.scenario} {move.level} {move.contender} {move.metric}"
        medians = f"{number(move.before.median)} -> {number(move.after.median)}"
        print(f"{verdict:8}{place}: {medians} ({100 * move.change:+.0f} %)")
    print(f"{len(found)} figures moved, {sum(move.better is False for move in found)} for the worse")
    if any(move.better is False for move in found):
        raise typer.Exit(1)


@app.command()
def part(
    names: Annotated[
        list[str], typer.Argument(help="scheduler, sampling, second, distinct, masks, graph, pace, page.")
    ],
    runs: Annotated[int, typer.Option(help="Rounds of each.", min=1)] = 5,
    model: options.Model = options.DEFAULT_MODEL,
    runner: Annotated[str, typer.Option(help="Backend of this engine.")] = "auto",
) -> None:
    """Measure single parts of the engine; one JSON line for each."""
    from shoal.bench.parts import Bench, measure
    from shoal.cli.console import ensure_model

    ensure_model(model)
    for name in names:
        print(json.dumps(measure(name, Bench(model, runner, runs))), flush=True)


@app.command()
def counts(
    baseline: Annotated[Path, typer.Option(help="The stored counts.")] = Path("benchmarks/counts.json"),
    write: Annotated[bool, typer.Option("--write", help="Store today's counts instead of comparing.")] = False,
) -> None:
    """Compare counts that do not depend on the machine with the stored ones. Exit status 1 when any differs."""
    from shoal.bench.counts import counts as count
    from shoal.bench.counts import differences

    found = count()
    if write:
        baseline.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        return
    lines = differences(json.loads(baseline.read_text("utf-8")), found)
    print("\n".join(lines) if lines else f"{len(found)} levels, nothing differs")
    if lines:
        raise typer.Exit(1)
