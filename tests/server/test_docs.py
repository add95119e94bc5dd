"""The tables of `docs/server.md` are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from shoal.server.anthropic.schemas import CountRequest, MessagesRequest
from shoal.server.openai.fields import Common, Sampled
from shoal.server.openai.responses_schemas import ResponsesRequest
from shoal.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadRequest,
    TokenizeRequest,
    UnloadRequest,
)
from shoal.server.swarmbench.schemas import (
    GraphFile,
    GraphRequest,
    PullRequest,
    RenameRequest,
    SettingsRequest,
    StopRequest,
    SwarmRequest,
)
from tests.support.live import Live, error_of

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
SECTIONS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "Fields of every endpoint that generates": (Common, None),
    "Fields of chat and text completions": (Sampled, Common),
    "`POST /v1/chat/completions`": (ChatRequest, Sampled),
    "`POST /v1/completions`": (CompletionRequest, Sampled),
    "`POST /v1/responses`": (ResponsesRequest, Common),
    "`POST /v1/messages`": (MessagesRequest, CountRequest),
    "`POST /v1/messages/count_tokens`": (CountRequest, Common),
    "`POST /tokenize`": (TokenizeRequest, None),
    "`POST /detokenize`": (DetokenizeRequest, None),
    "`POST /models/load`": (LoadRequest, None),
    "`POST /models/unload`": (UnloadRequest, None),
    "`POST /swarmbench/runs`": (SwarmRequest, None),
    "`POST /swarmbench/graphs`": (GraphFile, None),
    "`POST /swarmbench/graphs/runs`": (GraphRequest, None),
    "`POST /swarmbench/runs/{run_id}/stop`": (StopRequest, None),
    "`PATCH /swarmbench/runs/{run_id}`": (RenameRequest, None),
    "`POST /swarmbench/storage`": (PullRequest, None),
    "`POST /swarmbench/state`": (SettingsRequest, None),
}


def table(section: str) -> dict[str, str]:
    """First column to second of the first table under a heading."""
    text = PAGE.split(f"# {section}\n", 1)[1]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", re.split(r"^#", text, flags=re.MULTILINE)[0], re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_in_its_table(section: str) -> None:
    model, base = SECTIONS[section]
    own = set(model.__annotations__) & set(model.model_fields)  # also those it declares anew
    fields = set(model.model_fields) - set(base.model_fields if base is not None else ()) | own
    assert set(table(section)) == fields


def test_every_endpoint_is_in_the_table(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert set(table("Endpoints")) == served | {"GET /openapi.json"}


@pytest.mark.parametrize(
    ("section", "path", "body"),
    [
        ("`POST /v1/chat/completions`", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("`POST /v1/completions`", "/v1/completions", {"prompt": "x"}),
        ("`POST /v1/responses`", "/v1/responses", {"input": "x"}),
    ],
)
def test_what_is_said_to_be_refused_is_refused_by_name(live: Live, section: str, path: str, body: object) -> None:
    assert isinstance(body, dict)
    refused = [field for field, told in table(section).items() if told.startswith("refused")]
    assert refused
    for field in refused:
        values: list[object] = [{}, [], "x", 1]
        for value in values:
            answer = live.post(path, {**body, field: value})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == field
            assert error_of(answer)["code"] == "unsupported_parameter"


def test_the_codes_in_the_code_are_in_the_table() -> None:
    source = "".join(p.read_text() for p in (Path(__file__).parents[2] / "src/shoal/server").rglob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', source))
    internal = {"internal_error", "disconnected", "client_gone", "download_failed", "method_not_allowed"}
    assert codes - internal <= set(re.findall(r"`(\w+)`", PAGE.split("## Errors")[1]))
