"""`llm-comply`: the Open Responses compliance cases, and like ones for chat completions and Anthropic's Messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from shoal.conform.outcome import CaseOutcome, Suite, Target, told
from shoal.errors import ShoalError

_RUN = "import sys; from llm_comply.cli import main; sys.exit(main())"


def comply(form: str) -> Suite:
    """The suite of one API, by the name that `llm-comply` gives it."""

    def run(target: Target) -> Iterator[CaseOutcome]:
        call = [sys.executable, "-c", _RUN, "run", "--json", "--format", form, "-u", target.url, "-k", "none"]
        call += ["-m", target.model, "--timeout", "120"]
        done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=1800)
        start = done.stdout.find("{")
        if start < 0:
            raise ShoalError(f"llm-comply said nothing: {told(done.stderr)}")
        for result in json.loads(done.stdout[start:])["results"]:
            status = {"passed": "pass", "failed": "fail"}.get(result["status"], "skip")
            why = told("; ".join(result.get("errors", ())))
            yield CaseOutcome(result["id"], status, why if status != "pass" else "")  # type: ignore[arg-type]

    return run
