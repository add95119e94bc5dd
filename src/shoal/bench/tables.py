"""The tables of a report, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.bench.results import Figure, Results, figure, ratio
from shoal.engine.batch import SWEET_SHARE, smallest_batch

Level = Mapping[str, Any]
_STREAMS = ("1", "2", "4", "8", "16", "32")


def number(value: float) -> str:
    """Three digits or so."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def quoted(found: Figure | None, scale: float = 1.0) -> str:
    """A figure with its range, or a dash."""
    if found is None:
        return "-"
    low, median, high = (number(scale * value) for value in (found.low, found.median, found.high))
    return median if found.n == 1 else f"{median} ({low} to {high})"


_ENOUGH = 5  # runs; rows with fewer say so


def marked(results: Results, key: str, levels: Sequence[Level | None]) -> str:
    """A contender's label, with how few runs it has in one of these levels, and whether figures are only relative."""
    ran = [level for level in levels if level is not None and key in level["results"]]
    found = [value["n"] for level in ran for value in level["results"][key]["summary"].values()]
    label = results.label(key)
    if found and min(found) < _ENOUGH:
        label += f" ({min(found):.0f} run{'s' if min(found) > 1 else ''})"
    return f"{label} ~" if any(level.get("relative") for level in ran) else label


def pairs(results: Results, level: Level, metric: str = "wall_s") -> str:
    """This engine against each peer in one level: the ratio of medians, its interval, and of how many pairs."""
    rows = []
    for key, told in level.get("pairs", {}).items():
        if metric in told and not key.startswith("shoal:"):
            found = told[metric]
            interval = f"{found['low']:.2f} to {found['high']:.2f}"
            rows.append([results.label(key), f"{found['ratio']:.2f}", interval, f"{found['pairs']:.0f}"])
    if not rows:
        return ""
    title = "the time that shoal takes, over that of" if metric == "wall_s" else f"shoal's {metric}, over that of"
    return table([title, "ratio of medians", "95 % interval", "pairs"], rows)


def short(found: Figure | None, scale: float = 1.0) -> str:
    """A figure without its range, or a dash."""
    return "-" if found is None else number(scale * found.median)


