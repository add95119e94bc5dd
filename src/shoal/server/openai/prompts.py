"""From chat messages and tools to the tokens of a prompt, in the model's own format or in one we explain to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.inputs import Codec
from shoal.engine.loading import ModelCodec
from shoal.models.toolform import ToolForm
from shoal.models.traced import as_content
from shoal.server.errors import bad_request
from shoal.server.openai.schemas import ChatMessage, Tool
from shoal.server.reasoning import effort_variables, history_field, markers_of, template_of


class ToolStyle(Enum):
    """How a model writes its tool calls."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>, Qwen too
    LLAMA = "llama"  # {"name": ..., "parameters": ...} as the whole answer
    MISTRAL = "mistral"  # [{"name": ..., "arguments": ...}, ...] as the whole answer


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the template gets it."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] | None = None
    effort: str | None = None  # how much to think, "none" for not at all; None: as the template has it
    prefill: str = ""  # how the answer begins


def prompt_tokens(engine: Engine, chat: Chat) -> list[int]:
    """Tokens of a conversation up to where the answer begins, for the model that is served.

    Raises `InvalidRequestError`, and `PromptTooLongError` before a conversation that is far too long is rendered.
    """
    assert engine.codec is not None
    engine.check_text(*map(_content, chat.messages), *map(_described, chat.tools))
    return chat_tokens(engine.codec, chat)


def _described(tool: Tool) -> str:
    """A tool as the model reads it."""
    return _json(tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}))


def tool_style(codec: Codec) -> ToolStyle:
    """The format of the model's family, read off its chat template."""
    source = template_of(codec)
    if "[TOOL_CALLS]" in source:
        return ToolStyle.MISTRAL
    if "<|python_tag|>" in source or "Environment: ipython" in source:
        return ToolStyle.LLAMA
    return ToolStyle.HERMES


def chat_tokens(codec: Codec, chat: Chat) -> list[int]:
    """Tokens of a conversation up to where the answer begins. Raises `InvalidRequestError`.

    The template gets tools, calls and results in the form that it shows; a codec without one gets them as text.
    """
    template = template_of(codec)
    thought = history_field(template)
    messages = [_message(message, thought) for message in _in_order(chat.messages)]
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in chat.tools]
    if not isinstance(codec, ModelCodec):
        messages, _ = ToolForm().fit(messages, tools)
        return codec.encode_messages(messages) + codec.encode(chat.prefill, add_special=False)
    variables = {**effort_variables(template, chat.effort), **(chat.variables or {})}
    for name in ("messages", "tools", "add_generation_prompt"):
        variables.pop(name, None)
    if "self" in variables:
        raise bad_request("chat_template_kwargs: `self` is no name for a variable", "chat_template_kwargs")
    text = codec.tokenizer.chat_template.render(messages, tools=tools, **variables)
    markers = markers_of(template)
    if chat.effort == "none" and markers is not None and text.rstrip().endswith(markers.begin):
        text += f"\n{markers.end}\n\n"  # the template has no switch
    return codec.tokenizer.encode_chat(text + as_content(chat.prefill))


def _in_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the results of tools in the order of their calls, each under the name of its tool."""
    ordered: list[ChatMessage] = []
    for are_results, group in groupby(messages, key=lambda message: message.role == "tool"):
        if not are_results:
            ordered += group
            continue
        calls = ordered[-1].tool_calls or () if ordered else ()
        place = {call.id: number for number, call in enumerate(calls)}
        name = {call.id: call.function.name for call in calls}
        results = sorted(group, key=lambda result: place.get(result.tool_call_id or "", len(place)))
        ordered += [
            result.model_copy(update={"name": result.name or name.get(result.tool_call_id or "")}) for result in results
        ]
    return ordered


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(message: ChatMessage, thought: str | None) -> dict[str, Any]:
    """A message for the template.

    `thought` is the field in which it takes what was thought; one that takes none is meant to see none of it.
    """
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message)}
    reasoning = message.reasoning_content or message.reasoning
    if thought is not None and reasoning is not None:
        plain[thought] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    return "\n".join(part.text or part.refusal or "" for part in parts) or (message.refusal or "")
