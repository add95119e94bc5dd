"""One answer as it grows: the events of a generation, split into what is thought, said and called."""

from __future__ import annotations

from shoal.server.generation import Call
from shoal.server.openai.calljson import CallDelta
from shoal.server.openai.schemas import ChatMessage, FunctionCall, ToolCall, call_arguments
from shoal.server.openai.toolcalls import WrittenCall, note_call
from shoal.server.openai.tools import ToolUse
from shoal.server.reasoning import Thought, ThoughtSplitter, markers_of, prompt_thinks, template_of
from shoal.types import Event

Piece = str | CallDelta | Thought


def _message(said: str, calls: list[WrittenCall]) -> ChatMessage:
    """An answer as it comes back in the history, from a client that sends no thoughts."""
    called = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call_arguments(call.arguments)))
        for call in calls
    ]
    return ChatMessage(role="assistant", content=said, tool_calls=called or None)


class AnswerReader:
    """From the events of one generation to pieces; ends it when as many tools as allowed are called."""

    def __init__(self, call: Call, index: int, use: ToolUse) -> None:
        codec = call.served.engine.codec
        assert codec is not None
        opened = prompt_thinks(codec, call.prompt(index))
        self._call = call
        self._token_bytes = codec.token_bytes
        self._index = index
        self._splitter = ThoughtSplitter(markers_of(template_of(codec)), opened=opened)
        self._parser = use.parser() if use.active else None
        self._said = ""
        self._calls: list[WrittenCall] = []

    def take(self, happened: Event) -> list[Piece]:
        """What an event adds."""
        split = self._splitter.push(happened.text)
        ended = happened.result is not None
        if happened.result is not None:
            split += self._splitter.finish()
            if self._splitter.thought:
                self._call.thinking_tokens += self._splitter.count(happened.result.tokens, self._token_bytes)
        pieces: list[Piece] = []
        for part in split:
            pieces += [part] if self._parser is None or isinstance(part, Thought) else self._parser.push(part)
        if self._parser is not None and ended:
            pieces += self._parser.finish()
        elif self._parser is not None and self._parser.full:
            self._call.cut(self._index)
        for piece in pieces:
            if isinstance(piece, str):
                self._said += piece
            elif isinstance(piece, CallDelta):
                note_call(self._calls, piece)
        if ended and all(call.done for call in self._calls):
            self._call.answer = _message(self._said, self._calls)
        return pieces
