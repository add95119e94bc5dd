"""Errors as the APIs give them, with the right status: OpenAI's `{"error": {"message", "type", "param", "code"}}`, and
Anthropic's `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import Scope

from shoal.errors import (
    ConfigError,
    DownloadError,
    EngineClosedError,
    GraphError,
    HistoryError,
    KVBudgetError,
    MemoryPressureError,
    ModelError,
    ModelNotFoundError,
    PowerLimitError,
    PromptTooLongError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    ShoalError,
)
from shoal.types import FinishReason, Result

ANTHROPIC = "/v1/messages"  # paths that begin so have errors in Anthropic's shape
RETRY_S = 5  # when a model is being switched, nobody knows how long it takes


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        if self.status >= 500:
            kind = "server_error"
        else:
            kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """The whole answer, in the shape of the API that was called."""
        if scope["path"].startswith(ANTHROPIC):
            request_id = scope["state"]["record"]["request_id"]
            return JSONResponse(
                anthropic_body(self, request_id), self.status, {**self.headers, "request-id": request_id}
            )
        return JSONResponse(self.body, self.status, self.headers)


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The error object of the Messages API, which names the field in its message."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    named = error.param is None or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_S)})


def from_shoal(error: ShoalError, names: Mapping[str, str] | None = None) -> ApiError:
    """The answer for one of our errors. `names` maps engine fields to those of the API that was called."""
    text = str(error)
    if isinstance(error, QueueFullError):
        retry = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(429, text, code="queue_full", headers={"Retry-After": retry})
    if isinstance(error, PowerLimitError):
        retry = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(503, text, code="power_limit", headers={"Retry-After": retry})
    if isinstance(error, MemoryPressureError):
        retry = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(503, text, code="memory_pressure", headers={"Retry-After": retry})
    if isinstance(error, RequestError):
        code = {PromptTooLongError: "context_length_exceeded", KVBudgetError: "kv_budget_exceeded"}
        param = (names or {}).get(error.param, error.param)
        return bad_request(text, param, code.get(type(error), "invalid_value"))
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, text, param="model", code="model_not_found")
    if isinstance(error, EngineClosedError):
        return unavailable(text, "engine_unavailable")
    if isinstance(error, ReplicaLostError):
        return unavailable(text, "replica_lost")
    if isinstance(error, DownloadError):
        return ApiError(502, text, param="model", code="download_failed")
    if isinstance(error, HistoryError):
        return ApiError(507, text, code="history_failed")
    if isinstance(error, GraphError):
        return bad_request(text, "graph", "graph_invalid")
    if isinstance(error, ModelError | ConfigError):
        return bad_request(text, "model", "model_unusable")
    return ApiError(500, text, code="generation_failed")


def from_result(result: Result, names: Mapping[str, str] | None = None) -> ApiError | None:
    """The error in a result, or None when it is an answer. `names` as in `from_shoal`."""
    if result.finish_reason is FinishReason.TIMEOUT:
        return ApiError(504, "the request's deadline passed", param="timeout", code="deadline_exceeded")
    if result.finish_reason is FinishReason.ERROR:
        error = result.error
        return (
            from_shoal(error, names)
            if error is not None
            else ApiError(500, "generation failed", code="generation_failed")
        )
    if result.finish_reason is FinishReason.ABORTED:
        return unavailable("the model was unloaded or the server is stopping", "engine_unavailable")
    return None


def from_validation(error: RequestValidationError) -> ApiError:
    """What is wrong with a request's body: of several faults the one that is named most closely."""
    # A union has a fault for each of its branches: that of the branch whose type is right says more.
    first = max(error.errors(), key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")))
    kind = first["type"]
    place = _field(first["loc"])
    if kind == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", None, "invalid_json")
    if kind == "contradiction":
        return bad_request(first["msg"], first["ctx"]["param"])
    if kind == "too_many":
        return bad_request(f"{place or 'the body'}: {first['msg']}", place or None, "too_many_values")
    if not place:
        return bad_request("the body must be a JSON object, sent as application/json", None, "invalid_body")
    if kind == "extra_forbidden":
        return bad_request(f"unknown field: {place}", place, "unknown_parameter")
    if kind == "none_required":
        return bad_request(f"{place} is not supported by this server", place, "unsupported_parameter")
    if kind == "missing":
        return bad_request(f"{place} is missing", place, "missing_required_parameter")
    return bad_request(f"{place}: {first['msg']}", place, "invalid_value")


def _field(loc: Sequence[str | int]) -> str:
    """A dotted path; what pydantic adds for the branch of a union is left out."""
    parts = [str(p) for p in loc if isinstance(p, int) or (p.replace("_", "").isalnum() and not p[:1].isupper())]
    tags = {"body", "str", "int", "float", "bool", "none", "dict", "list", "text", "refusal"}
    kept = [p for i, p in enumerate(parts) if not (p in tags and (i == 0 or _is_tag(parts, i)))]
    return ".".join(kept)


def _is_tag(parts: Sequence[str], i: int) -> bool:
    # The Responses API has a field `text` at the top; anywhere else the word is the branch of a union.
    return not (parts[i] == "text" and i == 1)
