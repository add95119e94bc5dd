"""OpenTelemetry spans of runs, where `opentelemetry-api` is installed: one per run, node and attempt."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any, Protocol


class Spans(Protocol):
    """Where spans go."""

    def begin_node(self, node: str) -> None:
        """A node's inputs are there."""
        ...

    def attempt(self, node: str, record: Mapping[str, Any]) -> None:
        """An attempt ended; its record has all there is to tell."""
        ...

    def end_node(self, node: str, state: str, cause: str | None) -> None:
        """A node ended. It may never have begun."""
        ...

    def end(self, state: str) -> None:
        """The run ended."""
        ...


class NoSpans:
    """Spans that go nowhere: no tracer is configured."""

    def begin_node(self, node: str) -> None:
        """Nothing."""

    def attempt(self, node: str, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def end_node(self, node: str, state: str, cause: str | None) -> None:
        """Nothing."""

    def end(self, state: str) -> None:
        """Nothing."""


class OpenTelemetrySpans:
    """Spans through the global tracer provider. Attempts carry the fields of their records as `shoal.*` attributes."""

    def __init__(self, task_id: str, graph: str) -> None:
        from opentelemetry import trace

        self._api = trace
        self._tracer = trace.get_tracer("shoal")
        attributes = {"shoal.task_id": task_id, "shoal.graph": graph}
        self._run = self._tracer.start_span(f"graph {graph}", attributes=attributes)
        self._nodes: dict[str, Any] = {}
        self._contexts: dict[str, Any] = {}  # a cancelled attempt ends after its node

    def begin_node(self, node: str) -> None:
        """A span below the run's."""
        context = self._api.set_span_in_context(self._run)
        span = self._tracer.start_span(f"node {node}", context, attributes={"shoal.agent_id": node})
        self._nodes[node] = span
        self._contexts[node] = self._api.set_span_in_context(span)

    def attempt(self, node: str, record: Mapping[str, Any]) -> None:
        """A span below the node's, from submission to end."""
        end = time.time_ns()
        start = end - int(record["latency_ms"] * 1e6)
        facts = {f"shoal.{name}": value for name, value in record.items() if value is not None and name != "kind"}
        span = self._tracer.start_span(
            f"attempt {record['request_id']}", self._contexts[node], attributes=facts, start_time=start
        )
        if record["outcome"] != "ok":
            span.set_status(self._api.StatusCode.ERROR, record["cause"])
        span.end(end)

    def end_node(self, node: str, state: str, cause: str | None) -> None:
        """End the node's span, with its state."""
        span = self._nodes.pop(node, None)
        if span is None:
            return
        span.set_attribute("shoal.state", str(state))
        if cause is not None:
            span.set_attribute("shoal.cause", cause)
        span.end()

    def end(self, state: str) -> None:
        """End the run's span."""
        self._run.set_attribute("shoal.state", str(state))
        self._run.end()


def make_spans(task_id: str, graph: str) -> Spans:
    """Spans for one run, or nothing where OpenTelemetry is not installed."""
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.trace") is None:
        return NoSpans()
    return OpenTelemetrySpans(task_id, graph)
