"""`langchain-tests`: the standard suites for a chat model, over `langchain-openai` unmodified."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from shoal.conform.outcome import CaseOutcome, Target, told

_TESTS = """
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests


class Given:
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return dict(base_url={url!r}, model={model!r}, api_key="none", timeout=60, stream_usage=True)

    @property
    def supports_json_mode(self):
        return True


class TestUnit(Given, ChatModelUnitTests):
    pass


class TestIntegration(Given, ChatModelIntegrationTests):
    pass
"""


def langchain(target: Target) -> Iterator[CaseOutcome]:
    """Every test of both suites that applies."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "test_standard.py").write_text(_TESTS.format(url=target.url, model=target.model))
        report = root / "report.xml"
        call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        call += [
            "--asyncio-mode=auto",
            "-o",
            "asyncio_default_test_loop_scope=session",
            "--timeout=120",
            f"--junitxml={report}",
            "-c",
            "/dev/null",
            str(root),
        ]
        done = subprocess.run(call, cwd=root, capture_output=True, text=True, check=False, timeout=3600)
        if not report.exists():
            yield CaseOutcome("the suite runs", "fail", told(done.stdout[-300:] + done.stderr[-300:]))
            return
        for case in ElementTree.parse(report).iter("testcase"):
            yield _outcome(case)


def _outcome(case: ElementTree.Element) -> CaseOutcome:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    for kind, status in (("failure", "fail"), ("error", "fail"), ("skipped", "skip")):
        found = case.find(kind)
        if found is not None:
            why = re.sub(r"^pytest\.\w+: ", "", found.get("message") or "")
            return CaseOutcome(name, status, told(why))  # type: ignore[arg-type]
    return CaseOutcome(name, "pass")
