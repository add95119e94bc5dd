"""The results as a page: one table of all suites and servers, then every case that does not pass, with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.conform.outcome import CaseOutcome, Target

Results = Mapping[str, Mapping[str, Sequence[CaseOutcome]]]
"""Suite, then server, to its outcomes."""

_HEAD = """# Conformance

Outside suites and clients, unmodified, against this server and others, each by its URL. Written by

    {command}

A case passes or is listed below with the reason. What a small model cannot know (which tool to choose, what to answer)
fails on every server alike; what a server does not do fails on that server alone. Two kinds fail here by intent: an
image is a 400, since the models read text, and a call without a `model` is answered by the served one, where the
cases named `error-handling` expect a refusal.

"""


def page(results: Results, targets: Sequence[Target], about: Mapping[str, str], command: str) -> str:
    """The page; `about` says of each suite what it is."""
    names = [target.name for target in targets]
    lines = [_HEAD.format(command=command), f"| suite | {' | '.join(names)} | |", f"|---|{'---|' * len(names)}---|"]
    for suite, by_target in results.items():
        counts = " | ".join(_count(by_target[name]) for name in names)
        lines.append(f"| {suite} | {counts} | {about[suite]} |")
    lines.append("\nEach cell: cases passed of those run; skipped ones do not count.\n")
    for suite, by_target in results.items():
        lines += _listed(suite, by_target, names)
    return "\n".join(lines).rstrip() + "\n"


def _count(outcomes: Sequence[CaseOutcome]) -> str:
    ran = [outcome for outcome in outcomes if outcome.status != "skip"]
    return f"{sum(outcome.status == 'pass' for outcome in ran)} of {len(ran)}" if ran else "not run"


def _listed(suite: str, by_target: Mapping[str, Sequence[CaseOutcome]], names: Sequence[str]) -> list[str]:
    rows = []
    for name in names:
        for outcome in by_target[name]:
            if outcome.status != "pass":
                why = outcome.why.replace("|", "\\|").replace("<", "&lt;")
                word = "skipped" if outcome.status == "skip" else "fails"
                rows.append(f"| {name} | {outcome.case} | {word} | {why} |")
    if not rows:
        return []
    return [f"## {suite}\n", "| server | case | | reason |", "|---|---|---|---|", *rows, ""]
