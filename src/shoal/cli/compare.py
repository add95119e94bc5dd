"""`shoal compare`: two models, or two precisions of one, on the same prompts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import human_bytes, load_engine, note, print_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.diagnostics.compare import Agreement, Answers
    from shoal.engine.engine import Engine


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="The model that is taken for right.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model that is held against it.")],
    prompts: Annotated[Path, typer.Option(help="File with a prompt on each line.")],
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
