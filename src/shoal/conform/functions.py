"""The Berkeley Function-Calling Leaderboard's own checker over its packaged cases, with forced answers.

A case's parameters are narrowed to values that its checker accepts, and the tool is named: what comes back depends on
the server alone (names, types, nesting, encoding), not on how clever its model is.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from shoal.conform.outcome import CaseOutcome, Target, attempt
from shoal.errors import BackendError

_FILES = {"simple_python": 40, "multiple": 30, "live_simple": 30}
"""Cases of each file, from its beginning: every one is a call of a model."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def functions(target: Target) -> Iterator[CaseOutcome]:
    """The first cases of three files."""
    import httpx

    data, check = _packaged()
    with httpx.Client(base_url=target.url, timeout=120) as client:
        for name, count in _FILES.items():
            cases = _lines(data / f"BFCL_v4_{name}.json")[:count]
            truths = {
                each["id"]: each["ground_truth"] for each in _lines(data / "possible_answer" / f"BFCL_v4_{name}.json")
            }
            for case in cases:
                truth = truths[case["id"]]
                yield attempt(case["id"], lambda c=case, t=truth, n=name: _run(client, target.model, check, c, t, n))  # type: ignore[misc]


def _packaged() -> tuple[Path, Any]:
    """The cases, and their checker. It imports every provider's SDK for one flag of a model: that table is stood in."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise BackendError("bfcl-eval is not installed", hint="pip install --no-deps bfcl-eval")
    table = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=True))  # type: ignore[attr-defined]
    sys.modules[table.__name__] = table
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return Path(spec.origin).parent / "data", checker.ast_checker


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _run(client: Any, model: str, check: Any, case: Any, truth: Any, category: str) -> None:
    from bfcl_eval.constants.enums import Language

    ((name, allowed),) = truth[0].items()
    tools = [_tool(function, allowed if function["name"] == name else None) for function in case["function"]]
    called = _safe(name)
    body = {"model": model, "messages": case["question"][0], "tools": tools, "max_tokens": 600, "temperature": 0}
    body["tool_choice"] = {"type": "function", "function": {"name": called}}
    answer = client.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise AssertionError(f"status {answer.status_code}: {answer.text}")
    calls = answer.json()["choices"][0]["message"].get("tool_calls") or []
    output = [{call["function"]["name"]: json.loads(call["function"]["arguments"])} for call in calls]
    verdict = check(case["function"], output, truth, Language.PYTHON, category, model)
    if not verdict["valid"]:
        raise AssertionError(f"{verdict['error_type']}: {verdict['error']}")


def _safe(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def _tool(function: Any, allowed: Any) -> dict[str, Any]:
    schema = _schema(function["parameters"])
    if allowed is not None:
        known = {name: values for name, values in allowed.items() if values != [""]}
        schema["properties"] = {name: _narrow(schema["properties"][name], values) for name, values in known.items()}
        wanted = {name for name, values in allowed.items() if "" not in values} | set(schema.get("required", ()))
        schema["required"] = [name for name in known if name in wanted]
        schema["additionalProperties"] = False
    told = {"name": _safe(function["name"]), "description": function["description"], "parameters": schema}
    return {"type": "function", "function": told}


def _schema(value: Any) -> Any:
    """Parameters with the types of JSON Schema; the cases have Python's."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _schema(item) for key, item in value.items() if key not in ("default", "optional")}
    if isinstance(plain.get("type"), str):
        plain["type"] = _TYPES.get(plain["type"], plain["type"])
    return plain


def _narrow(schema: Any, values: list[Any]) -> dict[str, Any]:
    """A schema of the accepted values: of an object, each key has its own."""
    given = [value for value in values if value != ""]
    if all(isinstance(value, dict) for value in given):
        return {"anyOf": [_object(value) for value in given]}
    if any(isinstance(item, dict) for value in given if isinstance(value, list) for item in value):
        lists = [value for value in given if isinstance(value, list)]
        return {"anyOf": [_listing(value) for value in lists]}
    if "number" in (schema.get("type"), schema.get("items", {}).get("type")):  # the cases hold a number to its type
        given = [_floating(value) for value in given]
    return {"enum": given}


def _floating(value: Any) -> Any:
    if isinstance(value, list):
        return [_floating(item) for item in value]
    return float(value) if isinstance(value, int) else value


def _listing(value: list[Any]) -> dict[str, Any]:
    items = [_object(item) for item in value]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"const": value}
    fields = {name: _narrow({}, each) for name, each in value.items() if each != [""]}
    needed = [name for name, each in value.items() if "" not in each]
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}
