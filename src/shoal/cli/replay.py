"""`shoal replay`: a recorded schedule, run again without the model and shown step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.engine.record import ReplayedStep


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What EngineConfig(record=...) or --record wrote.")],
    limit: Annotated[int, typer.Option(help="Show at most this many steps; 0 shows all.")] = 0,
) -> None:
    """Plan every step of a recorded run again and show it; a step planned otherwise today is marked.

    Exit status 1 when any step is planned otherwise. Columns: step, seconds since the start, milliseconds, then each
    sequence with the tokens fed, + for one that joined, and the blocks copied; then who ended, and why.
    """
    from shoal.engine.record import replay as replayed

    start: float | None = None
    differing = count = 0
    for step in replayed(file):
        start = step.now if start is None else start
        count += 1
        differing += not step.same
        if not limit or count <= limit:
            print(_line(step, start), flush=True)
    print(f"{count} steps, {differing} planned otherwise than recorded")
    if differing:
        raise typer.Exit(1)


def _line(step: ReplayedStep, start: float) -> str:
    plan = step.plan
    parts = []
    for item in plan.sequences:
        joined = "+" if item.seq_id in step.joined else ""
        parts.append(f"{joined}{item.seq_id}:{len(item.tokens)}@{item.start}")
    line = f"{plan.step:6d} {step.now - start:9.3f} {step.ms:8.2f}  {' '.join(parts)}"
    if plan.chain > 1:
        line += f"  x{plan.chain}"
    if plan.copies:
        line += f"  copies {', '.join(f'{source}->{destination}' for source, destination in plan.copies)}"
    if plan.window_copies:
        line += f"  of windows {', '.join(f'{source}->{destination}' for source, destination in plan.window_copies)}"
    if step.left:
        line += f"  ended {', '.join(f'{seq_id} ({reason})' for seq_id, reason in step.left)}"
    return line if step.same else f"{line}  DIFFERS"
