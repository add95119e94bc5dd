"""The face of `AsyncEngine` over any OpenAI-compatible server: ours, vLLM, a cluster of either.

engine = AsyncEngine.load("smollm2-135m")                       # here
engine = RemoteEngine("http://cluster:8000/v1", "qwen3-32b")    # there; nothing else changes
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.engine.aio import AsyncFace
from shoal.engine.dialects import BY_OWNER, EXTENDED, OPENAI, Dialect
from shoal.engine.inputs import refuse_arrival
from shoal.errors import (
    BackendError,
    EngineClosedError,
    InvalidRequestError,
    MemoryPressureError,
    ModelNotFoundError,
    PowerLimitError,
    PromptTooLongError,
    QueueFullError,
    RunnerError,
    ShoalError,
)
from shoal.runners.plan import ModelSpec
from shoal.types import Event, FinishReason, Receipt, Request, Result, SamplingParams

if TYPE_CHECKING:
    import httpx

_STANDARD = ("presence_penalty", "frequency_penalty", "top_p")
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
_LOCAL = ("logprobs", "prompt_logprobs", "thinking")  # what the API has in another form, or not at all
_DROPPABLE = ("stream_options", "priority")  # what a server may refuse: the call is made again without
_MAX_LINE = 16 * 2**20  # bytes of one event
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_STRUCTURE = ("json_schema", "regex", "grammar")


class RemoteEngine(AsyncFace):
    """Sends requests to `base_url` (it ends in `/v1`), to be batched there. Usable with `async with`, and closed by it.

    `generate` and `complete` behave as in `AsyncEngine`: leaving early closes the connection, and a good server stops
    then. Servers that say they are ours, vLLM or SGLang get fields beyond the OpenAI API in their own spelling. Others
    get only the API's own, and a request that needs more is refused. `tokens` stay empty where the server tells no ids,
    `prompt_tokens` is 0 where it tells no usage. `timeout_s` of a request, log-probabilities and a bound on thinking
    are refused: the API tells neither when a request joins the batch nor ids, and takes no marks of thinking. What only
    says how soon an output comes (`predicted`, `speculate`, `keep_s`, `critical_path`) stays here.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        extensions: bool | None = None,
        connect_timeout_s: float = 10.0,
        idle_timeout_s: float = 600.0,
    ) -> None:
        """`model` None takes the first that the server lists. `idle_timeout_s`: the longest silence of a stream.

        `extensions` says whether the server knows fields beyond the OpenAI API; None: if it says it is one of those.
        """
        try:
            import httpx
        except ImportError as error:
            raise BackendError("httpx is not installed", hint="pip install 'shoal[remote]'") from error
        self._httpx = httpx
        self._model = model
        self._dialect: Dialect | None = None if extensions is None else EXTENDED if extensions else OPENAI
        self._refused: set[str] = set()  # of `_DROPPABLE`, by this server
        self._spec: ModelSpec | None = None
        self._seeds = random.SystemRandom()
        self._closed = False
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(idle_timeout_s, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def _open(self) -> None:
        await self.describe()

    @property
    def spec(self) -> ModelSpec:
        """What the server tells of its model; sizes it does not tell are 0. Known inside `async with`."""
        if self._spec is None:
            raise EngineClosedError("the server has not been asked yet", hint="use `async with` first")
        return self._spec

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they come; the last has the result. Raises as `AsyncEngine.generate`."""
        if self._closed:
            raise EngineClosedError("the engine is closed", hint="make it again")
        refuse_arrival(request)
        if self._spec is None:
            await self.describe()
        seed = request.sampling.seed
        seed = self._seeds.getrandbits(31) if seed is None else seed  # some servers take no more bits
        schema = request.sampling.json_schema is not None
        answer = _Answer(request.id or f"remote-{seed:x}", seed, is_json=schema and not self._trusted)
        until = None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s
        try:
            async with asyncio.timeout_at(until):
                response = await self._send(request, seed)
            try:
                lines = self._lines(response)
                while True:
                    # Around the waiting alone: around the yield it would cancel whoever reads this.
                    async with asyncio.timeout_at(until):
                        line = await anext(lines, None)
                    if line is None:
                        break
                    event = answer.take(line)
                    if event is not None:
                        yield event
            finally:
                await response.aclose()
        except TimeoutError:
            yield answer.end(FinishReason.TIMEOUT)
            return
        except self._httpx.HTTPError as error:
            yield answer.end(FinishReason.ERROR, RunnerError(f"the connection broke: {_words(error)}"))
            return
        yield answer.end()

    async def _send(self, request: Request, seed: int) -> httpx.Response:
        """The answer as it begins. Raises what its status means; a broken connection as httpx does."""
        path, body = self._body(request, seed)
        headers = {"X-Request-Id": request.id} if request.id else {}
        kept = True
        while True:
            for name in self._refused:
                body.pop(name, None)
            call = self._http.build_request("POST", path, json=body, headers=headers)
            try:
                response = await self._http.send(call, stream=True)
            except (self._httpx.RemoteProtocolError, self._httpx.ReadError, self._httpx.WriteError):
                if not kept:
                    raise
                kept = False  # most likely the server had closed a connection that was kept: once more, on a new one
                continue
            if response.status_code == 200:
                return response
            await response.aread()
            told = response.content if response.status_code in (400, 422) else b""
            refused = {name for name in _DROPPABLE if name in body and name.encode() in told}
            if not refused:
                raise refusal(response, request.sampling)
            self._refused |= refused

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        """Lines of server-sent events: they end in CR, LF or both, and not at the other separators that texts hold."""
        held: list[bytes] = []
        size = 0
        async for piece in response.aiter_bytes():
            held.append(piece)
            size += len(piece)
            if size > _MAX_LINE:
                raise self._httpx.RemoteProtocolError(f"a line is longer than {_MAX_LINE} bytes")
            if b"\n" not in piece and b"\r" not in piece:
                continue
            # A CR that comes last may be half of a line's end: it waits for what follows.
            *lines, rest = _LINE_END.split(b"".join(held))
            held, size = [rest], len(rest)
            for line in lines:
                yield line.decode("utf-8", "replace")
        yield b"".join(held).decode("utf-8", "replace")

    async def close(self) -> None:
        """Drop the connections. Idempotent."""
        self._closed = True
        await self._http.aclose()

    async def describe(self) -> None:
        """Ask the server which models it has. BackendError when it cannot be reached, ModelNotFoundError."""
        try:
            response = await self._http.get("models")
        except self._httpx.HTTPError as error:
            hint = "check base_url, which should end in /v1"
            raise BackendError(f"the server cannot be reached: {_words(error)}", hint=hint) from error
        if response.status_code != 200:
            raise refusal(response, SamplingParams())
        models = _listed(response)
        name = self._model or next(iter(models), None)
        if name is None or name not in models:
            raise ModelNotFoundError(f"the server has no model {name!r}", value=name, limit=sorted(models))
        self._model = name
        facts = models[name]
        if self._dialect is None:
            self._dialect = BY_OWNER.get(str(facts.get("owned_by")), OPENAI)
        self._spec = ModelSpec(
            name=name,
            architecture=str(facts.get("architecture", "unknown")),
            runner="remote",
            precision=str(facts.get("precision", "unknown")),
            vocab_size=0,
            context_length=facts.get("max_model_len") or 0,
            block_size=0,
            num_blocks=0,
            kv_bytes_per_token=0,
            weight_bytes=0,
        )

    def _body(self, request: Request, seed: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the call."""
        if request.timeout_s is not None:
            raise _unsupported("timeout_s", "use deadline_s")
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= self._sampling(request.sampling, seed, chat=request.messages is not None)
        body |= self._speaks.hints(request)
        if request.messages is None and "response_format" in body:
            raise _unsupported("json_schema", "give messages: the API has schemas only for chats")
        if request.messages is not None:
            return "chat/completions", {**body, "messages": [dict(message) for message in request.messages]}
        prompt = request.prompt if request.prompt is not None else list(request.prompt_tokens or ())
        return "completions", {**body, "prompt": prompt}

    @property
    def _speaks(self) -> Dialect:
        """How the server spells what goes beyond the API; the API alone before it has been asked."""
        return self._dialect or OPENAI

    @property
    def _trusted(self) -> bool:
        """True when the server is known to hold an output to its schema."""
        return self._speaks is not OPENAI

    def _sampling(self, sampling: SamplingParams, seed: int, *, chat: bool) -> dict[str, Any]:
        for name in _LOCAL:
            if getattr(sampling, name) is not None:
                raise _unsupported(name, "ask the server itself")
        body: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": seed}
        plain = SamplingParams()
        for name in (*_STANDARD, *_EXTENSIONS):
            value = getattr(sampling, name)
            if value != getattr(plain, name):
                if name in _EXTENSIONS and name not in self._speaks.sampling:
                    raise _unsupported(name, "the server is not known to have it; extensions=True says so")
                body[name] = list(value) if isinstance(value, tuple) else value
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if self._speaks.token_ids:
            body["return_token_ids"] = True
        for field in _STRUCTURE:
            value = getattr(sampling, field)
            if value is None:
                continue
            fields = self._speaks.structure(field, value, chat=chat)
            if fields is None:
                raise _unsupported(field, "the server is not known to have it; extensions=True says so")
            body |= fields
        return body


class _Answer:
    """The stream of one request, and what it adds up to."""

    def __init__(self, request_id: str, seed: int, *, is_json: bool) -> None:
        """`is_json`: it must be, and the server is not trusted to see to it."""
        self._id = request_id
        self._is_json = is_json
        self._seed = seed
        self._begin = time.perf_counter()
        self._first: float | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._reason: FinishReason | None = None
        self._usage: Mapping[str, Any] = {}
        self._error: ShoalError | None = None

    def take(self, line: str) -> Event | None:
        """One line of the stream; an event when it brings something new."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return None
        try:
            document = json.loads(data)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            document = {"error": f"the server sent what is not a JSON object: {data[:200]}"}
        told = document.get("error")
        if told is not None:
            self._error = RunnerError(str(told.get("message", told) if isinstance(told, dict) else told))
            return None
        self._usage = document.get("usage") or self._usage
        for choice in document.get("choices") or ():
            reason = choice.get("finish_reason")
            if reason is not None:
                self._reason = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            tokens = tuple(choice.get("token_ids") or ())
            if text or tokens:
                self._first = self._first or time.perf_counter()
                self._text.append(text)
                self._tokens += tokens
                return Event(self._id, tokens, text)
        return None

    def end(self, reason: FinishReason | None = None, error: ShoalError | None = None) -> Event:
        """The last event."""
        error = error or self._error
        if error is None and reason is None and self._reason is None:
            error = RunnerError("the server ended the stream without a reason")
        if error is None and self._is_json and self._reason is FinishReason.STOP and not _parses("".join(self._text)):
            error = RunnerError("the server did not hold the answer to the schema", hint="use one that can")
        if error is not None:
            reason = FinishReason.ERROR
        details = self._usage.get("prompt_tokens_details") or {}
        result = Result(
            id=self._id,
            tokens=tuple(self._tokens),
            text="".join(self._text),
            finish_reason=reason or self._reason or FinishReason.STOP,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            ttft_s=None if self._first is None else self._first - self._begin,
            latency_s=time.perf_counter() - self._begin,
            seed=self._seed,
            receipt=Receipt(cached_tokens=details.get("cached_tokens") or 0),
            error=error,
        )
        return Event(self._id, result=result)


def _listed(response: httpx.Response) -> dict[str, Mapping[str, Any]]:
    """The models that a server lists, by name."""
    try:
        return {str(model["id"]): model for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError) as error:
        message = f"what answers at {response.url} lists no models"
        raise BackendError(message, hint="check base_url, which should end in /v1") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unsupported(param: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} cannot be asked of a remote server", param=param, hint=hint)


def refusal(response: httpx.Response, sampling: SamplingParams) -> ShoalError:
    """The server's refusal as the error that the local engine would raise."""
    try:
        told = response.json()["error"]
        message, param, code = str(told["message"]), told.get("param"), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = response.text[:500] or f"status {response.status_code}", None, None
    status = response.status_code
    after = response.headers.get("retry-after", "1")
    retry = float(after) if after.replace(".", "", 1).isdecimal() else 1.0
    if status == 429:
        return QueueFullError(message.split(": retry in")[0], value=None, limit=None, retry_after_s=retry)
    if code == "context_length_exceeded":
        return PromptTooLongError(message, param="prompt")
    if status == 404:
        return ModelNotFoundError(message)
    if status in (400, 413, 422):
        named = next((f for f in _STRUCTURE if getattr(sampling, f) is not None), "structured_outputs")
        return InvalidRequestError(message, param=named if param == "structured_outputs" else param or "request")
    if status == 503 and code == "power_limit":
        return PowerLimitError(message.split(": retry in")[0], value=None, limit=None, retry_after_s=retry)
    if status == 503 and code == "memory_pressure":
        return MemoryPressureError(message.split(": retry in")[0], value=None, limit=None, retry_after_s=retry)
    if status == 503:
        return EngineClosedError(message)
    return RunnerError(f"the server answered {status}: {message}")
