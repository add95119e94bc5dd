"""`shoal conform`: outside suites against servers, by their URLs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import note
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.conform.outcome import CaseOutcome


def conform(
    servers: Annotated[
        list[str],
        typer.Argument(metavar="NAME=URL...", help="Servers, as ours=http://127.0.0.1:8000/v1; =MODEL may follow."),
    ],
    suite: Annotated[list[str] | None, typer.Option(help="Only this suite; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page here instead of printing it.")] = None,
) -> None:
    """Run outside suites against servers: needs the extra `conform`. Exit status 1 when a case fails on the first."""
    from shoal.conform.outcome import Target
    from shoal.conform.page import page
    from shoal.conform.suites import ABOUT, SUITES

    targets = [Target.parse(server) for server in servers]
    for name in suite or ():
        if name not in SUITES:
            raise ConfigError(f"there is no suite {name!r}", value=name, hint=f"known are {', '.join(SUITES)}")
    command = " ".join(["shoal conform", *(f"{target.name}={target.url}" for target in targets)])
    text = ""
    results: dict[str, dict[str, list[CaseOutcome]]] = {}
    for name in suite or SUITES:
        results[name] = {}
        for target in targets:
            outcomes = results[name][target.name] = list(SUITES[name](target))
            passed = sum(outcome.status == "pass" for outcome in outcomes)
            note(f"{name} on {target.name}: {passed} of {len(outcomes)}")
        text = page(results, targets, ABOUT, command)
        if out is not None:  # after each suite: the next one may take an hour
            out.write_text(text, "utf-8")
    if out is None:
        print(text)
    if any(outcome.status == "fail" for by_target in results.values() for outcome in by_target[targets[0].name]):
        raise typer.Exit(1)
