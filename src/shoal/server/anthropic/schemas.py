"""Bodies of the Messages API, and their translation to the messages and tools of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.server.errors import bad_request
from shoal.server.openai.fields import Common, Finite, FreeObject, Label, Listed, StopString, Strict, at_most
from shoal.server.openai.schemas import (
    MAX_TOOLS,
    ChatMessage,
    Function,
    FunctionCall,
    Name,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from shoal.server.reasoning import Effort


class CacheControl(Strict):
    """Where a prefix that is worth keeping ends. Every prefix is kept while there is room: it says for how long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def _blocks(content: str | list[Block] | None) -> list[Block]:
    return content if isinstance(content, list) else []


class Block(Strict):
    """A piece of a message. Which fields it has depends on its type; what is no text is refused by name."""

    type: str
    text: str | None = None
    citations: Any = None
    cache_control: CacheControl | None = None
    id: str | None = None
    name: str | None = None
    input: FreeObject | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | Listed[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    source: Any = None
    title: Any = None
    context: Any = None

    def words(self, place: str) -> str:
        """The text of a block that must be one. ApiError for any other."""
        if self.type != "text":
            raise bad_request(f"{place}: the model reads text, not {self.type!r}", place, "unsupported_value")
        return str(self.needed("text", place))

    def needed(self, field: str, place: str) -> Any:
        """A field that blocks of this type must have."""
        value = getattr(self, field)
        if value is None:
            raise bad_request(f"{place}.{field} is missing", f"{place}.{field}", "missing_required_parameter")
        return value


class InputMessage(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Listed[Block]


class InputTool(Strict):
    """A tool of the caller's. Tools that a provider would run are refused."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: FreeObject
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Strict):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Strict):
    """Whether the model thinks before it answers, and how much."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer, and the effort put into it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """About the caller."""

    user_id: Label | None = None


class CountRequest(Common):
    """`POST /v1/messages/count_tokens`, and what it shares with `POST /v1/messages`."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | Listed[Block] | None = None
    tools: Annotated[Listed[InputTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]
    user: None = None
    store: None = None
    safety_identifier: None = None
    prompt_cache_retention: None = None
    container: None = None
    context_management: None = None
    mcp_servers: None = None
    inference_geo: None = None
    speed: None = None

    def agent(self) -> tuple[str | None, str | None]:
        """Task and agent for the log."""
        return self.prompt_cache_key, self.metadata.user_id if self.metadata is not None else None

    @property
    def keep_s(self) -> float:
        """The longest time that any `cache_control` of the call asks for, in seconds."""
        marked: list[Any] = [self, *(self.tools or ()), *_blocks(self.system)]
        marked += [block for message in self.messages for block in _blocks(message.content)]
        found = [one.cache_control.ttl or "5m" for one in marked if one.cache_control is not None]
        return max((3600.0 if ttl == "1h" else 300.0 for ttl in found), default=0.0)

    def chat(self) -> tuple[list[ChatMessage], str]:
        """The conversation as a chat, and how the answer begins: what a last message of the assistant says."""
        begin = [ChatMessage(role="system", content=_said(self.system, "system"))] if self.system else []
        given, prefill = self.messages, ""
        last = given[-1]
        if last.role == "assistant":
            prefill = _said(last.content, f"messages.{len(given) - 1}.content")
            given = given[:-1]
        turns = [message for number, turn in enumerate(given) for message in _turn(turn, f"messages.{number}")]
        if not turns:
            raise bad_request("messages has none that the model could answer", "messages")
        return [*begin, *turns], prefill

    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chat completions."""
        return [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in self.tools or ()
        ]

    def choice(self) -> str | NamedTool | None:
        """`tool_choice` in the form of chat completions."""
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type == "tool":
            if choice.name is None:
                raise bad_request("tool_choice.name is missing", "tool_choice.name", "missing_required_parameter")
            return NamedTool(type="function", function=NamedFunction(name=choice.name))
        return "required" if choice.type == "any" else choice.type

    @property
    def parallel(self) -> bool | None:
        """Whether several tools may be called at once."""
        off = self.tool_choice.disable_parallel_tool_use if self.tool_choice is not None else None
        return None if off is None else not off

    def effort(self) -> Effort:
        """What is said of thinking: without a word, none."""
        thinking = self.thinking
        level = self.output_config.effort if self.output_config is not None else None
        if thinking is None or thinking.type == "disabled":
            return Effort("none")
        return Effort(level or "high", thinking.budget_tokens, "thinking", "thinking")

    def schema_of(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        form = self.output_config.format if self.output_config is not None else None
        return form.schema_ if form is not None else None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    temperature: Annotated[Finite, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None


def _said(content: str | Sequence[Block], place: str) -> str:
    """The text of a content that is text alone."""
    if isinstance(content, str):
        return content
    return "\n".join(block.words(f"{place}.{number}") for number, block in enumerate(content))


def _turn(message: InputMessage, place: str) -> list[ChatMessage]:
    """A message as those of a chat: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    places = [(f"{place}.content.{number}", block) for number, block in enumerate(message.content)]
    return _assistant(places) if message.role == "assistant" else _user(message.role, places)


def _user(role: Literal["user", "system"], places: list[tuple[str, Block]]) -> list[ChatMessage]:
    results, words = [], []
    for place, block in places:
        if block.type != "tool_result":
            words.append(block.words(place))
            continue
        told = _said(block.content or "", f"{place}.content")
        told = f"Error: {told}" if block.is_error else told
        results.append(ChatMessage(role="tool", tool_call_id=block.needed("tool_use_id", place), content=told))
    said = [ChatMessage(role=role, content="\n".join(words))] if words or not results else []
    return [*results, *said]


def _assistant(places: list[tuple[str, Block]]) -> list[ChatMessage]:
    words, thoughts, calls = [], [], []
    for place, block in places:
        if block.type == "thinking":
            thoughts.append(block.needed("thinking", place))
        elif block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = FunctionCall(name=block.needed("name", place), arguments=arguments)
            calls.append(ToolCall(id=block.needed("id", place), function=function))
        elif block.type != "redacted_thinking":  # nothing in it could be read
            words.append(block.words(place))
    thought = "\n".join(thoughts) or None
    return [
        ChatMessage(role="assistant", content="\n".join(words), tool_calls=calls or None, reasoning_content=thought)
    ]