def times(value: float | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def percent(found: Figure | None) -> str:
    """A share in percent, or a dash."""
    return "-" if found is None else f"{100 * found.median:.0f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drawable(results: Results, plot: str) -> bool:
    """Whether there is anything to draw for a plot."""
    scenario = {"scoreboard": "scaling"}.get(plot, plot)
    levels = results.levels(scenario)
    if plot == "sustained":
        return any(result.get("rates") for level in levels for result in level["results"].values())
    if plot == "burst":
        return any(result["spans"] and result["summary"] for level in levels for result in level["results"].values())
    return any(figure(level, "shoal", "wall_s") is not None for level in levels)


def _contenders(levels: Sequence[Level]) -> list[str]:
    return list(dict.fromkeys(key for level in levels for key in level["results"]))


def _fidelity(results: Results, key: str) -> list[str]:
    told = results.systems[key.split(":")[0] if not key.startswith("url=") else key]["fidelity"]
    return [f"{told['mean_kl']:.4f}", f"{told['top1']:.3f}"] if "mean_kl" in told else ["-", "-"]


def scaling(results: Results) -> str:
    """Decode rates by streams, ratios, and the share of the ceiling."""
    levels = {level["level"]: level for level in results.levels("scaling")}
    names = [name for name in _STREAMS if name in levels]
    prefill = levels.get("prefill")
    head = ["tokens/s, all streams", *names, "prefill", "mean KL", "top-1"]
    rows = []
    for key in _contenders(list(levels.values())):
        rates = [quoted(figure(levels[name], key, "decode_tokens_per_s")) for name in names]
        rows.append(
            [
                marked(results, key, [levels[name] for name in names]),
                *rates,
                quoted(figure(prefill, key, "prefill_tokens_per_s")),
                *_fidelity(results, key),
            ]
        )
    rows.append(
        [
            "*ceiling*",
            *(number(levels[n]["ceiling"]["decode_tokens_per_s"]) for n in names),
            _prefill_ceiling(prefill),
            "",
            "",
        ]
    )
    parts = [table(head, rows), _times_peers(results, levels, names, prefill), _ours(levels, names)]
    return "\n\n".join(part for part in parts if part)


def _prefill_ceiling(prefill: Level | None) -> str:
    return "-" if prefill is None else number(prefill["ceiling"]["prefill_tokens_per_s"])


def _times_peers(results: Results, levels: Mapping[str, Level], names: Sequence[str], prefill: Level | None) -> str:
    rows = []
    for key in _contenders(list(levels.values())):
        if key != "shoal":
            found = [times(ratio(levels[n], "decode_tokens_per_s", "shoal", key)) for n in names]
            rows.append([results.label(key), *found, times(ratio(prefill, "prefill_tokens_per_s", "shoal", key))])
    return table(["shoal, times", *names, "prefill"], rows) if rows else ""


def _ours(levels: Mapping[str, Level], names: Sequence[str]) -> str:
    """Per stream, speed-up and the share of the ceiling, of this engine."""
    found = {name: figure(levels[name], "shoal", "decode_tokens_per_s") for name in names}
    one = found.get("1")
    rows = [
        ["per stream, tokens/s", *(short(found[n], 1 / int(n)) for n in names)],
        ["times one stream", *(times(f.median / one.median if f and one else None) for f in found.values())],
        ["of the ceiling", *(_share(levels[n], found[n], "decode_tokens_per_s") for n in names)],
        ["peak memory, MB", *(short(figure(levels[n], "shoal", "peak_bytes"), 1e-6) for n in names)],
    ]
    rates = {int(name): f.median for name, f in found.items() if f is not None}
    return table(["shoal", *names], rows) + (f"\n\n{_sweet(rates)}" if rates else "")


def _sweet(rates: Mapping[int, float]) -> str:
    """The smallest batch that is worth it, in a sentence."""
    batch, most = smallest_batch(rates), max(rates.values())
    asked = f"{100 * SWEET_SHARE:.0f} % of the most that any gives ({number(most)} tokens/s)"
    return f"The smallest batch that reaches {asked} is {batch}, with {100 * rates[batch] / most:.0f} %."


def _share(level: Level, found: Figure | None, metric: str) -> str:
    best = level["ceiling"].get(metric)
    if found is None or not best:
        return "-"
    share = best / found.median if metric == "wall_s" else found.median / best
    return f"{100 * share:.0f} %"


_COLUMNS: tuple[tuple[str, str, float], ...] = (
    ("TTFT p50, ms", "ttft_p50_s", 1e3),
    ("p95", "ttft_p95_s", 1e3),
    ("ITL p50, ms", "itl_p50_s", 1e3),
    ("p95", "itl_p95_s", 1e3),
    ("worst gap, ms", "worst_gap_s", 1e3),
    ("tokens/s", "tokens_per_s", 1),
    ("peak, MB", "peak_bytes", 1e-6),
    ("joules_per_answer", "joules an answer", 1),
)


def everything(results: Results, level: Level) -> str:
    """All figures of one level, a row for each contender; columns that nobody has are left out."""
    columns = [c for c in _COLUMNS if any(c[1] in result["summary"] for result in level["results"].values())]
    head = ["", "wall, s", "shoal takes", *(title for title, _, _ in columns), "hits", "of ceiling", "n"]
    rows = []
    for key, result in level["results"].items():
        if "error" in result and not result["summary"]:
            rows.append([results.label(key), f"failed: {result['error']}", *[""] * (len(head) - 2)])
            continue
        wall = figure(level, key, "wall_s")
        versus = "" if key == "shoal" else times(ratio(level, "wall_s", "shoal", key))
        said = [short(figure(level, key, name), scale) for _, name, scale in columns]
        hits, share = percent(figure(level, key, "hit_rate")), _share(level, wall, "wall_s")
        rows.append(
            [marked(results, key, [level]), quoted(wall), versus, *said, hits, share, str(wall.n if wall else 0)]
        )
    return table(head, rows)


def plain(results: Results, scenario: str) -> str:
    """All figures of a scenario, a table a level."""
    levels = results.levels(scenario)
    parts = []
    for level in levels:
        if len(levels) > 1:
            parts.append(f"**{level['level']}**")
        parts.append(everything(results, level))
    return "\n\n".join(parts)


def burst(results: Results) -> str:
    """The burst against peers, its ceiling, and the form with a schema."""
    parts = []
    for level in results.levels("burst"):
        best = level["ceiling"].get("wall_s")
        parts += [
            f"**{level['level']}**" + (f", ceiling {number(best)} s" if best else ""),
            everything(results, level),
            pairs(results, level),
        ]
        valid = figure(level, "shoal", "valid")
        if valid is not None:
            parts.append(
                f"Held to a JSON schema; {100 * valid.median:.0f} % of the outputs ended as valid JSON within "
                f"their tokens."
            )
    return "\n\n".join(parts)


def fanout(results: Results) -> str:
    """Wall time by trunk, and what sharing saves."""
    levels = results.levels("fanout")
    names = [level["level"] for level in levels]
    keys = _contenders(levels)

    def row(title: str, metric: str, over: str, under: str) -> list[str]:
        return [title, *(times(ratio(level, metric, over, under)) for level in levels)]

    walls = [
        [marked(results, key, levels), *(quoted(figure(level, key, "wall_s")) for level in levels)] for key in keys
    ]
    computed = []
    for level in levels:
        on, off = (short(figure(level, key, "computed_tokens")) for key in ("shoal", "shoal:unshared"))
        computed.append(f"{on} / {off}")
    saved = [
        row("shoal, sharing on / off: wall", "wall_s", "shoal", "shoal:unshared"),
        row("median TTFT", "ttft_p50_s", "shoal", "shoal:unshared"),
        ["tokens computed", *computed],
        ["prompt tokens not computed", *(percent(figure(level, "shoal", "hit_rate")) for level in levels)],
        *(row(f"shoal / {results.label(key)}", "wall_s", "shoal", key) for key in keys if not key.startswith("shoal")),
    ]
    return "\n\n".join([table(["wall, s, by trunk", *names], walls), table(["by trunk", *names], saved)])


def agents(results: Results) -> str:
    """The graph against the same calls without it."""
    parts = []
    for level in results.levels("agents"):
        rows = [
            [
                marked(results, key, [level]),
                quoted(figure(level, key, "wall_s")),
                times(ratio(level, "wall_s", "shoal-agents:graph", key)),
                short(figure(level, key, "graphs_per_minute")),
                short(figure(level, key, "calls_per_minute")),
            ]
            for key in level["results"]
        ]
        parts.append(table([level["level"], "wall, s", "the graph takes", "graphs a minute", "calls a minute"], rows))
    return "\n\n".join(parts)


def overhead(results: Results) -> str:
    """Step times of engine and static batch, and what lies outside the runner."""
    level = next(iter(results.levels("overhead")), None)
    if level is None:
        return ""
    rows = [
        [results.label(key), quoted(figure(level, key, "itl_p50_s"), 1e3), short(figure(level, key, "outside_ms"))]
        for key in level["results"]
    ]
    over = ratio(level, "itl_p50_s", "shoal", "shoal:static")
    said = "" if over is None else f"\n\nA step of the engine takes {over:.3f} times one of the static batch."
    return table(["", "step, ms", "outside the runner, ms"], rows) + said


def company(results: Results) -> str:
    """Rates beside a busy process, on all threads and on one."""
    rows = [
        [
            level["level"],
            quoted(figure(level, "shoal", "decode_tokens_per_s")),
            quoted(figure(level, "shoal:one", "decode_tokens_per_s")),
            times(ratio(level, "decode_tokens_per_s", "shoal", "shoal:one")),
        ]
        for level in results.levels("company")
    ]
    return table(["streams", "all threads, tok/s", "one thread, tok/s", "all / one"], rows)


def serve(results: Results) -> str:
    """Rates and first tokens in process and through HTTP."""
    parts = [plain(results, "serve")]
    eight, one = results.level("serve", "8"), results.level("serve", "1")
    rate = ratio(eight, "tokens_per_s", "shoal-http:http", "shoal")
    here, there = figure(one, "shoal", "ttft_p50_s"), figure(one, "shoal-http:http", "ttft_p50_s")
    if rate is not None:
        parts.append(f"Eight streams over HTTP reach {rate:.2f} of the rate in process.")
    if here is not None and there is not None:
        parts.append(f"HTTP adds {1e3 * (there.median - here.median):.1f} ms to the time to first token.")
    return "\n\n".join(parts)


def cold(results: Results) -> str:
    """From nothing to a first answer, and the same answer later: fresh processes, or the one of each system."""
    if results.levels("cold"):
        return "\n\n".join(_fresh(results, level) for level in results.levels("cold"))
    rows = []
    for system in results.systems.values():
        if "cold" in system:
            told = system["cold"]
            rows.append([system["label"], *(number(told[name]) for name in ("load_s", "first_run_s", "warm_run_s"))])
    said = "Process start and load (files in the page cache), then 40 prompt tokens and 16 out: first and warm. "
    return said + "Everything else on this page is warm.\n\n" + table(["", "load, s", "first run, s", "warm, s"], rows)


def _fresh(results: Results, level: Level) -> str:
    rows = [
        [
            marked(results, key, [level]),
            *(quoted(figure(level, key, name)) for name in ("load_s", "wall_s", "warm_s", "cold_s")),
        ]
        for key in level["results"]
    ]
    head = [
        f"{level['level']}, fresh processes",
        "start and load, s",
        "first run, s",
        "warm, s",
        "start to last token, s",
    ]
    return table(head, rows)


def sustained(results: Results) -> str:
    """What a lasting load gives: rates at first and at last, when the machine slowed down, what was done until then."""
    rows = []
    for level in results.levels("sustained"):
        for key in level["results"]:
            found = {name: figure(level, key, name) for name, _, _ in _LASTING}
            slow = found["throttled_after_s"]
            cells = ["never" if name == "throttled_after_s" and slow is None else short(found[name], scale)
                     for name, _, scale in _LASTING]  # fmt: skip
            way = "one by one" if level["level"] == "1" else f"{level['level']} together"
            rows.append([f"{results.label(key)}, {way}", *cells])
    energy = results.document["machine"].get("energy", {})
    said = ""
    if not energy.get("counting"):
        why = "; ".join(f"{name}: {told}" for name, told in energy.get("not_readable", {}).items())
        said = f"\n\nEnergy is not readable here ({why or 'no sensor counts any'})."
    return table(["", *(title for _, title, _ in _LASTING)], rows) + said


_LASTING = (
    ("tokens_per_s", "tokens/s", 1.0),
    ("kept_rate", "kept of the first seconds' rate", 1.0),
    ("throttled_after_s", "slower after, s", 1.0),
    ("recovery_s", "as quick as before after, s", 1.0),
    ("requests", "requests", 1.0),
    ("requests_unthrottled", "before it slowed down", 1.0),
    ("joules_per_answer", "joules an answer", 1.0),
)


def equality(results: Results) -> str:
    """How far outputs agree where the weights are the same file, and whether our own ways agree wholly."""
    rows, broken = [], []
    for level in results.document["levels"]:
        for key, told in level["equality"].items():
            if level["scenario"] not in ("scaling", "burst", "fanout", "overhead", "serve"):
                continue
            where = f"{level['scenario']} {level['level']}"
            equal, common = f"{told['equal']} of {told['of']}", number(told["common_tokens"])
            rows.append([where, results.label(key), equal, common])
            if key.partition(":")[0] in ("shoal", "shoal-http") and told["equal"] != told["of"]:
                broken.append(where)
    said = "Outputs against those of shoal in the same round, where the weights are the same file. Other systems round "
    said += "otherwise, and part where two tokens are nearly equally likely. Sharing and HTTP must change nothing, and "
    said += f"did in {', '.join(broken)}." if broken else "did not."
    return said + "\n\n" + table(["", "against", "equal outputs", "tokens until they part, mean"], rows)


def readme(results: Results, others: Sequence[Results] = ()) -> str:
    """The scoreboard in one short table, and what `others` say of the peers in a sentence each."""
    levels = {level["level"]: level for level in results.levels("scaling")}
    rush, trunk = results.level("burst", "16"), results.level("fanout", "1000")
    head = [
        "",
        "1 stream, tok/s",
        "8 streams",
        "32 streams",
        "burst of 16, s",
        "8 branches of 1,000 tokens, s",
        "mean KL",
    ]
    keys = [key for key in _contenders(list(levels.values())) if not key.startswith("shoal-")]
    rows = []
    for key in keys:
        rates = [short(figure(levels.get(name), key, "decode_tokens_per_s")) for name in ("1", "8", "32")]
        walls = [short(figure(level, key, "wall_s")) for level in (rush, trunk)]
        measured = [*(levels.get(name) for name in ("1", "8", "32")), rush, trunk]
        rows.append([marked(results, key, measured), *rates, *walls, _fidelity(results, key)[0]])
    said = f"{subject(results)}, one run, medians. "
    said += "[All figures, ceilings and plots](docs/benchmarks.md)."
    if any(level.get("relative") for level in results.document["levels"]):
        said = "~: others used the machine meanwhile; systems ran in turns, so that ratios hold. " + said
    if results.document["quick"]:
        said = "A quick run, whose figures say nothing. " + said
    also = "\n".join(f"- {about}: {said}" for about, said in _beside(others).items())
    return "\n\n".join(part for part in (also, table(head, rows), said_pairs(results), said) if part)


def _beside(others: Sequence[Results]) -> dict[str, str]:
    """What other results say, by subject; shapes of models that people run come first, and speeds by streams."""
    said: dict[str, str] = {}
    shapes_first = sorted(
        others, key=lambda o: (not o.document["model"].get("random_weights"), not o.levels("scaling"))
    )
    for other in shapes_first:
        said[subject(other)] = f"{said.get(subject(other), '')} {said_pairs(other)}".strip()
    return said


def subject(results: Results) -> str:
    """Machine and model, in words."""
    machine, model = results.document["machine"], results.document["model"]
    random = ", random weights" if model.get("random_weights") else ""
    return f"{machine['threads']} cores of {machine['cpu']}, {model['name']}{random}"


def said_pairs(results: Results) -> str:
    """What the pairs of runs say of each peer, in a sentence: decoding by streams, prefill, bursts."""
    levels = [level for level in results.levels("scaling") if "pairs" in level]
    streams = [level for level in levels if level["level"].isdigit()]
    bursts = [level for level in results.levels("burst") if "pairs" in level]
    parts = []
    for key in dict.fromkeys(key for level in (*levels, *bursts) for key in level["pairs"]):
        if key.startswith("shoal"):
            continue
        said = []
        rates = {level["level"]: level["pairs"].get(key, {}).get("decode_tokens_per_s") for level in streams}
        if found := {name: rate for name, rate in rates.items() if rate}:
            times = " / ".join(f"{rate['ratio']:.1f}" for rate in found.values())
            said.append(f"decoding {times} times as fast at {' / '.join(found)} streams")
        prefill = next((level["pairs"].get(key) for level in levels if level["level"] == "prefill"), None)
        if prefill and "prefill_tokens_per_s" in prefill:
            said.append(f"prefill {prefill['prefill_tokens_per_s']['ratio']:.1f} times")
        for burst in bursts:
            if wall := burst["pairs"].get(key, {}).get("wall_s"):
                count, interval = burst["level"].split()[0], f"{wall['low']:.2f} to {wall['high']:.2f}"
                said.append(
                    f"the burst of {count} in {wall['ratio']:.2f} of the time ({interval}, {wall['pairs']:.0f} pairs)"
                )
        if said:
            parts.append(f"{results.label(key)}: {', '.join(said)}")
    return f"shoal against {'; against '.join(parts)}." if parts else ""


def precisions(results: Results) -> str:
    """This engine on several files of one model: speed by streams, memory, and how far each is from the exact one."""
    levels = {level["level"]: level for level in results.levels("scaling")}
    names = [name for name in _STREAMS if name in levels]
    keys = [key for key in _contenders(list(levels.values())) if key == "shoal" or key.startswith("shoal@")]
    files = {key: results.systems[key].get("file_bytes") for key in keys}
    if len({results.systems[key]["file"] for key in keys}) < 2 or not names:
        return ""
    rows = []
    for key in keys:
        rates = [quoted(figure(levels[n], key, "decode_tokens_per_s")) for n in names]
        peak = short(figure(levels[names[-1]], key, "peak_bytes"), 1e-6)
        size = "-" if files[key] is None else number(files[key] / 1e6)
        label = marked(results, key, [levels[n] for n in names])
        rows.append([f"{label}, `{results.systems[key]['file']}`", *rates, size, peak, *_fidelity(results, key)])
    head = ["tokens/s, all streams", *names, "file, MB", f"peak at {names[-1]}, MB", "mean KL", "top-1"]
    swing = [figure(levels[names[0]], key, "decode_tokens_per_s") for key in keys]
    best = [figure(levels[name], key, "decode_tokens_per_s") for key in keys for name in names]
    slowest = min((f.median for f in swing if f is not None), default=0.0)
    fastest = max((f.median for f in best if f is not None), default=0.0)
    said = (
        f"From the slowest file at one stream to the fastest at any: {fastest / slowest:.1f} times." if slowest else ""
    )
    return table(head, rows) + "\n\n" + said
