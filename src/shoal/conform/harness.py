"""`lm-eval` as it is, over a local task: its `local-completions` model scores and writes through the server."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.conform.outcome import CaseOutcome, Target, attempt

_QUESTIONS = [
    ("The capital of France is", [" Paris", " a fish", " seven"]),
    ("Two plus two equals", [" four", " a river", " blue"]),
    ("The sun rises in the", [" east", " soup", " letter"]),
    ("Water freezes into", [" ice", " music", " Tuesday"]),
    ("A week has seven", [" days", " moons", " doors"]),
    ("Bees make", [" honey", " steel", " noise of planes"]),
    ("The opposite of hot is", [" cold", " green", " quick"]),
    ("Shakespeare wrote", [" plays", " volcanoes", " sandwiches"]),
]
_CHOICES = """task: conform_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
_WORDS = """task: conform_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


def harness(target: Target) -> Iterator[CaseOutcome]:
    """A task of choices, which needs log-likelihoods, and one of words, which does not."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lines = [json.dumps({"question": question, "choices": choices}) for question, choices in _QUESTIONS]
        (root / "data.jsonl").write_text("\n".join(lines))
        for name, text in (("choices", _CHOICES), ("words", _WORDS)):
            (root / f"{name}.yaml").write_text(text.format(path=root / "data.jsonl"))
        for number, (question, _) in enumerate(_QUESTIONS):
            yield attempt(f"log-likelihoods: {question}", lambda n=number: _scored(root, target, n))  # type: ignore[misc]
        yield attempt("accuracy of the choices", lambda: _accurate(root, target))
        yield attempt("texts until a stop", lambda: _evaluate(root, target, "conform_words"))


_DONE: dict[tuple[str, str], Any] = {}


def _evaluate(root: Path, target: Target, task: str) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    key = (target.url, task)
    if key not in _DONE:
        arguments = {
            "base_url": f"{target.url}/completions",
            "model": target.model,
            "max_retries": 1,
            "num_concurrent": 1,
        }
        try:
            _DONE[key] = lm_eval.simple_evaluate(
                model="local-completions",
                model_args=arguments,
                tasks=[task],
                task_manager=TaskManager(include_path=str(root), include_defaults=False),
                bootstrap_iters=0,
                log_samples=True,
            )
        except Exception as error:  # noqa: BLE001 - each case tells it
            _DONE[key] = error
    if isinstance(_DONE[key], Exception):
        raise _DONE[key]
    return _DONE[key]


def _scored(root: Path, target: Target, number: int) -> None:
    samples = _evaluate(root, target, "conform_choices")["samples"]["conform_choices"]
    (sample,) = [each for each in samples if each["doc_id"] == number]
    likelihoods = [float(each[0]) for each in sample["filtered_resps"]]
    if len(likelihoods) != 3 or not all(math.isfinite(value) and value < 0 for value in likelihoods):
        raise AssertionError(f"log-likelihoods are {likelihoods}")


def _accurate(root: Path, target: Target) -> None:
    accuracy = _evaluate(root, target, "conform_choices")["results"]["conform_choices"]["acc,none"]
    if accuracy < 0.75:  # chance is a third; every model that reads at all knows these
        raise AssertionError(f"accuracy is {accuracy:.2f}")
