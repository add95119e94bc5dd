"""One JSON line per call on standard error. Prompts and keys are never in it unless prompts are asked for."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from shoal.agents.trace.trace import Trace
from shoal.processes import process_mb

logger = logging.getLogger("shoal.server")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, and the fields of `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        document = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str, ensure_ascii=False)


def log_call(fields: dict[str, Any]) -> None:
    """Note one call that has ended."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("call", extra={"fields": {**fields, "process_mb": process_mb()}})


class DecisionLog(Trace):
    """A trace whose records are lines of the log: a server that runs for months keeps none of them."""

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Log a record."""
        told = dict(record)
        logger.info("decision", extra={"fields": told})
        return told


def configure(level: int = logging.INFO) -> None:
    """Send the server's log, and uvicorn's, to standard error as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("shoal", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
        log.setLevel(level)
