"""From chat messages and tools to the tokens of a prompt, in the model's own format or in one we explain to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from shoal.engine.inputs import Codec, InputProcessor
from shoal.engine.loading import ModelCodec
from shoal.models.traced import as_content
from shoal.server.openai.schemas import ChatMessage, Tool, ToolCall
from shoal.server.reasoning import effort_variables, history_field, markers_of, template_of


class ToolStyle(Enum):
    """How a model writes its tool calls."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>, Qwen too
    LLAMA = "llama"  # {"name": ..., "parameters": ...} as the whole answer
    MISTRAL = "mistral"  # [{"name": ..., "arguments": ...}, ...] as the whole answer


_EXPLAIN = """You may call functions to help with the task. These are their signatures:
<tools>
{tools}
</tools>
To call one, answer with a JSON object inside tags, and nothing after it:
<tool_call>
{{"name": "function name", "arguments": {{}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the template gets it."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] | None = None
    effort: str | None = None  # how much to think, "none" for not at all; None: as the template has it
    prefill: str = ""  # how the answer begins


def prompt_tokens(inputs: InputProcessor, chat: Chat) -> list[int]:
    """Tokens of a conversation up to where the answer begins, for the model that is served.

    Raises `InvalidRequestError`, and `PromptTooLongError` before a conversation that is far too long is rendered.
    """
    assert inputs.codec is not None
    inputs.check_text(*map(_content, chat.messages), *map(_described, chat.tools))
    return chat_tokens(inputs.codec, chat)


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
    """Tokens of a conversation up to where the answer begins. Raises `InvalidRequestError`."""
    template = template_of(codec)
    native, thought = "tools" in template, history_field(template)
    messages = [_message(message, thought, native=native) for message in _in_order(chat.messages, native=native)]
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in chat.tools]
    if tools and not native:
        messages = _with_system(messages, _EXPLAIN.format(tools="\n".join(map(_described, chat.tools))))
    if not isinstance(codec, ModelCodec):
        return codec.encode_messages(messages) + codec.encode(chat.prefill, add_special=False)
    variables = {**effort_variables(template, chat.effort), **(chat.variables or {})}
    for name in ("messages", "tools", "add_generation_prompt"):
        variables.pop(name, None)
    text = codec.tokenizer.chat_template.render(messages, tools=tools if native and tools else None, **variables)
    markers = markers_of(template)
    if chat.effort == "none" and markers is not None and text.rstrip().endswith(markers.begin):
        text += f"\n{markers.end}\n\n"  # the template has no switch
    return codec.tokenizer.encode_chat(text + as_content(chat.prefill))


def _in_order(messages: Sequence[ChatMessage], *, native: bool) -> list[ChatMessage]:
    """The messages with the results of tools in the order of their calls, each under the name of its tool.

    Where results are shown as text, one that stands alone needs no name.
    """
    ordered: list[ChatMessage] = []
    for are_results, group in groupby(messages, key=lambda message: message.role == "tool"):
        if not are_results:
            ordered += group
            continue
        calls = ordered[-1].tool_calls or () if ordered else ()
        place = {call.id: number for number, call in enumerate(calls)}
        name = {call.id: call.function.name for call in calls} if native or len(calls) > 1 else {}
        results = sorted(group, key=lambda result: place.get(result.tool_call_id or "", len(place)))
        ordered += [
            result.model_copy(update={"name": result.name or name.get(result.tool_call_id or "")}) for result in results
        ]
    return ordered


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(message: ChatMessage, thought: str | None, *, native: bool) -> dict[str, Any]:
    """A message for the template. One that knows no tools sees calls and their results as text.

    `thought` is the field in which it takes what was thought; one that takes none is meant to see none of it.
    """
    role = "system" if message.role == "developer" else message.role
    content = _content(message)
    calls = message.tool_calls or []
    plain: dict[str, Any] = {"role": role, "content": content}
    reasoning = message.reasoning_content or message.reasoning
    if thought is not None and reasoning is not None:
        plain[thought] = reasoning
    if native:
        if calls:
            plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                plain[name] = value
        return plain
    if role == "tool":
        named = f"{message.name}: " if message.name else ""
        return {"role": "user", "content": f"<tool_response>\n{named}{content}\n</tool_response>"}
    if calls:
        written = [
            f'<tool_call>\n{{"name": {_json(call.function.name)}, "arguments": {_as_json(call)}}}\n</tool_call>'
            for call in calls
        ]
        plain["content"] = "\n".join([content, *written] if content else written)
    return plain


def _as_json(call: ToolCall) -> str:
    """The arguments of a call; ones that are no JSON as a string, so that what holds them is."""
    arguments = call.function.arguments
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return _json(arguments)
    return arguments


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    return "\n".join(part.text or part.refusal or "" for part in parts) or (message.refusal or "")


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` at the end of their system message, which is made if need be."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
