"""The `openai` SDK, unmodified: only `base_url` says that it is us. On the default model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.server.conftest import MODEL
from tests.support.live import Live, toy

openai: Any = pytest.importorskip("openai", reason="the openai SDK is not installed")

ASK: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    age: int


@pytest.fixture
def client(real: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "shoal"


def test_chat_whole_and_streamed_agree(client: Any) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == text
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_many_asynchronous_calls_at_once(real: Live) -> None:
    async def work() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str | None:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=ASK, max_tokens=8, temperature=0, user=f"u{number}"
                )
                text: str | None = answer.choices[0].message.content
                return text

            return await asyncio.gather(*(one(number) for number in range(12)))

    answers = asyncio.run(work())
    assert len(set(answers)) == 1
    assert answers[0]


def test_structured_output_by_class(client: Any) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=60, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_tools_required_named_and_streamed(client: Any) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "max_tokens": 80, "temperature": 0}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(**fields, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    with client.chat.completions.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == call.function.arguments
    free = client.chat.completions.create(**fields, tool_choice="auto").choices[0]
    assert free.message.content or free.message.tool_calls


def test_responses_whole_streamed_parsed_and_with_tools(client: Any) -> None:
    fields: Any = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**fields, instructions="Be brief.")
    assert whole.output_text
    assert whole.usage is not None
    deltas = [
        event.delta
        for event in client.responses.create(**fields, instructions="Be brief.", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole.output_text
    parsed = client.responses.parse(**{**fields, "max_output_tokens": 60}, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**{**fields, "max_output_tokens": 60}, text_format=Person) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    flat: Any = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(**{**fields, "max_output_tokens": 80}, tools=[flat], tool_choice="required")
    [call] = [item for item in called.output if item.type == "function_call"][:1]
    history: Any = [
        {"role": "user", "content": "What is the weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(**{**fields, "input": history}).output_text


def test_completions_and_logprobs(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, logprobs=2, echo=False
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].logprobs is not None
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert len(chat.choices[0].logprobs.content) == 3


def test_errors_are_the_sdks_own_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with Live(toy(), api_key="secret") as locked:
        wrong = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong")
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_an_error_inside_a_stream_is_raised(client: Any) -> None:
    fields: Any = {"extra_body": {"timeout": 0.15}, "max_tokens": 2000, "logit_bias": {"0": -100, "2": -100}}  # no end
    with pytest.raises(openai.APIError, match="deadline"):
        for _ in client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **fields):
            pass


def test_a_broken_off_stream_frees_its_row(real: Live, client: Any) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, max_tokens=4000, temperature=0)
    next(iter(stream))
    stream.close()
    real.wait_idle(5)
