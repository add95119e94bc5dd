"""A run as a Markdown document."""

from __future__ import annotations

import time

from shoal.server.swarmbench.record import Document


def to_markdown(run: Document) -> str:
    """Question, cards and numbers, for reading elsewhere."""
    model, together = run["model"], run["together"]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["created"]))
    parts = [f"# {run['title']}"]
    for turn in run["earlier"]:
        parts += [f"## {turn['question']}", turn["answer"]]
    parts += [
        f"## {run['question']}" if run["earlier"] else run["question"],
        f"*{when}, {model['name']} ({model['precision']}), {run['state']}*",
    ]
    for card in together["cards"]:
        facts = f"{card['state']}, {card['tokens']} tokens, {card['tokens_per_s']} tok/s"
        if card["ttft_ms"] is not None:
            facts += f", first token after {card['ttft_ms']} ms, {card['cached_tokens']} cached"
        parts += [f"## {card['name']}", f"*{card['task']}*", card["text"].strip(), f"({facts})"]
    parts += ["## Numbers", _numbers(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbers(run: Document) -> str:
    lines = []
    for name, title in (("together", "Together"), ("one_by_one", "One by one")):
        summary = run[name]["summary"] if run[name] else None
        if summary:
            rate = f"{summary['tokens']} tokens in {summary['wall_s']:.2f} s, {summary['tokens_per_s']} tok/s"
            lines.append(f"- {title}: {rate}, shared prefix {summary['prefix_tokens']} tokens")
    return "\n".join(lines) or "- nothing has run"
