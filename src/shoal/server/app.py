"""The application: routes, and what becomes of errors."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.engine.loading import ModelCodec
from shoal.errors import ShoalError
from shoal.processes import process_mb
from shoal.server.anthropic.messages import count_tokens, messages
from shoal.server.anthropic.schemas import CountRequest, MessagesRequest
from shoal.server.block_events import block_events
from shoal.server.body import BodyRoute
from shoal.server.config import ServerConfig
from shoal.server.errors import ANTHROPIC, ApiError, bad_request, from_shoal, from_validation
from shoal.server.gate import Gate
from shoal.server.generation import Api
from shoal.server.hub import ModelHub, stored_models
from shoal.server.metrics import Metrics
from shoal.server.openai.chat import chat_completions
from shoal.server.openai.completions import completions
from shoal.server.openai.prompts import Chat, prompt_tokens
from shoal.server.openai.responses import follow, responses
from shoal.server.openai.responses_schemas import ResponsesRequest
from shoal.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadRequest,
    TokenizeRequest,
    UnloadRequest,
)
from shoal.server.openai.stored import add_stored_routes, save_running, take_up

_ERRORS = {
    400: "A field is wrong; `param` names it",
    401: "The API key is missing or wrong",
    403: "A page of another origin calls",
    404: "No such model",
    408: "The body came too slowly",
    409: "What is in use: a switch of models is under way, a run goes on",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "The generation failed",
    502: "A model could not be fetched",
    503: "No model can serve now; see Retry-After",
    504: "The deadline passed",
    507: "The history could not be written",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_MESSAGES_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def _error(text: str, shape: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{shape}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def create_app(
    hub: ModelHub, config: ServerConfig | None = None, mounts: Sequence[Callable[[FastAPI, Api], None]] = ()
) -> FastAPI:
    """The API over the hub's model, and whatever `mounts` add to it (`shoal serve` adds SwarmBench).

    When the application's life ends, the hub is closed.
    """
    config = config or ServerConfig()
    metrics = Metrics(hub)
    api = Api(hub, config, metrics)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 - the framework's face
        await hub.open()
        yield
        await hub.close()

    app = FastAPI(title="shoal", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    _generation_routes(app, api)
    add_stored_routes(app, api)
    hub.opening.append(lambda: take_up(api, partial(follow, api)))
    hub.keeping.append(partial(save_running, api))
    hub.closing += [api.kept.close, api.turns.close]
    _model_routes(app, api)
    _watch_routes(app, api)
    for mount in mounts:
        mount(app, api)
    _handlers(app)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    app.add_middleware(Gate, config=config, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _generation_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest, body: ChatRequest) -> Response:
        return await chat_completions(api, http, body)

    @app.post("/v1/completions")
    async def text(http: HttpRequest, body: CompletionRequest) -> Response:
        return await completions(api, http, body)

    @app.post("/v1/responses")
    async def respond(http: HttpRequest, body: ResponsesRequest) -> Response:
        return await responses(api, http, body)

    @app.post("/v1/messages")
    async def message(http: HttpRequest, body: MessagesRequest) -> Response:
        return await messages(api, http, body)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        return await count_tokens(api, body)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(404, "this server generates text; it has no embeddings", code="not_supported")

    @app.post("/v1/responses/compact")
    async def compact() -> Response:
        raise ApiError(404, "this server compacts no conversations", code="not_supported")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served = api.hub.acquire(body.model)
        try:
            tokens = await asyncio.to_thread(_tokens, served.engine, body)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": served.engine.spec.context_length}
        finally:
            api.hub.release(served)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        served = api.hub.acquire(body.model)
        try:
            return {"prompt": await asyncio.to_thread(_text, served.engine, body.tokens)}
        finally:
            api.hub.release(served)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        served = api.hub.acquire(None)
        try:
            return _tokenizer_info(served.engine)
        finally:
            api.hub.release(served)


def _tokenizer_info(engine: Engine) -> dict[str, Any]:
    codec = engine.codec
    if not isinstance(codec, ModelCodec):
        raise ApiError(404, "the served model has no tokenizer to tell of", code="not_supported")
    tokenizer = codec.tokenizer
    ends = sorted(tokenizer.eos_ids)
    names = {"bos_token": tokenizer.bos_id, "eos_token": ends[0] if ends else None}
    told = {name: _spelt(tokenizer, token) for name, token in names.items()}
    return {**told, "pad_token": told["eos_token"], "chat_template": tokenizer.chat_template.source}


def _spelt(tokenizer: Any, token: int | None) -> str | None:
    return None if token is None else tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")


def _text(engine: Engine, tokens: list[int]) -> str:
    if engine.codec is None:
        raise bad_request("the served model has no tokenizer", "model")
    if not all(0 <= token < engine.spec.vocab_size for token in tokens):
        raise bad_request(f"tokens go from 0 to {engine.spec.vocab_size - 1}", "tokens")
    return b"".join(map(engine.codec.token_bytes, tokens)).decode("utf-8", "replace")


def _tokens(engine: Engine, body: TokenizeRequest) -> list[int]:
    codec = engine.codec
    if codec is None:
        raise bad_request("the served model has no tokenizer", "model")
    if body.messages is not None:
        return prompt_tokens(engine, Chat(body.messages, body.tools or ()))
    text = body.prompt or ""
    engine.check_text(text)
    return codec.encode(text, add_special=body.add_special_tokens is not False)


def _model_routes(app: FastAPI, api: Api) -> None:
    hub = api.hub

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": await asyncio.to_thread(_models, hub)}

    @app.post("/models/load")
    async def load(body: LoadRequest) -> dict[str, Any]:
        served = await hub.load(body.model, body.drain_s)
        return _model(served.name, hub)

    @app.post("/models/unload")
    async def unload(body: UnloadRequest) -> dict[str, Any]:
        served = hub.served
        if body.model is not None and (served is None or served.name != body.model):
            raise ApiError(404, f"the model {body.model!r} is not loaded", param="model", code="model_not_found")
        return {"unloaded": await hub.unload(body.drain_s)}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        for known in await asyncio.to_thread(_models, hub):
            if known["id"] == model:
                return known
        raise ApiError(404, f"there is no model {model!r}", param="model", code="model_not_found")


def _models(hub: ModelHub) -> list[dict[str, Any]]:
    """The served model first, then the rest of the store."""
    names = [hub.served.name] if hub.served is not None else []
    names += [stored.name for stored in stored_models() if stored.name not in names]
    return [_model(name, hub) for name in names]


def _model(name: str, hub: ModelHub) -> dict[str, Any]:
    served = hub.served
    loaded = served is not None and served.name == name
    described = {"id": name, "object": "model", "created": 0, "owned_by": "shoal", "loaded": loaded}
    if served is not None and loaded:
        spec = served.engine.spec
        described |= {"created": int(served.since), "max_model_len": spec.context_length}
        described |= {"architecture": spec.architecture, "runner": spec.runner, "precision": spec.precision}
    return described


def _watch_routes(app: FastAPI, api: Api) -> None:
    started = time.time()

    @app.get("/health")
    async def health() -> Response:
        healthy, state = api.hub.health()
        return JSONResponse(state, 200 if healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(api.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/events")
    async def events(after: Annotated[int | None, Query(ge=0)] = None, tokens: bool = True) -> Response:
        return block_events(api, after, with_tokens=tokens)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        healthy, state = api.hub.health()
        served = api.hub.served
        told: dict[str, Any] = {"healthy": healthy, **state, "uptime_s": round(time.time() - started, 3)}
        told["process_mb"] = process_mb()
        if api.hub.rollout is not None:
            told["rollout"] = api.hub.rollout.describe()
        if served is not None:
            engine = served.engine.stats()
            told["calls"] = served.leases
            told["warmup_s"] = served.engine.warmup_s
            if served.engine.governor is not None:
                told["power"] = served.engine.governor.describe()
            if served.engine.memory is not None:
                told["memory"] = served.engine.memory.describe()
            told["engine"] = {**dataclasses.asdict(engine), "hit_rate": engine.hit_rate}
        return told


def _handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(http: HttpRequest, error: ApiError) -> Response:
        http.scope["state"]["record"]["error"] = error.code
        return error.response(http.scope)

    @app.exception_handler(ShoalError)
    async def shoal_error(http: HttpRequest, error: ShoalError) -> Response:
        return await api_error(http, from_shoal(error))

    @app.exception_handler(RequestValidationError)
    async def validation(http: HttpRequest, error: RequestValidationError) -> Response:
        return await api_error(http, from_validation(error))

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_body")
        told = ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        return await api_error(http, told)


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with our errors where the framework would announce its own."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for name, path in document["paths"].items():
            shape = "MessagesError" if name.startswith(ANTHROPIC) else "Error"
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= {str(status): _error(text, shape) for status, text in _ERRORS.items()}
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= {"Error": _ERROR_SCHEMA, "MessagesError": _MESSAGES_ERROR_SCHEMA}
        for framework in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(framework, None)
        app.openapi_schema = document
    return app.openapi_schema
