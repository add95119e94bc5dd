#!/usr/bin/env python
"""Chat templates against `transformers`: the same text, and nothing of tools dropped; writes docs/templates.md.

    scripts/check_templates.py DIR --oracle PYTHON [--write docs/templates.md]

DIR holds `*.jinja`. Each is rendered in five conversations, here and by the `transformers` of the environment whose
Python is `--oracle`. Then each of them again with content that spells the template's own control tokens: it must yield
the control tokens that harmless content yields. The exit status is 1 where a text that `transformers` renders whole is
not rendered, or is another.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.errors import InvalidRequestError
from shoal.models.special import Special, SpecialFinder
from shoal.models.template import ChatTemplate

ORACLE = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
job, out = json.load(sys.stdin), {}
for name, source in job["templates"].items():
    for title, (messages, tools) in job["conversations"].items():
        try:
            texts, _ = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True,
                                             bos_token="<s>", eos_token="</s>")
            out[f"{name}|{title}"] = texts[0]
        except Exception:
            out[f"{name}|{title}"] = None
json.dump(out, sys.stdout)
"""

SCHEMA = {"type": "object", "properties": {"mesto": {"type": "string", "description": "Mesto \u6771\u4eac"}}}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Po\u010das\u00ed <now> & 'later'", "parameters": SCHEMA},
}
SYSTEM = {"role": "system", "content": 'You are "helpful".'}
USER = {"role": "user", "content": "  What's the weather in T\u0159eb\u00ed\u010d? \u4f60\u597d <b>\n"}
CALL = {"name": "get_weather", "arguments": {"mesto": "Brno"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdef123", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"temp": 21}'}
ANSWER = {"role": "assistant", "content": "It is sunny.\n"}
NEXT = {"role": "user", "content": "And tomorrow?"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "tools": ([SYSTEM, USER], [TOOL]),
    "tool round": ([USER, CALLED, RESULT], [TOOL]),
    "round and on": ([SYSTEM, USER, CALLED, RESULT, ANSWER, NEXT], [TOOL]),
}
MUST_SHOW = {
    "tools": ("get_weather", "later", "mesto"),
    "tool round": ("get_weather", "later", "Brno", "21"),
    "round and on": ("get_weather", "later", "Brno", "21", "And tomorrow?"),
}
MARKER = re.compile(r"<[|\uff5c][^<>\n ]{1,40}?[|\uff5c]>|</?s>|\[/?[A-Z_]{3,30}\]|<(?:start|end)_of_turn>")


def main() -> int:
    """Compare, print what differs, write the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--oracle", required=True, help="a Python with transformers")
    parser.add_argument("--write", type=Path, help="the page of which the table is a part")
    args = parser.parse_args()
    sources = {path.stem: path.read_text("utf-8") for path in sorted(args.directory.glob("*.jinja"))}
    job = json.dumps({"templates": sources, "conversations": CONVERSATIONS})
    done = subprocess.run([args.oracle, "-c", ORACLE], input=job, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    rows, counts, wrong = [], {"same": 0, "mended": 0, "both refuse": 0, "only here": 0}, 0
    for name, source in sources.items():
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        row = [name]
        for title in CONVERSATIONS:
            verdict = compare(template, title, theirs[f"{name}|{title}"])
            counts[verdict] = counts.get(verdict, 0) + 1
            wrong += verdict.startswith("WRONG")
            row.append(verdict)
        leaks = injected(template, source)
        wrong += bool(leaks)
        print(f"{name:60} {', '.join(row[1:])}{'; INJECTED: ' + leaks if leaks else ''}")
        rows.append(row)
    print(counts)
    if args.write:
        write(args.write, rows, counts)
    return int(wrong > 0)


def compare(template: ChatTemplate, title: str, theirs: str | None) -> str:
    """How the text of one conversation stands to that of transformers (None: it refuses)."""
    messages, tools = CONVERSATIONS[title]
    try:
        ours: str | None = template.render(messages, tools=tools)
    except InvalidRequestError:
        ours = None
    shown = [all(word in (text or "") for word in MUST_SHOW.get(title, ())) for text in (ours, theirs)]
    if theirs is None:
        return "both refuse" if ours is None else "only here"
    if ours == theirs:
        return "same" if shown[0] else "WRONG: dropped"
    if ours is None:
        return "WRONG: refused"
    return "mended" if shown[0] and not shown[1] else "WRONG: differs"


def injected(template: ChatTemplate, source: str) -> str:
    """Titles of the conversations in which content that spells control tokens changes which there are."""
    tokens = sorted({*MARKER.findall(source), "<s>", "</s>"})
    finder = SpecialFinder({token: Special(i, control=True) for i, token in enumerate(tokens)})
    found = []
    for title, (messages, tools) in CONVERSATIONS.items():
        kinds = []
        for text in ("harmless", "harmless" + "".join(tokens)):
            try:
                rendered = template.render(_with(messages, text), tools=_with(tools, text))
            except InvalidRequestError:
                break
            kinds.append([piece for piece in finder.cut(rendered, control=True) if isinstance(piece, int)])
        if len(kinds) == 2 and kinds[0] != kinds[1]:
            found.append(title)
    return ", ".join(found)


def _with(value: Any, text: str) -> Any:
    """`value` with `text` for each string but roles, types and ids."""
    if isinstance(value, dict):
        fixed = ("role", "type", "id", "tool_call_id")
        return {key: item if key in fixed else _with(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_with(item, text) for item in value]
    return text if isinstance(value, str) else value


def write(path: Path, rows: list[list[str]], counts: dict[str, int]) -> None:
    """Put the table in place of the one that is there, behind the line that begins it."""
    head = path.read_text("utf-8").split("<!-- generated -->")[0]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    lines = [f"{len(rows)} templates in {len(CONVERSATIONS)} conversations: {told}.", ""]
    lines += [f"| template | {' | '.join(CONVERSATIONS)} |", "|---" * (1 + len(CONVERSATIONS)) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    path.write_text(head + "<!-- generated -->\n" + "\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
