#!/usr/bin/env python
"""Where a chat's next prompt parts from what was generated, for every template of a directory; prints a table.

    scripts/template_turns.py DIR

DIR holds `*.jinja`. A prompt is rendered, an answer is written behind it as a model writes it, and the next prompt is
rendered with that answer in the history as clients send it back. A cell says how many characters of the answer the next
prompt still begins with, of how many: what is missing has to be computed again, unless it is computed ahead. `-`: the
template does not take such a conversation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from shoal.errors import InvalidRequestError
from shoal.models.template import ChatTemplate

USER = {"role": "user", "content": "What is the weather in Brno?"}
NEXT = {"role": "user", "content": "And tomorrow?"}
CALL = {"name": "get_weather", "arguments": {"place": "Brno"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdef123", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": "21"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {}}}
SAID = "It is sunny, and warm for the season."
CASES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "answer": (SAID, [{"role": "assistant", "content": SAID}, NEXT], None),
    "trailing newline": (f"{SAID}\n", [{"role": "assistant", "content": f"{SAID}\n"}, NEXT], None),
    "thoughts": (f"<think>\nLet me see.\n</think>\n\n{SAID}", [{"role": "assistant", "content": SAID}, NEXT], None),
    "tool call": (
        '<tool_call>\n{"name":"get_weather","arguments":{"place":"Brno"}}\n</tool_call>',
        [CALLED, RESULT],
        [TOOL],
    ),
}


def main() -> None:
    """Print the table, and how many templates part in each case."""
    names = list(CASES)
    parted = dict.fromkeys(names, 0)
    rendered = dict.fromkeys(names, 0)
    print(f"| template | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"))
        cells = []
        for name in names:
            written, kept = parting(template, name)
            cells.append("-" if kept is None else f"{kept} of {written}")
            rendered[name] += kept is not None
            parted[name] += kept is not None and kept < written
        print(f"| {path.stem} | {' | '.join(cells)} |")
    told = (f"{name}: {parted[name]} of {rendered[name]} part" for name in names)
    print(f"\n{'; '.join(told)}")


def parting(template: ChatTemplate, name: str) -> tuple[int, int | None]:
    """The characters of the answer, and how many of them the next prompt begins with; None where it is refused."""
    answer, history, tools = CASES[name]
    try:
        before = template.render([USER], tools=tools or [])
        after = template.render([USER, *history], tools=tools or [])
    except InvalidRequestError:
        return len(answer), None
    whole = before + answer
    same = next(
        (at for at, (a, b) in enumerate(zip(whole, after, strict=False)) if a != b), min(len(whole), len(after))
    )
    return len(answer), same - len(before)  # below 0: the prompt itself is another


if __name__ == "__main__":
    main()
