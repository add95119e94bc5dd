"""Options that several commands take, with the defaults of the library."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.console import setting

DEFAULT_MODEL = "smollm2-135m"
KV_MEMORY: str = setting("kv_memory")

Model = Annotated[
    str,
    typer.Option(help="Name in the store, path of a .gguf or OpenVINO directory, or hub id; fetched if need be."),
]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of one answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
KVMemory = Annotated[str, typer.Option(help='The most memory for KV, as in "512MiB".')]
Precision = Annotated[
    str, typer.Option(help="auto, bf16 or f32, or q8_0, q4_1 or q4_0 to quantise weights when they are loaded.")
]
PRECISION: str = setting("precision")
Threads = Annotated[int | None, typer.Option(help="Threads of the model; all cores if not given.")]
