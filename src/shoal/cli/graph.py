"""`shoal graph`: run a graph file, draw it, say what its agents share."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import Interrupts, describe, ensure_model, load_engine, note, pace, print_json, printable
from shoal.errors import GraphError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.agents import Graph, GraphResult, Run, Trace
    from shoal.agents.lint import Lint, Tokenize
    from shoal.engine.engine import Engine

app = typer.Typer(no_args_is_help=True, help="Graphs of agents from YAML files.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A graph as YAML.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", "-i", metavar="NAME=VALUE", help="An input; @file reads it, JSON lists too."),
]


@app.command("run")
def run(
    file: File,
    inputs: Inputs = None,
    model: options.Model = options.DEFAULT_MODEL,
    remote: Annotated[
        str | None, typer.Option(metavar="URL", help="Run on this OpenAI-compatible server instead.")
    ] = None,
    rollout: options.Rollout = None,
    trace: Annotated[Path | None, typer.Option(help="Write the trace there; `shoal trace` draws it.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds for the whole run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run repeatable.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Keep what has ended in this new file, for --resume.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Go on with the run of this checkpoint, which broke off.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Agents that write at the same time.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    kv_memory: options.KVMemory = options.KV_MEMORY,
    threads: options.Threads = None,
    governor: options.Governor = False,
    joules: options.Joules = None,
    battery: options.Battery = None,
) -> None:
    """Run a graph; what its final node writes goes to standard output, progress to standard error."""
    from shoal.agents.build.files import load_graph

    graph = load_graph(file)
    given = _inputs(inputs)
    if checkpoint is not None and resume is not None:
        raise GraphError("--checkpoint and --resume are given", hint="--resume goes on writing to its file")
    kept = {"checkpoint": checkpoint or resume, "resumed": resume is not None}
    settings = {"deadline_s": deadline, "seed": seed, **kept, **given}
    if remote is not None and rollout is not None:
        raise GraphError("--rollout needs an engine here, --remote has none", value=rollout, hint="give one of the two")
    with Interrupts() as interrupts:
        if remote is not None:
            result = asyncio.run(_run_remote(graph, remote, trace, settings, interrupts))
        else:
            power = options.power(governor, joules, battery)
            with load_engine(model, kv_memory=kv_memory, threads=threads, max_batch=max_batch, power=power) as engine:
                interrupts.hold()
                result = asyncio.run(_run_here(graph, engine, rollout, trace, settings, interrupts))
                note(pace(engine))
    if as_json:
        print_json(_document(result))
    elif result.output is not None:
        print(printable(result.text) if sys.stdout.isatty() else result.text)
    if interrupts.wanted:
        raise typer.Exit(130)
    result.raise_for_failure()


async def _run_remote(
    graph: Graph, url: str, trace: Path | None, settings: dict[str, Any], interrupts: Interrupts
) -> GraphResult:
    from shoal.agents import Trace
    from shoal.engine.remote import RemoteEngine

    with Trace(trace) as records:
        async with RemoteEngine(url) as engine:
            interrupts.hold()
            return await _run(graph, engine, records, settings, interrupts)


async def _run_here(
    graph: Graph,
    engine: Engine,
    plan: str | None,
    trace: Path | None,
    settings: dict[str, Any],
    interrupts: Interrupts,
) -> GraphResult:
    from shoal.agents import Rollout, Trace
    from shoal.engine.aio import AsyncEngine

    with Trace(trace) as records:
        if engine.governor is not None:
            engine.governor.listen(lambda decision: records.write(decision.record()))
        if plan is None:
            return await _run(graph, AsyncEngine(engine), records, settings, interrupts)
        async with Rollout(AsyncEngine(engine), plan, trace=records) as both:
            return await _run(graph, both, records, settings, interrupts)


async def _run(
    graph: Graph, engine: Any, records: Trace, settings: dict[str, Any], interrupts: Interrupts
) -> GraphResult:
    from shoal.agents import EventKind

    async with graph.start(engine, trace=records, **settings) as work:
        watch = asyncio.create_task(_watch(work, interrupts))
        try:
            async for event in work:
                if event.kind is EventKind.ENDED and event.node is not None and event.outcome is not None:
                    cause = f" ({event.outcome.cause})" if event.outcome.cause else ""
                    note(printable(f"{work.now_ms / 1e3:7.2f} s  {event.node.id}: {event.outcome.state}{cause}"))
        finally:
            watch.cancel()
        if work.checkpoint.error is not None:
            print(describe(work.checkpoint.error), file=sys.stderr)
        return await work.result()


async def _watch(work: Run, interrupts: Interrupts) -> None:
    """End the run when Ctrl-C was pressed; what has not ended is left to a resume."""
    while not interrupts.wanted:
        await asyncio.sleep(0.1)
    work.interrupt()


def _document(result: GraphResult) -> dict[str, Any]:
    from shoal.agents.build.schema import plain

    return {
        "task_id": result.task_id,
        "output": plain(result.output),
        "nodes": {
            name: {"state": outcome.state, "cause": outcome.cause, "output": plain(outcome.value)}
            for name, outcome in result.outcomes.items()
        },
        "wall_s": round(result.wall_s, 4),
    }


def _inputs(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value @file is read, and what is a JSON list or object is taken as one."""
    from shoal.agents.build.files import input_value

    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise GraphError(f"--input {pair!r} is no NAME=VALUE", value=pair, hint="as in --input question='Why?'")
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise GraphError(f"input {name} cannot be read: {error}", value=pair) from error
        found[name] = input_value(value)
    return found


