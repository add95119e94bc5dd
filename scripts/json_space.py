"""What white space in JSON does to a small model's answers: python scripts/json_space.py

The same questions under a schema with lists, greedy, with each way of letting white space in. Counts lists that were
closed at once, answers that ended before `max_tokens`, and tokens. No timing: it may run beside anything.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal import Engine, Request, SamplingParams
from shoal.sampling import grammar

WAYS = {"none": "", "a space": "(?: )?", "a space, or a line and its indent": r"(?: |\n {0,16})?"}
QUESTIONS = (
    "Name fruits and vegetables for a salad.", "Plan a weekend in Prague.", "What do I need to bake bread?",
    "List animals of the forest and of the sea.", "Write down tools of a carpenter.", "Which planets are there?",
    "Give reasons to learn to swim.", "What should a traveller pack?", "Name parts of a bicycle.",
    "What are the steps of making tea?", "List instruments of an orchestra.", "Name capitals of Europe.",
)  # fmt: skip
STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 6}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 60}, "items": STRINGS, "notes": STRINGS},
    "required": ["title", "items", "notes"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    model = parser.parse_args().model
    for way, pattern in WAYS.items():
        grammar.LIST_SPACE = pattern
        with Engine.load(model) as engine:
            requests = [
                Request(
                    messages=[{"role": "user", "content": f"{question} Answer as JSON with title, items and notes."}],
                    sampling=SamplingParams(max_tokens=400, json_schema=SCHEMA),
                )
                for question in QUESTIONS
            ]
            results = engine.run(requests).results
        whole = [json.loads(result.text) for result in results if result.finish_reason == "stop"]
        lists = [document[name] for document in whole for name in ("items", "notes")]
        empty = sum(not found for found in lists)
        tokens = sum(len(result.tokens) for result in results)
        items = sum(map(len, lists))
        told = f"whole {len(whole)} of {len(results)}, lists empty {empty} of {len(lists)}, items {items}"
        print(f"{way:36} {told}, tokens {tokens}")


if __name__ == "__main__":
    main()
