"""Options that several commands take, with the defaults of the library."""

from __future__ import annotations

from typing import Annotated, Any

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
Governor = Annotated[
    bool, typer.Option("--governor", help="Slow down, defer and refuse by this machine's heat and battery.")
]
Joules = Annotated[
    float | None, typer.Option(help="At most so many joules in any minute, by this machine's counters.", min=0.001)
]
Battery = Annotated[
    float | None,
    typer.Option(help="Slow down at this percent left, unplugged; at half of it defer.", min=0, max=100),
]
Rollout = Annotated[
    str | None,
    typer.Option(metavar="PLAN", help="Send a share of the tasks to a second configuration; a file or URL of a plan."),
]
Threads = Annotated[int | None, typer.Option(help="Threads of the model; all cores if not given.")]


def power(governor: bool, joules: float | None, battery: float | None) -> bool | dict[str, Any]:
    """The engine setting `power` that these three options stand for; a budget or a battery limit implies a governor."""
    given: dict[str, Any] = {}
    if joules is not None:
        given["joules"] = joules
    if battery is not None:
        given["battery"] = (battery, battery / 2, battery / 4)
    return given or governor
