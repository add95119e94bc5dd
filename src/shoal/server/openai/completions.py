"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shoal.engine.engine import Engine
from shoal.sampling.schema import unchecked_formats
from shoal.server.errors import bad_request
from shoal.server.generation import Api, Call, choice_seeds, disconnected, output_limit, unless_gone
from shoal.server.hub import Served
from shoal.server.openai.fields import make_sampling
from shoal.server.openai.logprobs import TextLogprobs, prompt_logprobs
from shoal.server.openai.schemas import CompletionRequest
from shoal.server.sse import ChoiceWriter, EventStream, Template, encode
from shoal.types import Event, FinishReason, Request, Result

NAMES = {
    "prompt_tokens": "prompt",
    "json_schema": "structured_outputs",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
    "deadline_s": "timeout",
}
Prompt = str | list[int]


async def completions(api: Api, http: HttpRequest, body: CompletionRequest) -> Response:
    """Go on with one or several texts."""
    prompts = _prompts(body)
    count = body.n or 1
    api.check_count(count * len(prompts), "n")
    if body.best_of not in (None, count):
        raise bad_request("best_of other than n is not supported", "best_of", "unsupported_parameter")
    call = await api.open(http, body, lambda served: _requests(api, served, body, prompts), NAMES)
    texts = [Text(call, body, index, prompts[index // count]) for index in range(count * len(prompts))]
    if body.stream:
        return EventStream(TextWriter(call, body, texts, count), call, api.config)
    try:
        await unless_gone(disconnected(http.receive), call.finish(lambda index, happened: texts[index].take(happened)))
        return JSONResponse(_whole(call, texts, count))
    finally:
        call.close()


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("prompt is empty", "prompt")
    if isinstance(given[0], int):
        return [given]
    return cast("list[Prompt]", given)


def _requests(api: Api, served: Served, body: CompletionRequest, prompts: Sequence[Prompt]) -> Sequence[Request]:
    requests = []
    arguments = body.sampling()
    if body.logprobs is not None:
        arguments["logprobs"] = body.logprobs
    told = [body.prompt_logprobs, body.logprobs if body.echo else None, 0 if body.max_tokens == 0 else None]
    if any(count is not None for count in told):
        arguments["prompt_logprobs"] = max(count for count in told if count is not None)
    body.note_unchecked(unchecked_formats(arguments.get("json_schema", {})))
    seeds = choice_seeds(arguments.pop("seed", None), body.n or 1)
    for prompt in prompts:
        tokens = prompt if isinstance(prompt, list) else _encoded(served.engine, prompt)
        if not tokens:
            raise bad_request("prompt is empty", "prompt")
        # 16 is what the API documents for this endpoint.
        limit = output_limit(served, len(tokens), 16 if body.max_tokens is None else body.max_tokens)
        sampling = {**arguments, "max_tokens": limit}
        requests += [api.request(body, tokens, make_sampling({**sampling, "seed": seed})) for seed in seeds]
    return requests


def _encoded(engine: Engine, text: str) -> list[int]:
    if engine.codec is None:
        raise bad_request("the served model has no tokenizer: send token ids", "prompt")
    engine.check_text(text)
    return engine.codec.encode(text, add_special=True)


class Text:
    """One choice as it grows."""

    def __init__(self, call: Call, body: CompletionRequest, index: int, prompt: Prompt) -> None:
        self.index = index
        self.text = ""
        self._call = call
        self._body = body
        self._prompt = prompt
        self._begun = False
        self._echoed = self._echo()
        self._codec = call.served.engine.codec
        self._logprobs = self._fresh_logprobs()

    def take(self, happened: Event) -> dict[str, Any]:
        """Take an event in; gives the chunk it makes."""
        first = not self._begun
        new = self._echoed + happened.text if first else happened.text
        self.text += new
        self._begun = True
        choice = self._choice(new, self._told(self._logprobs, happened, first=first), happened.result)
        if self._body.return_token_ids:
            choice["token_ids"] = list(happened.tokens)
        return choice

    def whole(self, result: Result) -> dict[str, Any]:
        """The whole choice."""
        choice = self._choice(self.text, self._told(self._fresh_logprobs(), result, first=True), result)
        if self._body.prompt_logprobs is not None:
            assert self._codec is not None
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs, self._codec, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = list(result.tokens)
        return choice

    def _echo(self) -> str:
        if not self._body.echo:
            return ""
        if isinstance(self._prompt, str):
            return self._prompt
        codec = self._call.served.engine.codec
        return b"".join(map(codec.token_bytes, self._prompt)).decode("utf-8", "replace") if codec is not None else ""

    def _fresh_logprobs(self) -> TextLogprobs | None:
        wanted = self._body.logprobs is not None
        return TextLogprobs(self._codec) if wanted and self._codec is not None else None

    def _told(self, form: TextLogprobs | None, news: Event | Result, *, first: bool) -> dict[str, Any] | None:
        """The log-probabilities of new tokens; those of the prompt come first where it is echoed."""
        if form is None or not (first and self._body.echo):
            return None if form is None else form.take(news.logprobs)
        most = self._body.logprobs or 0
        prompt = [replace(entry, top=entry.top[:most]) for entry in news.prompt_logprobs]
        return form.take([*prompt, *news.logprobs], self._call.prompt(self.index)[0])

    def _choice(self, text: str, logprobs: dict[str, Any] | None, result: Result | None) -> dict[str, Any]:
        reason = None
        if result is not None:
            reason = "length" if result.finish_reason is FinishReason.LENGTH else "stop"
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _head(call: Call) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.served.name,
        "system_fingerprint": "shoal",
    }


def _whole(call: Call, texts: Sequence[Text], count: int) -> dict[str, Any]:
    call.check_complete()
    choices = [text.whole(call.results[text.index]) for text in texts]
    return {**_head(call), "choices": choices, "usage": call.usage(per_prompt=count)}


class TextWriter(ChoiceWriter):
    """The stream of text completions."""

    def __init__(self, call: Call, body: CompletionRequest, texts: Sequence[Text], count: int) -> None:
        super().__init__(call, _head(call), body.stream_options, count)
        self._texts = texts
        self._templates = [Template(partial(_plain, text.index)) for text in texts]

    def choices(self, index: int, happened: Event) -> list[str]:
        """A choice for each event."""
        choice = self._texts[index].take(happened)
        plain = len(choice) == 4 and choice["logprobs"] is None and choice["finish_reason"] is None
        return [self._templates[index].fill(choice["text"]) if plain else encode(choice)]


def _plain(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
