"""`shoal compare`: two models, or two precisions of one, on the same prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import human_bytes, load_engine, note, print_json, printable
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.agents.chains import ChainSide
    from shoal.diagnostics.compare import Agreement, Answers
    from shoal.engine.engine import Engine


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="The model that is taken for right.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model that is held against it.")],
    prompts: Annotated[Path | None, typer.Option(help="File with a prompt on each line.")] = None,
    graph: Annotated[Path | None, typer.Option(help="Not prompts, but this chain of agents, a graph as YAML.")] = None,
    inputs: Annotated[Path | None, typer.Option(help="Of the graph: a JSON object on each line, a run each.")] = None,
    max_tokens: options.MaxTokens = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    kv_memory: options.KVMemory = options.KV_MEMORY,
    threads: options.Threads = None,
) -> None:
    """Compare two models: agreement, divergence of log-probabilities, valid JSON, speed."""
    from shoal.diagnostics.compare import compare as compare_models

    def load(name: str) -> Engine:
        note(f"loading {name}")
        return load_engine(name, kv_memory=kv_memory, threads=threads, max_batch=8)

    if (prompts is None) == (graph is None):
        raise ConfigError("one of --prompts and --graph is what both models do", hint="give one of them")
    if graph is not None:
        _chains(load, first, second, graph, inputs, as_json=as_json)
        return
    assert prompts is not None
    told = compare_models(load, first, second, _lines(prompts), max_tokens)
    if as_json:
        print_json(document(first, second, told))
        return
    print(f"{'':14}{first:>24}{second:>24}")
    theirs, own = _row(told.first), _row(told.second)
    for name in theirs:
        print(f"{name:14}{theirs[name]:>24}{own[name]:>24}")
    print(f"agreement {told.agreement:.4f} of {told.positions} tokens, divergence {told.divergence:.5f} nats per token")
    print(f"{told.same_texts:.0%} of the answers are the same word for word")


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", value=str(path), hint="give a text file") from error


def _chains(
    load: Callable[[str], Engine], first: str, second: str, file: Path, inputs: Path | None, *, as_json: bool
) -> None:
    """A graph on both models: where they part, what does not fit, times, memory, energy."""
    import asyncio

    from shoal.agents.build.files import load_graph
    from shoal.agents.chains import compare_chains
    from shoal.bench.machine import Energy

    graph = load_graph(file)
    given = [{}] if inputs is None else [_object(line, number) for number, line in enumerate(_lines(inputs), 1)]
    told = asyncio.run(compare_chains(load, first, second, graph, given, joules=Energy().joules))
    if as_json:
        sides = {side.model: {**asdict(side), "results": None} for side in (told.first, told.second)}
        print_json({"models": sides, "nodes": {name: asdict(node) for name, node in told.nodes.items()}})
        return
    print(f"{'':24}{first:>24}{second:>24}")
    theirs, own = _side_row(told.first), _side_row(told.second)
    for name in theirs:
        print(f"{name:24}{theirs[name]:>24}{own[name]:>24}")
    for name, node in told.nodes.items():
        words = f"{node.words:.0%} of the words, {node.equal:.0%} of {node.runs} outputs equal"
        print(f"{printable(name):24}{words}")


def _side_row(side: ChainSide) -> dict[str, str]:
    calls = side.trace.calls
    return {
        "precision": side.precision,
        "run, s": f"{side.run_s:.2f}",
        "calls": str(calls.calls),
        "schema failures": str(calls.invalid),
        "TTFT median, ms": f"{calls.ttft_ms.median:.1f}",
        "not computed again": f"{calls.hit_rate:.0%}",
        "engine memory": human_bytes(side.memory_bytes),
        "process, most": f"{calls.process_mb:.0f} MB",
        "energy": "not readable here" if side.joules is None else f"{side.joules:.0f} J",
    }


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} of the inputs is no JSON: {error}", value=line[:80]) from error
    if not isinstance(told, dict):
        raise ConfigError(f"line {number} of the inputs is no object", value=line[:80], hint='as {"question": "Why?"}')
    return told


def _row(told: Answers) -> dict[str, str]:
    return {
        "precision": told.precision,
        "weights": human_bytes(told.weight_bytes),
        "valid JSON": f"{told.json_share:.0%}",
        "tokens": str(told.tokens),
        "tok/s": f"{told.tokens_per_s:.0f}",
    }


def document(first: str, second: str, told: Agreement) -> dict[str, Any]:
    """What `--json` prints."""
    numbers = {name: value for name, value in asdict(told).items() if isinstance(value, int | float)}
    return {**numbers, "models": [_side(first, told.first), _side(second, told.second)]}


def _side(name: str, told: Answers) -> dict[str, Any]:
    return {
        "model": name,
        "precision": told.precision,
        "weight_bytes": told.weight_bytes,
        "valid_json": told.json_share,
        "tokens": told.tokens,
        "tokens_per_s": round(told.tokens_per_s, 1),
        "texts": list(told.texts),
    }
