"""The suites by name."""

from __future__ import annotations

from shoal.conform.comply import comply
from shoal.conform.functions import functions
from shoal.conform.harness import harness
from shoal.conform.langchain import langchain
from shoal.conform.matrix import matrix
from shoal.conform.outcome import Suite
from shoal.conform.shapes import shapes

SUITES: dict[str, Suite] = {
    "openai-sdk": matrix,
    "schemas": shapes,
    "open-responses": comply("open-responses"),
    "openai-chat": comply("openai-chat"),
    "anthropic": comply("anthropic"),
    "lm-eval": harness,
    "bfcl": functions,
    "langchain": langchain,
}
ABOUT = {
    "openai-sdk": "our own matrix over the `openai` SDK",
    "schemas": "our own sample in the manner of JSONSchemaBench, answers checked by `jsonschema`",
    "open-responses": "the Open Responses compliance cases, as `llm-comply` has them",
    "openai-chat": "`llm-comply`'s cases for chat completions",
    "anthropic": "`llm-comply`'s cases for the Messages API",
    "lm-eval": "`lm-eval`, its `local-completions` over a local task",
    "bfcl": "`bfcl-eval`'s checker over its packaged cases, with forced answers",
    "langchain": "`langchain-tests`' standard suites for a chat model",
}
