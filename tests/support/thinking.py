"""A toy that thinks: bytes as tokens, a chat template of a reasoning family, and a regex for what it is to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.loading import ModelCodec
from shoal.models.template import ChatTemplate
from shoal.runners.fake import ByteTokenizer, FakeRunner

SWITCHED = """{%- for message in messages %}<{{ message.role }}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{% endfor %}
{%- if tools %}tools: {{ tools | length }}{% endif %}<assistant>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"""
"""The model decides whether it thinks, unless it is told not to."""

OPENED = """{%- for message in messages %}<{{ message.role }}>{{ message.content.split('</think>')[-1] }}{% endfor %}
{{- '<assistant><think>\n' }}"""
"""The template begins the thinking, and has no switch."""


class _Tokenizer(ByteTokenizer):
    def __init__(self, template: str) -> None:
        self.chat_template = ChatTemplate(template)

    def encode_chat(self, rendered: str) -> list[int]:
        return self.encode(rendered)


def thinking_codec(template: str) -> ModelCodec:
    return ModelCodec(cast("Any", _Tokenizer(template)))


def thinking_toy(template: str) -> Engine:
    return Engine(FakeRunner, thinking_codec(template), EngineConfig())


def spoken(text: str) -> dict[str, Any]:
    """Fields that make a model write just that text."""
    special = set("\\.+*?()|[]{}^$/")
    return {"structured_outputs": {"regex": "".join(f"\\{c}" if c in special else c for c in text)}, "max_tokens": 400}


def shown(codec: ModelCodec, tokens: Sequence[int]) -> str:
    return b"".join(map(codec.token_bytes, tokens)).decode()