@app.command("show")
def show(file: File, model: options.Model = options.DEFAULT_MODEL) -> None:
    """Draw a graph: its nodes by level, what they wait for and what happens on failure, and the prefixes they share."""
    from shoal.agents.build.files import load_graph
    from shoal.cli.drawing import draw

    count, unit = _counter(model)
    draw(load_graph(file), count, unit)


@app.command("lint")
def lint(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A graph, or prompts: one {agent, messages} a line (.jsonl).")
    ],
    inputs: Inputs = None,
    model: options.Model = options.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Measure how many tokens each agent shares with its siblings, and say what breaks the sharing (status 1)."""
    from shoal.agents.build.files import load_graph
    from shoal.agents.lint import lint_graph, lint_prompts, read_prompts

    ensure_model(model)
    tokenize = _tokenizer(model)
    if file.suffix == ".jsonl":
        found = lint_prompts(read_prompts(file), tokenize)
    else:
        found = lint_graph(load_graph(file), tokenize, _inputs(inputs))
    if as_json:
        import dataclasses

        print_json(dataclasses.asdict(found))
    else:
        _report(found)
    if found.findings:
        raise typer.Exit(1)


def _report(found: Lint) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("prompt", "tokens", "shared", "with", "differs in", box=None, pad_edge=False)
    for share in found.shares:
        part = f"{share.shared} ({share.shared / max(share.tokens, 1):.0%})"
        row = (share.name, str(share.tokens), part, share.sibling or "-", share.ends_in)
        table.add_row(*(printable(cell).replace("[", "\\[") for cell in row))
    console.print(table)
    console.print(f"all prompts begin with the same {found.common} tokens")
    for finding in found.findings:
        console.print(f"- {printable(finding)}", markup=False, soft_wrap=True)


def _tokenizer(model: str) -> Tokenize:
    from shoal.engine.loading import ModelCodec
    from shoal.models import Store, load_tokenizer

    return ModelCodec(load_tokenizer(Store().resolve(model, pull=False))).encode_messages


def _counter(model: str) -> tuple[Callable[[str], int], str]:
    """How long a text is: in tokens where the model is in the store, in characters elsewhere."""
    from shoal.models import Store, load_tokenizer

    try:
        tokenizer = load_tokenizer(Store().resolve(model, pull=False))
    except ModelNotFoundError:
        return len, "characters"
    return lambda text: len(tokenizer.encode(text, add_special=False)), "tokens"
