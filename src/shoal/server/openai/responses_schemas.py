"""Body of `POST /v1/responses`, and its translation to the messages and tools of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.server.errors import bad_request
from shoal.server.openai.fields import Common, FreeObject, Label, Listed, Strict, at_most
from shoal.server.openai.schemas import (
    MAX_TOOLS,
    ChatMessage,
    Function,
    FunctionCall,
    Name,
    NamedFunction,
    NamedTool,
    ReasoningEffort,
    TextPart,
    Tool,
    ToolCall,
    call_arguments,
)
from shoal.server.reasoning import Effort

_MOST_ITEMS = 1000  # of one call


class Part(Strict):
    """A piece of an input message."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: Listed[Any] | None = None
    logprobs: Listed[Any] | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Part:
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise ValueError("a part needs its text")
        return self


class Item(Strict):
    """One input item: a message, what was thought for it, a call that an earlier answer made, or what came of it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Listed[Part] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Listed[Part] | None = None
    summary: Listed[Part] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Item:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for field in needed[self.type]:
            if getattr(self, field) is None:
                raise ValueError(f"an item of type {self.type} needs {field}")
        return self


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type json_schema needs a schema")
        return self


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: None = None


class FlatTool(Strict):
    """A function, in the flat form of this endpoint."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class FlatNamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    name: Annotated[str, Field(max_length=128)]


class ReasoningOptions(Strict):
    """How much the model is to think before it answers."""

    effort: ReasoningEffort | None = None
    summary: None = None


class ResponsesStreamOptions(Strict):
    """What a stream brings beside its events."""

    include_obfuscation: Literal[False] | None = None


class ConversationRef(Strict):
    """A conversation, by its id."""

    id: Annotated[str, Field(max_length=200)]


class ResponsesRequest(Common):
    """`POST /v1/responses`."""

    input: str | Annotated[Listed[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    tools: Annotated[Listed[FlatTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=2**31)] | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    conversation: Annotated[str, Field(max_length=200)] | ConversationRef | None = None
    context_management: None = None
    prompt: None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt_cache_options: None = None

    def messages(self, before: Sequence[Mapping[str, Any]] = ()) -> list[ChatMessage]:
        """The conversation as a chat; `before` are items of earlier responses."""
        begin = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        items = [Item.model_validate(item) for item in before]
        if isinstance(self.input, str):
            if not self.input:
                raise bad_request("input is empty", "input")
            return _joined([*begin, *map(_message, items), ChatMessage(role="user", content=self.input)])
        return _joined([*begin, *map(_message, items), *map(_message, self.input)])

    def given(self) -> list[dict[str, Any]]:
        """The input as items that have ids, as they are kept."""
        if isinstance(self.input, str):
            part = {"type": "input_text", "text": self.input}
            return [{"id": _new_id("msg"), "type": "message", "role": "user", "status": "completed", "content": [part]}]
        return given_items(self.input)

    @property
    def conversation_id(self) -> str | None:
        """The conversation that it belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    def effort(self) -> Effort:
        """What is said of thinking."""
        level = self.reasoning.effort if self.reasoning is not None else None
        return Effort(level, self.thinking_budget, "reasoning.effort")

    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chat completions."""
        return [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
                ),
            )
            for tool in self.tools or ()
        ]

    def choice(self) -> str | NamedTool | None:
        """`tool_choice` in the form of chat completions."""
        if isinstance(self.tool_choice, FlatNamedTool):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice

    def schema_of(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        return {"type": "object"} if form.schema_ is None else form.schema_


class ConversationRequest(Strict):
    """`POST /v1/conversations`."""

    items: Annotated[Listed[Item], at_most(_MOST_ITEMS)] | None = None
    metadata: Annotated[dict[Label, Label], at_most(64)] | None = None


class MetadataRequest(Strict):
    """`POST /v1/conversations/{id}`."""

    metadata: Annotated[dict[Label, Label], at_most(64)]


class ItemsRequest(Strict):
    """`POST /v1/conversations/{id}/items`."""

    items: Annotated[Listed[Item], Field(min_length=1), at_most(_MOST_ITEMS)]


def given_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as they are kept: each with an id, and the text of a message as a part of it."""
    kept = []
    for item in items:
        document = item.model_dump(exclude_none=True)
        document.setdefault("id", _new_id({"function_call": "fc", "function_call_output": "fco"}.get(item.type, "msg")))
        if item.type != "reasoning":
            document.setdefault("status", "completed")
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
            document["content"] = [{"type": kind, "text": item.content, **more}]
        kept.append(document)
    return kept


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _message(item: Item) -> ChatMessage:
    if item.type == "function_call":
        function = FunctionCall(name=item.name or "", arguments=call_arguments(item.arguments))
        return ChatMessage(role="assistant", tool_calls=[ToolCall(id=item.call_id or "", function=function)])
    if item.type == "function_call_output":
        return ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output))
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else item.summary or []
        return ChatMessage(role="assistant", content="", reasoning_content="".join(part.text or "" for part in parts))
    assert item.role is not None
    return ChatMessage(role=item.role, content=_content(item.content))


def _content(content: str | list[Part] | None) -> str | list[TextPart]:
    if isinstance(content, list):
        return [TextPart(type="text", text=part.refusal if part.type == "refusal" else part.text) for part in content]
    return content or ""


def _only_thought(message: ChatMessage) -> bool:
    return message.reasoning_content is not None and not message.content and not message.tool_calls


def _joined(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls that stand beside each other, and thoughts and words before them, are one message of the assistant."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and message.role == "assistant" and _only_thought(last):
            joined[-1] = message.model_copy(update={"reasoning_content": last.reasoning_content})
        elif message.tool_calls and last is not None and last.role == "assistant":
            last.tool_calls = last.tool_calls or []
            last.tool_calls += message.tool_calls  # in place: thousands in a row are not copied again and again
        else:
            joined.append(message)
    return joined
